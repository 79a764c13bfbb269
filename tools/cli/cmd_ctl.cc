// splice ctl: operating a running cluster. Now: the namespaces of the caller.
#include <cstdio>
#include <optional>

#include "services/base/byte_size.h"
#include "tools/cli/admin_flags.h"
#include "tools/cli/command.h"

namespace spl::cli {
namespace {

using nlohmann::json;

constexpr char kNamespaces[] = "/admin/v1/namespaces";

struct Flags {
  AdminFlags admin;
  std::string name;
  std::optional<uint64_t> quota_bytes, quota_chunks, ttl_seconds;
  std::optional<bool> is_public;
};

std::string PathOf(const Flags& flags) { return std::string(kNamespaces) + "/" + PercentEncode(flags.name); }

json SettingsOf(const Flags& flags) {
  json body = json::object();
  if (flags.quota_bytes.has_value()) body["quota_bytes"] = *flags.quota_bytes;
  if (flags.quota_chunks.has_value()) body["quota_chunks"] = *flags.quota_chunks;
  if (flags.ttl_seconds.has_value()) body["ttl_seconds"] = *flags.ttl_seconds;
  if (flags.is_public.has_value()) body["public"] = *flags.is_public;
  return body;
}

void PrintHead() {
  fmt::print("{:>10} {:>12} {:>12} {:>12} {:>10}  {}\n", "chunks", "KV", "quota", "quota chunks", "ttl", "name");
}

void PrintRow(const json& ns) {
  const auto limit = [&](const char* name) {
    const auto value = ns[name].get<uint64_t>();
    return value == 0 ? std::string("-") : fmt::format("{}", value);
  };
  const auto quota = ns["quota_bytes"].get<uint64_t>();
  fmt::print("{:>10} {:>12} {:>12} {:>12} {:>10}  {}{}{}\n", ns["chunks"].get<uint64_t>(),
             FormatByteSize(ns["bytes"].get<uint64_t>()), quota == 0 ? "-" : FormatByteSize(quota),
             limit("quota_chunks"), limit("ttl_seconds"), ns["name"].get<std::string>(),
             ns["public"].get<bool>() ? " (public)" : "", ns["implicit"].get<bool>() ? " (never created)" : "");
}

absl::Status PrintOne(const Flags& flags, const absl::StatusOr<json>& answer) {
  if (!answer.ok()) return answer.status();
  if (flags.admin.PrintedJson(*answer)) return absl::OkStatus();
  PrintHead();
  PrintRow(*answer);
  return absl::OkStatus();
}

absl::Status List(const Flags& flags) {
  SPLICE_ASSIGN_OR_RETURN(const auto client, flags.admin.Connect());
  SPLICE_ASSIGN_OR_RETURN(const json answer, client->Get(kNamespaces));
  if (flags.admin.PrintedJson(answer)) return absl::OkStatus();
  PrintHead();
  for (const json& ns : answer["data"]) PrintRow(ns);
  return absl::OkStatus();
}

absl::Status Create(const Flags& flags) {
  SPLICE_ASSIGN_OR_RETURN(const auto client, flags.admin.Connect());
  json body = SettingsOf(flags);
  body["name"] = flags.name;
  return PrintOne(flags, client->Post(kNamespaces, body));
}

absl::Status Stat(const Flags& flags) {
  SPLICE_ASSIGN_OR_RETURN(const auto client, flags.admin.Connect());
  return PrintOne(flags, client->Get(PathOf(flags)));
}

absl::Status Set(const Flags& flags) {
  SPLICE_ASSIGN_OR_RETURN(const auto client, flags.admin.Connect());
  return PrintOne(flags, client->Patch(PathOf(flags), SettingsOf(flags)));
}

absl::Status Delete(const Flags& flags) {
  SPLICE_ASSIGN_OR_RETURN(const auto client, flags.admin.Connect());
  SPLICE_ASSIGN_OR_RETURN(const json answer, client->Delete(PathOf(flags)));
  if (flags.admin.PrintedJson(answer)) return absl::OkStatus();
  fmt::print("{}: deleted with {} chunks, {}\n", flags.name, answer["chunks"].get<uint64_t>(),
             FormatByteSize(answer["bytes"].get<uint64_t>()));
  return absl::OkStatus();
}

void AddSettings(CLI::App& app, Flags& flags) {
  app.add_option_function<std::string>(
      "--quota",
      [&flags](const std::string& text) {
        const auto bytes = ParseByteSize(text);
        if (!bytes.ok()) throw CLI::ValidationError("--quota", MessageOf(bytes.status()));
        flags.quota_bytes = *bytes;
      },
      "KV on each store at most, e.g. 4GiB; 0: no limit");
  app.add_option("--quota-chunks", flags.quota_chunks, "chunks on each store at most; 0: no limit");
  app.add_option("--ttl-seconds", flags.ttl_seconds, "how long a chunk is kept; 0: for ever");
  app.add_option("--public", flags.is_public, "true for a name that begins with public/: shared by all callers");
}

}  // namespace

Command MakeCtlCommand(CLI::App& root) {
  auto flags = std::make_shared<Flags>();
  CLI::App& app = *root.add_subcommand("ctl", "Operate a running cluster: namespaces");
  app.require_subcommand(1);
  CLI::App& namespaces = *app.add_subcommand("namespaces", "Whose cached KV is kept, how much and for how long");
  namespaces.require_subcommand(1);
  namespaces.footer(
      "Examples:\n"
      "  splice ctl namespaces create docs --quota 4GiB --ttl-seconds 86400\n"
      "  splice ctl namespaces list --json\n"
      "  splice ctl namespaces set docs --quota 8GiB\n"
      "  splice ctl namespaces delete docs");
  auto runs = std::make_shared<std::vector<std::pair<CLI::App*, absl::Status (*)(const Flags&)>>>();
  const auto add = [&](const char* name, const char* help, absl::Status (*run)(const Flags&), bool named,
                       bool settings) {
    CLI::App& sub = *namespaces.add_subcommand(name, help);
    if (named) sub.add_option("NAME", flags->name, "as requests name it")->required();
    if (settings) AddSettings(sub, *flags);
    flags->admin.Register(sub);
    runs->emplace_back(&sub, run);
  };
  add("list", "Those that were created", List, false, false);
  add("create", "Make one, with limits", Create, true, true);
  add("stat", "Use and limits of one", Stat, true, false);
  add("set", "Change the limits that are given", Set, true, true);
  add("delete", "Drop one with its chunks", Delete, true, false);
  return {&app, [flags, runs]() -> absl::Status {
            for (const auto& [sub, run] : *runs) {
              if (sub->parsed()) return run(*flags);
            }
            return InvalidArgument("no command given");
          }};
}

}  // namespace spl::cli
