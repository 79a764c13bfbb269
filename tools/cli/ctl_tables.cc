#include "tools/cli/ctl_tables.h"

#include <fmt/format.h>

#include <algorithm>

#include "tools/cli/text_table.h"

namespace spl::cli {
namespace {

using nlohmann::json;

// Names come from callers and workers.
std::string Text(const json& value) { return WithoutControls(value.get<std::string>()); }

std::string Seconds(double s) {
  if (s < 1) return fmt::format("{:.0f} ms", s * 1e3);
  return s < 120 ? fmt::format("{:.1f} s", s) : fmt::format("{:.0f} min", s / 60);
}

// The method that ran; until that is known, the one that was asked for.
std::string ReuseOf(const json& request) {
  const json ran = request.value("ran", json());
  const std::string name = ran.is_object() ? Text(ran["reuse"]) : Text(request["reuse"]);
  return name.empty() ? "auto" : name;
}

double KvShare(const json& decode) {
  const double total = decode["total_pages"];
  return total > 0 ? 100 * (1 - decode["free_pages"].get<double>() / total) : 0;
}

std::string LinksOf(const json& worker) {
  std::string links;
  if (worker["role"] == "prefill") {
    for (const json& link : worker["links"])
      links += fmt::format("{}{}: {}, {:.1f} GB/s", links.empty() ? "" : "; ", Text(link["decode"]),
                           Text(link["transport"]), link["bytes_per_second"].get<double>() / 1e9);
    return links.empty() ? "none" : links;
  }
  if (const json& local = worker.value("local_prefill", json()); local.is_object())
    links = fmt::format("prefills up to {} new tokens, {} queued", local["max_new_tokens"].get<uint64_t>(),
                        local["queued_tokens"].get<uint64_t>());
  return links;
}

void Append(std::vector<std::string>& lines, std::vector<std::string> more) {
  lines.insert(lines.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
}

}  // namespace

std::vector<std::string> StatusLines(const json& s) {
  const json &prefill = s["pools"]["prefill"], &decode = s["pools"]["decode"];
  return {
      fmt::format("{}, context {}: {}{}, up {}, version {}", Text(s["model"]["name"]),
                  s["model"]["max_context"].get<uint64_t>(),
                  s["ready"].get<bool>() ? "ready" : "NOT READY, no connected pair of workers",
                  s["draining"].get<bool>() ? ", draining" : "", Seconds(s["uptime_seconds"]), Text(s["version"])),
      fmt::format("requests   {} running, {} waiting", s["requests"]["running"].get<uint64_t>(),
                  s["requests"]["waiting"].get<uint64_t>()),
      fmt::format("prefill    {} workers ({} draining), {} tokens queued, {:.0f} tokens/s",
                  prefill["workers"].get<uint64_t>(), prefill["draining"].get<uint64_t>(),
                  prefill["queued_tokens"].get<uint64_t>(), prefill["tokens_per_second"].get<double>()),
      fmt::format("decode     {} workers ({} draining), {} of {} sequences, KV {:.1f} % full",
                  decode["workers"].get<uint64_t>(), decode["draining"].get<uint64_t>(),
                  decode["sequences"].get<uint64_t>(), decode["max_sequences"].get<uint64_t>(), KvShare(decode)),
  };
}

std::vector<std::string> WorkerLines(const json& workers, size_t width, size_t most_rows) {
  TextTable table({{.title = "worker", .short_columns = 16},
                   {.title = "role", .drop = 2},
                   {.title = "state"},
                   {.title = "address", .drop = 3},
                   {.title = "KV", .right = true},
                   {.title = "load", .drop = 1},
                   {.title = "KV connections", .drop = 4, .short_columns = 32}});
  for (const json& w : workers["data"]) {
    const bool prefill = w["role"] == "prefill";
    const std::string load =
        prefill ? fmt::format("{} tokens queued, {:.0f}/s", w["queued_tokens"].get<uint64_t>(),
                              w["tokens_per_second"].get<double>())
                : fmt::format("{} of {} sequences, {:.1f} ms/step", w["sequences"].get<uint64_t>(),
                              w["max_sequences"].get<uint64_t>(), w["step_seconds"].get<double>() * 1e3);
    table.AddRow({Text(w["worker"]), Text(w["role"]), w["draining"].get<bool>() ? "draining" : "ready",
                  Text(w["address"]), prefill ? "" : fmt::format("{:.1f} %", KvShare(w)), load, LinksOf(w)});
  }
  return table.Lines(width, most_rows);
}

std::vector<std::string> RequestLines(const json& requests, size_t width, size_t most_rows) {
  TextTable table({{.title = "request", .short_columns = 9},
                   {.title = "caller", .drop = 3, .short_columns = 14},
                   {.title = "stage"},
                   {.title = "reuse", .drop = 4},
                   {.title = "prompt", .right = true},
                   {.title = "reused", .right = true, .drop = 2},
                   {.title = "output", .right = true},
                   {.title = "first", .right = true, .drop = 1},
                   {.title = "time", .right = true},
                   {.title = "workers", .drop = 5}});
  for (const json& r : requests) {
    const std::string status = WithoutControls(r.value("status", ""));
    table.AddRow({Text(r["request_id"]), Text(r["caller"]),
                  r["stage"] == "done" ? status.substr(0, status.find(':')) : Text(r["stage"]), ReuseOf(r),
                  std::to_string(r["tokens"]["prompt"].get<uint64_t>()),
                  std::to_string(r["tokens"]["cached"].get<uint64_t>()),
                  std::to_string(r["tokens"]["completion"].get<uint64_t>()), Seconds(r["seconds"]["ttft"]),
                  Seconds(r["seconds"]["total"]),
                  fmt::format("{} > {}", Text(r["workers"]["prefill"]), Text(r["workers"]["decode"]))});
  }
  return table.Lines(width, most_rows);
}

std::vector<std::string> QualityLines(const json& quality) {
  TextTable table({{.title = "namespace"},
                   {.title = "caller"},
                   {.title = "method"},
                   {.title = "worker"},
                   {.title = "agreement", .right = true},
                   {.title = "at least", .right = true},
                   {.title = "compared", .right = true},
                   {.title = "contract", .right = true},
                   {.title = "verdict"},
                   {.title = "seen", .right = true}});
  const auto share = [](const json& value) {
    return value.is_null() ? std::string("-") : fmt::format("{:.4f}", value.get<double>());
  };
  for (const json& r : quality["data"]) {
    table.AddRow({Text(r["namespace"]), Text(r["caller"]), Text(r["method"]), Text(r["worker"]), share(r["agreement"]),
                  share(r["agreement_low"]), fmt::format("{:.0f}", r["comparisons"].get<double>()), share(r["quality"]),
                  Text(r["verdict"]), Seconds(r["seconds_ago"]) + " ago"});
  }
  if (table.num_rows() == 0)
    return {"no records yet: no request got its method from auto or had a contract since the router started"};
  return table.Lines(/*width=*/0, SIZE_MAX);
}

std::vector<std::string> TopLines(const json& status, const json& workers, const json& requests, WindowSize window) {
  std::vector<std::string> lines;
  for (const std::string& line : StatusLines(status)) lines.push_back(CutText(line, window.columns));
  // Each list has an empty line in front and a line of titles; the last one a title of its own.
  constexpr size_t kAround = 2 + 2 + 3;
  const size_t rows = window.rows - std::min(window.rows, lines.size() + kAround);
  const size_t for_workers = std::min(workers["data"].size(), std::max<size_t>(rows / 3, 1));
  const size_t ended = std::min<size_t>(requests["recent"].size(), (rows - std::min(rows, for_workers)) / 3);
  const size_t for_active = std::min(requests["active"].size(), rows - std::min(rows, for_workers + ended));
  lines.emplace_back();
  Append(lines, WorkerLines(workers, window.columns, for_workers));
  lines.emplace_back();
  Append(lines, RequestLines(requests["active"], window.columns, for_active));
  lines.emplace_back();
  lines.push_back(CutText("ended:", window.columns));
  Append(lines, RequestLines(requests["recent"], window.columns, rows - std::min(rows, for_workers + for_active)));
  if (lines.size() > window.rows) lines.resize(window.rows);
  return lines;
}

}  // namespace spl::cli
