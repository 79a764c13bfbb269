// splice ctl: operates a running cluster: shows its work, sets switches, shows the planner's advice, lists the caller's
// namespaces.
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <optional>

#include "services/base/byte_size.h"
#include "services/base/byte_size_option.h"
#include "services/base/shutdown_signal.h"
#include "tools/cli/admin_flags.h"
#include "tools/cli/command.h"
#include "tools/cli/ctl_tables.h"
#include "tools/cli/terminal.h"

namespace spl::cli {
namespace {

using nlohmann::json;

constexpr char kNamespaces[] = "/admin/v1/namespaces";

struct Flags {
  AdminFlags admin;
  std::string name;
  std::optional<uint64_t> quota_bytes, quota_chunks, ttl_seconds;
  std::optional<bool> is_public;
  std::string id;    // id of a worker or request
  bool off = false;  // drain: take work again
  int interval_ms = 1000, rounds = 0;
  bool advise = false;
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

absl::Status Scale(const Flags& flags) {
  SPLICE_ASSIGN_OR_RETURN(const auto client, flags.admin.Connect());
  SPLICE_ASSIGN_OR_RETURN(const json answer, client->Get("/control/v1/scale"));
  if (flags.admin.PrintedJson(answer)) return absl::OkStatus();
  if (answer["data"].empty()) {
    fmt::print("no plan yet: no workers, or the router has just started\n");
    return absl::OkStatus();
  }
  fmt::print("{:<8} {:>8} {:>8} {:>8}  {:<9} {}\n", "pool", "current", "desired", "wanted", "reason", "leaving");
  for (const json& pool : answer["data"]) {
    std::string leaving;
    for (const json& worker : pool["leaving"]) leaving += (leaving.empty() ? "" : ", ") + worker.get<std::string>();
    fmt::print("{:<8} {:>8} {:>8} {:>8}  {:<9} {}\n", pool["pool"].get<std::string>(), pool["current"].get<uint32_t>(),
               pool["desired"].get<uint32_t>(), pool["wanted"].get<uint32_t>(), pool["reason"].get<std::string>(),
               leaving.empty() ? "-" : leaving);
  }
  return absl::OkStatus();
}

// ---- what the cluster does

void Print(const std::vector<std::string>& lines) {
  for (const std::string& line : lines) fmt::print("{}\n", line);
}

constexpr WindowSize kNoTerminal = {.columns = 160, .rows = 50};

absl::Status Show(const Flags& flags, const char* path, const std::function<void(const json&)>& print) {
  SPLICE_ASSIGN_OR_RETURN(const auto client, flags.admin.Connect());
  SPLICE_ASSIGN_OR_RETURN(const json answer, client->Get(path));
  if (!flags.admin.PrintedJson(answer)) print(answer);
  return absl::OkStatus();
}

absl::Status Status(const Flags& flags) {
  return Show(flags, "/control/v1/status", [](const json& answer) { Print(StatusLines(answer)); });
}
absl::Status Workers(const Flags& flags) {
  return Show(flags, "/control/v1/workers",
              [](const json& answer) { Print(WorkerLines(answer, /*width=*/0, SIZE_MAX)); });
}
absl::Status Requests(const Flags& flags) {
  return Show(flags, "/control/v1/requests", [](const json& answer) {
    Print(RequestLines(answer["active"], /*width=*/0, SIZE_MAX));
    fmt::print("\nended:\n");
    Print(RequestLines(answer["recent"], /*width=*/0, SIZE_MAX));
  });
}

absl::Status Quality(const Flags& flags) {
  return Show(flags, "/control/v1/quality", [](const json& answer) { Print(QualityLines(answer)); });
}

// The other screen of a terminal, without a cursor; what was there before comes back in the end.
class OtherScreen {
 public:
  explicit OtherScreen(bool terminal) : terminal_(terminal) { Send("\x1b[?1049h\x1b[?25l"); }
  ~OtherScreen() { Send("\x1b[?25h\x1b[?1049l"); }
  OtherScreen(const OtherScreen&) = delete;
  OtherScreen& operator=(const OtherScreen&) = delete;

 private:
  void Send(const char* text) const {
    if (!terminal_) return;
    std::fputs(text, stdout);
    std::fflush(stdout);
  }
  const bool terminal_;
};

absl::Status DrawTop(const Flags& flags, ApiClient& client, bool first) {
  SPLICE_ASSIGN_OR_RETURN(const json status, client.Get("/control/v1/status"));
  SPLICE_ASSIGN_OR_RETURN(const json workers, client.Get("/control/v1/workers"));
  SPLICE_ASSIGN_OR_RETURN(const json requests, client.Get("/control/v1/requests"));
  if (flags.admin.json) {
    fmt::print("{}\n", json{{"status", status}, {"workers", workers["data"]}, {"requests", requests}}.dump());
  } else if (const auto window = WindowOf(STDOUT_FILENO); window.has_value()) {
    // Line by line over what is there, which does not flicker. The last line has no end: it would scroll.
    std::string screen = "\x1b[H";
    const std::vector<std::string> lines = TopLines(status, workers, requests, *window);
    for (size_t i = 0; i < lines.size(); ++i) screen += lines[i] + "\x1b[K" + (i + 1 < lines.size() ? "\r\n" : "");
    fmt::print("{}\x1b[J", screen);
  } else {
    if (!first) fmt::print("\n");
    Print(TopLines(status, workers, requests, kNoTerminal));
  }
  std::fflush(stdout);
  return absl::OkStatus();
}

// Repeats until Ctrl-C.
absl::Status Top(const Flags& flags) {
  SPLICE_ASSIGN_OR_RETURN(const auto client, flags.admin.Connect());
  ShutdownSignal signal;
  const OtherScreen screen(!flags.admin.json && ::isatty(STDOUT_FILENO) != 0 && flags.rounds != 1);
  for (int round = 0; flags.rounds == 0 || round < flags.rounds; ++round) {
    SPLICE_RETURN_IF_ERROR(DrawTop(flags, *client, round == 0));
    if (flags.rounds != 0 && round + 1 == flags.rounds) break;
    if (signal.WaitFor(std::chrono::milliseconds(flags.interval_ms)) >= 0) break;
  }
  return absl::OkStatus();
}

absl::Status Cancel(const Flags& flags) {
  SPLICE_ASSIGN_OR_RETURN(const auto client, flags.admin.Connect());
  SPLICE_ASSIGN_OR_RETURN(const json answer,
                          client->Post("/control/v1/requests/" + PercentEncode(flags.id) + "/cancel", json::object()));
  if (!flags.admin.PrintedJson(answer)) fmt::print("{}: cancelled\n", flags.id);
  return absl::OkStatus();
}

absl::Status Drain(const Flags& flags) {
  SPLICE_ASSIGN_OR_RETURN(const auto client, flags.admin.Connect());
  SPLICE_ASSIGN_OR_RETURN(const json answer, client->Post("/control/v1/workers/" + PercentEncode(flags.id) + "/drain",
                                                          {{"draining", !flags.off}}));
  if (flags.admin.PrintedJson(answer)) return absl::OkStatus();
  fmt::print("{}: {}\n", flags.id,
             flags.off ? "takes requests again"
                       : "takes nothing new; what runs there goes on (splice ctl workers shows what is left)");
  return absl::OkStatus();
}

void AddSettings(CLI::App& app, Flags& flags) {
  AddByteSizeOption(app, "--quota", flags.quota_bytes, "KV on each store at most, e.g. 4GiB; 0: no limit");
  app.add_option("--quota-chunks", flags.quota_chunks, "chunks on each store at most; 0: no limit");
  app.add_option("--ttl-seconds", flags.ttl_seconds, "how long a chunk is kept; 0: for ever");
  app.add_option("--public", flags.is_public, "true for a name that begins with public/: shared by all callers");
}

}  // namespace

Command MakeCtlCommand(CLI::App& root) {
  auto flags = std::make_shared<Flags>();
  CLI::App& app = *root.add_subcommand("ctl", "Operate a running cluster");
  app.require_subcommand(1);
  app.footer(
      "Examples:\n"
      "  splice ctl status\n"
      "  splice ctl top                          live, until Ctrl-C\n"
      "  splice ctl drain prefill-0              before the machine goes; --off takes it back\n"
      "  splice ctl cancel REQUEST               its id is in x-request-id and in splice ctl requests\n"
      "With API keys all but namespaces need an operator's key (docs/operating.md).");
  CLI::App& namespaces = *app.add_subcommand("namespaces", "Namespaces of cached KV: quota, time to live, use");
  namespaces.require_subcommand(1);
  namespaces.footer(
      "Examples:\n"
      "  splice ctl namespaces create docs --quota 4GiB --ttl-seconds 86400\n"
      "  splice ctl namespaces list --json\n"
      "  splice ctl namespaces set docs --quota 8GiB\n"
      "  splice ctl namespaces delete docs");
  auto runs = std::make_shared<std::vector<std::pair<CLI::App*, absl::Status (*)(const Flags&)>>>();
  const auto operate = [&](const char* name, const char* help, absl::Status (*run)(const Flags&)) -> CLI::App& {
    CLI::App& sub = *app.add_subcommand(name, help);
    flags->admin.Register(sub);
    runs->emplace_back(&sub, run);
    return sub;
  };
  operate("status", "The router, the model and the two pools", Status);
  operate("workers", "Every worker with its load and its KV connections", Workers);
  operate("requests", "Requests under way, and the last that ended", Requests);
  operate("quality", "What workers' records of agreement say of methods, by namespace", Quality);
  CLI::App& top = operate("top", "Status, workers and requests, refreshed live", Top);
  top.add_option("--interval-ms", flags->interval_ms, "time between two refreshes")
      ->check(CLI::Range(100, 60'000))
      ->capture_default_str();
  top.add_option("--rounds", flags->rounds, "refreshes before it ends; 0: it ends with Ctrl-C")
      ->check(CLI::NonNegativeNumber);
  operate("cancel", "End a request", Cancel).add_option("REQUEST", flags->id, "its id")->required();
  CLI::App& drain = operate("drain", "Send nothing new to a worker", Drain);
  drain.add_option("WORKER", flags->id, "as splice ctl workers names it")->required();
  drain.add_flag("--off", flags->off, "take it back");
  const auto add = [&](const char* name, const char* help, absl::Status (*run)(const Flags&), bool named,
                       bool settings) {
    CLI::App& sub = *namespaces.add_subcommand(name, help);
    if (named) sub.add_option("NAME", flags->name, "as requests name it")->required();
    if (settings) AddSettings(sub, *flags);
    flags->admin.Register(sub);
    runs->emplace_back(&sub, run);
  };
  add("list", "List the namespaces that were created", List, false, false);
  add("create", "Create a namespace with limits", Create, true, true);
  add("stat", "Show use and limits of a namespace", Stat, true, false);
  add("set", "Change the given limits of a namespace", Set, true, true);
  add("delete", "Drop a namespace with its chunks", Delete, true, false);
  CLI::App& scale = *app.add_subcommand("scale", "How many workers each pool should have");
  scale.footer("The router's planner, with its targets: splice ctl scale --advise");
  scale
      .add_flag("--advise", flags->advise,
                "Print the advice; the only mode, since an autoscaler acts and not this program")
      ->required();
  flags->admin.Register(scale);
  runs->emplace_back(&scale, Scale);
  return {&app, [flags, runs]() -> absl::Status {
            for (const auto& [sub, run] : *runs) {
              if (sub->parsed()) return run(*flags);
            }
            return InvalidArgument("no command given");
          }};
}

}  // namespace spl::cli
