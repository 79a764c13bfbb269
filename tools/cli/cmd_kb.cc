// splice kb: knowledge bases of a running cluster.
#include <unistd.h>

#include <cstdio>
#include <ctime>

#include "services/base/byte_size.h"
#include "tools/cli/admin_flags.h"
#include "tools/cli/command.h"
#include "tools/cli/kb_documents.h"
#include "tools/cli/progress_line.h"

namespace spl::cli {
namespace {

using nlohmann::json;

constexpr char kBases[] = "/admin/v1/knowledge_bases";

struct Flags {
  AdminFlags admin;
  std::string name;
  std::string documents, instruction;
  bool no_swap = false;
  bool in_memory = false;
  bool together = false;
  uint64_t version = 0;  // 0: the flag was not given
  uint64_t from = 0, to = 0;
};

std::string PathOf(const Flags& flags) { return std::string(kBases) + "/" + PercentEncode(flags.name); }

std::string Time(int64_t unix_seconds) {
  const std::time_t time = unix_seconds;
  std::tm utc{};
  gmtime_r(&time, &utc);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S", &utc);
  return text;
}

// Publishing says how much KV there is; the stores keep more than that.
std::string FreedText(uint64_t bytes, uint64_t kv_bytes, uint64_t chunks) {
  std::string text = fmt::format("freed {} in {} chunks", FormatByteSize(bytes), chunks);
  if (kv_bytes > 0 && kv_bytes < bytes)
    text += fmt::format(": {} of KV, {} of summaries and four-bit copies", FormatByteSize(kv_bytes),
                        FormatByteSize(bytes - kv_bytes));
  return text;
}

void PrintVersions(const json& base) {
  fmt::print("  {:>7}  {:<10} {:>9} {:>10} {:>8} {:>12}  {}\n", "version", "state", "documents", "tokens", "chunks",
             "KV", "created (UTC)");
  for (const json& v : base["versions"]) {
    fmt::print("{} {:>7}  {:<10} {:>9} {:>10} {:>8} {:>12}  {}\n", v["current"].get<bool>() ? "*" : " ",
               v["version"].get<uint64_t>(), v["state"].get<std::string>(), v["documents"].get<uint64_t>(),
               v["tokens"].get<uint64_t>(), v["chunks"].get<uint64_t>(), FormatByteSize(v["bytes"].get<uint64_t>()),
               Time(v["created"].get<int64_t>()));
    if (v["failure"].is_string()) fmt::print("           {}\n", v["failure"].get<std::string>());
  }
}

absl::Status Publish(const Flags& flags) {
  SPLICE_ASSIGN_OR_RETURN(const std::vector<KbFile> documents, ReadDocuments(flags.documents));
  SPLICE_ASSIGN_OR_RETURN(const std::string instruction, ReadFileOrText(flags.instruction));
  json body = {{"name", flags.name},     {"instruction", instruction},  {"documents", json::array()},
               {"swap", !flags.no_swap}, {"durable", !flags.in_memory}, {"together", flags.together},
               {"stream", true}};
  for (const KbFile& d : documents) body["documents"].push_back({{"id", d.id}, {"text", d.text}});
  SPLICE_ASSIGN_OR_RETURN(const auto client, flags.admin.Connect());
  ProgressLine progress;
  json version;
  const absl::Status status = client->PostStream(kBases, body, [&](const json& event) {
    if (event.value("object", "") == "knowledge_base.version") version = event;
    if (event.value("object", "") == "knowledge_base.progress") {
      const auto done = event["tokens_done"].get<uint64_t>(), total = event["tokens"].get<uint64_t>();
      progress.Update(done, total,
                      fmt::format("{} of {} contexts, {} of {} tokens", event["contexts_done"].get<uint64_t>(),
                                  event["contexts"].get<uint64_t>(), done, total));
    }
    return true;
  });
  progress.Finish();
  if (!flags.in_memory && MessageOf(status).find("(--data-dir)") != std::string::npos)
    return Annotate(status, "give the store a --data-dir, or publish with --in-memory to lose the documents with it");
  SPLICE_RETURN_IF_ERROR(status);
  if (!version.is_object()) return absl::UnavailableError("the stream ended before the version was ready");
  if (flags.admin.PrintedJson(version)) return absl::OkStatus();
  fmt::print("{}: version {} is ready{}: {} documents, {} tokens, {} of KV\n", flags.name,
             version["version"].get<uint64_t>(), version["current"].get<bool>() ? " and current" : "",
             version["documents"].get<uint64_t>(), version["tokens"].get<uint64_t>(),
             FormatByteSize(version["bytes"].get<uint64_t>()));
  return absl::OkStatus();
}

absl::Status List(const Flags& flags) {
  SPLICE_ASSIGN_OR_RETURN(const auto client, flags.admin.Connect());
  SPLICE_ASSIGN_OR_RETURN(const json answer, client->Get(kBases));
  if (flags.admin.PrintedJson(answer)) return absl::OkStatus();
  for (const json& base : answer["data"]) {
    fmt::print("{}\n", base["name"].get<std::string>());
    PrintVersions(base);
  }
  return absl::OkStatus();
}

absl::Status Show(const Flags& flags) {
  SPLICE_ASSIGN_OR_RETURN(const auto client, flags.admin.Connect());
  const std::string query = flags.version == 0 ? "" : fmt::format("?version={}", flags.version);
  SPLICE_ASSIGN_OR_RETURN(const json answer, client->Get(PathOf(flags) + query));
  if (flags.admin.PrintedJson(answer)) return absl::OkStatus();
  PrintVersions(answer);
  if (answer["shown_version"].is_null()) return absl::OkStatus();
  fmt::print("\ndocuments of version {}\n", answer["shown_version"].get<uint64_t>());
  for (const json& d : answer["documents"]) {
    fmt::print("  {:>8} tokens  context {:>4}  {}  {}\n", d["tokens"].get<uint64_t>(), d["context"].get<uint64_t>(),
               d["sha256"].get<std::string>().substr(0, 12), d["id"].get<std::string>());
  }
  return absl::OkStatus();
}

absl::Status Diff(const Flags& flags) {
  if ((flags.from == 0) != (flags.to == 0)) return InvalidArgument("diff takes two versions or none");
  SPLICE_ASSIGN_OR_RETURN(const auto client, flags.admin.Connect());
  const std::string query = flags.from == 0 ? "" : fmt::format("?from={}&to={}", flags.from, flags.to);
  SPLICE_ASSIGN_OR_RETURN(const json answer, client->Get(PathOf(flags) + "/diff" + query));
  if (flags.admin.PrintedJson(answer)) return absl::OkStatus();
  fmt::print("version {} to {}: {} unchanged{}\n", answer["from"].get<uint64_t>(), answer["to"].get<uint64_t>(),
             answer["unchanged"].get<uint64_t>(),
             answer["instruction_changed"].get<bool>() ? ", the instruction differs" : "");
  for (const auto& [mark, list] : {std::pair{"+", "added"}, {"-", "removed"}, {"~", "changed"}}) {
    for (const json& id : answer[list]) fmt::print("{} {}\n", mark, id.get<std::string>());
  }
  return absl::OkStatus();
}

absl::Status PrintCurrent(const Flags& flags, const absl::StatusOr<json>& answer) {
  if (!answer.ok()) return answer.status();
  if (flags.admin.PrintedJson(*answer)) return absl::OkStatus();
  fmt::print("{}: version {} is current\n", flags.name, (*answer)["current"].get<uint64_t>());
  return absl::OkStatus();
}

absl::Status Swap(const Flags& flags) {
  SPLICE_ASSIGN_OR_RETURN(const auto client, flags.admin.Connect());
  return PrintCurrent(flags, client->Post(PathOf(flags) + "/swap", {{"version", flags.version}}));
}

absl::Status Rollback(const Flags& flags) {
  SPLICE_ASSIGN_OR_RETURN(const auto client, flags.admin.Connect());
  return PrintCurrent(flags, client->Post(PathOf(flags) + "/rollback", json::object()));
}

absl::Status Delete(const Flags& flags) {
  SPLICE_ASSIGN_OR_RETURN(const auto client, flags.admin.Connect());
  const std::string version = flags.version == 0 ? "" : fmt::format("/versions/{}", flags.version);
  SPLICE_ASSIGN_OR_RETURN(const json answer, client->Delete(PathOf(flags) + version));
  if (flags.admin.PrintedJson(answer)) return absl::OkStatus();
  const auto versions = answer["versions"].get<uint64_t>();
  fmt::print("{}: deleted {} version{}; {}\n", flags.name, versions, versions == 1 ? "" : "s",
             FreedText(answer["bytes"].get<uint64_t>(), answer.value("kv_bytes", uint64_t{0}),
                       answer["chunks"].get<uint64_t>()));
  return absl::OkStatus();
}

}  // namespace

Command MakeKbCommand(CLI::App& root) {
  auto flags = std::make_shared<Flags>();
  CLI::App& app = *root.add_subcommand("kb", "Knowledge bases: documents whose KV is computed once and kept");
  app.footer(
      "Examples:\n"
      "  splice kb publish ships --documents ships.jsonl --instruction 'Answer from the documents.'\n"
      "  splice kb show ships\n"
      "  splice kb publish ships --documents ships/ --no-swap && splice kb diff ships 1 2 && splice kb swap ships 2\n"
      "  splice kb rollback ships\n"
      "  splice kb delete ships --version 1\n\n"
      "Requests name a document with the content part\n"
      "  {\"type\":\"segment\",\"knowledge_base\":\"ships\",\"document\":\"faq-12\"}\n"
      "See docs/knowledge-bases.md.");
  app.require_subcommand(1);
  auto runs = std::make_shared<std::vector<std::pair<CLI::App*, absl::Status (*)(const Flags&)>>>();
  const auto add = [&](const char* name, const char* help, absl::Status (*run)(const Flags&), bool named) -> CLI::App& {
    CLI::App& sub = *app.add_subcommand(name, help);
    if (named) sub.add_option("NAME", flags->name, "of the knowledge base")->required();
    flags->admin.Register(sub);
    runs->emplace_back(&sub, run);
    return sub;
  };
  CLI::App& publish = add("publish", "Compute documents and make them a new version", Publish, true);
  publish
      .add_option("--documents", flags->documents,
                  "a file with one {\"id\",\"text\"} a line, or a folder whose files are the documents")
      ->required()
      ->check(CLI::ExistingPath);
  publish.add_option("--instruction", flags->instruction,
                     "text in front of the documents while they are computed: a file, or the text itself");
  publish.add_flag(
      "--together", flags->together,
      "compute each document behind those before it: for documents that requests always use together, in this order");
  publish.add_flag("--no-swap", flags->no_swap, "leave the current version current");
  publish.add_flag("--in-memory", flags->in_memory,
                   "accept chunk stores without a disk, which lose the documents when they end");
  add("list", "All knowledge bases", List, false);
  add("show", "Versions and documents", Show, true)
      .add_option("--version", flags->version, "version whose documents are shown (default: the current one)")
      ->check(CLI::PositiveNumber);
  CLI::App& diff =
      add("diff", "Documents that differ between two versions (default: the last two current ones)", Diff, true);
  diff.add_option("FROM", flags->from)->check(CLI::PositiveNumber);
  diff.add_option("TO", flags->to)->check(CLI::PositiveNumber);
  add("swap", "Make another ready version current", Swap, true)
      .add_option("VERSION", flags->version)
      ->required()
      ->check(CLI::PositiveNumber);
  add("rollback", "Make the version current that was before", Rollback, true);
  add("delete", "Drop a knowledge base, or one version of it, with its chunks", Delete, true)
      .add_option("--version", flags->version, "only this version")
      ->check(CLI::PositiveNumber);
  return {&app, [flags, runs]() -> absl::Status {
            for (const auto& [sub, run] : *runs) {
              if (sub->parsed()) return run(*flags);
            }
            return InvalidArgument("no command given");
          }};
}

}  // namespace spl::cli
