#include "tools/cli/eval_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "services/base/status.h"
#include "services/engine/runtime/logit_agreement.h"
#include "tools/cli/eval_plot.h"

namespace spl::cli {
namespace {

using nlohmann::json;

constexpr char kCore[] = "core tasks";
constexpr double kCoreAccuracy = 0.8;

// Wilson's interval, which is also sensible at 0 % and 100 %.
std::pair<double, double> Confidence95(int64_t correct, int64_t n) {
  const double z = 1.96, p = double(correct) / double(n), d = 1 + z * z / double(n);
  const double middle = p + z * z / (2.0 * double(n));
  const double half = z * std::sqrt(p * (1 - p) / double(n) + z * z / (4.0 * double(n) * double(n)));
  return {(middle - half) / d, (middle + half) / d};
}

double Percentile(std::vector<double> values, double p) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1, static_cast<size_t>(p * static_cast<double>(values.size())))];
}

double Percent(int64_t part, int64_t whole) { return whole > 0 ? 100.0 * double(part) / double(whole) : 0; }

// Mean over the cell's requests.
double MegabytesEach(int64_t bytes, const EvalCell& cell) {
  return cell.n > 0 ? double(bytes) / 1e6 / double(cell.n) : 0;
}

double Mean(const std::vector<double>& values) {
  return values.empty() ? 0 : std::accumulate(values.begin(), values.end(), 0.0) / double(values.size());
}

void Accumulate(EvalCell& into, const EvalCell& cell) {
  using C = EvalCell;
  for (int64_t C::*const sum :
       {&C::n, &C::correct, &C::first_equal, &C::first_compared, &C::prompt_tokens, &C::cached, &C::aligned,
        &C::recomputed, &C::same_context, &C::isolated, &C::foreign, &C::computed, &C::fetched, &C::wire, &C::kv_bytes})
    into.*sum += cell.*sum;
  into.cosines.insert(into.cosines.end(), cell.cosines.begin(), cell.cosines.end());
  into.ttft_ms.insert(into.ttft_ms.end(), cell.ttft_ms.begin(), cell.ttft_ms.end());
}

// Label for the tables: names the decode method only if one was chosen.
std::string MethodName(const std::string& reuse, const std::string& decode) {
  return decode == methods::kAuto ? reuse : reuse + " / " + decode;
}

bool IsOracle(const EvalKey& key) { return key.reuse == methods::kExact && methods::IsDense(key.decode); }

json MethodJson(const EvalKey& key) {
  return {{"task", key.task},
          {"length", key.length},
          {"reuse", key.reuse},
          {"decode", key.decode},
          {"provenance", key.provenance}};
}

EvalKey CoreKey(EvalKey key) {
  key.task = kCore;
  return key;
}

}  // namespace

absl::StatusOr<EvalGrouping> ParseEvalGrouping(const std::string& name) {
  for (const EvalGrouping grouping : {EvalGrouping::kPosition, EvalGrouping::kTurn}) {
    if (name == EvalGroupingName(grouping)) return grouping;
  }
  return InvalidArgument("--by {}: it must be position or turn", name);
}

const char* EvalGroupingName(EvalGrouping grouping) {
  return grouping == EvalGrouping::kPosition ? "position" : "turn";
}

EvalKey EvalReport::KeyOf(const EvalPlace& place, const EvalMethod& method) {
  return {place.task, place.length, method.label, method.decode_label,
          method.reuses_segments() ? ProvenanceName(method.provenance) : "-"};
}

EvalReport::Group EvalReport::GroupOf(EvalGrouping grouping, const EvalPlace& place) {
  if (grouping == EvalGrouping::kTurn) return {place.turn, fmt::format("turn {}", place.turn)};
  static constexpr const char* kPositions[] = {"begin", "middle", "end"};
  const auto* const known = std::find(std::begin(kPositions), std::end(kPositions), place.position);
  return {known - std::begin(kPositions), place.position.empty() ? "unknown" : place.position};
}

void EvalReport::Add(const EvalPlace& place, const EvalMethod& method, const TextResult& result, bool correct) {
  EvalCell one{.n = 1, .correct = correct, .ttft_ms = {result.ttft_s * 1e3}, .prompt_tokens = result.prompt_tokens};
  if (!result.receipt.is_object()) {  // in-process runs have no receipt, because they compute everything
    one.computed = result.prompt_tokens;
  } else {
    const auto number = [&](const char* pointer) {
      return result.receipt.value(json::json_pointer(pointer), int64_t{0});
    };
    one.cached = number("/tokens/cached");
    one.aligned = number("/tokens/aligned");
    one.recomputed = number("/tokens/recomputed");
    one.same_context = number("/copies/same_context");
    one.isolated = number("/copies/isolated");
    one.foreign = number("/copies/foreign");
    one.computed = number("/tokens/computed");
    one.fetched = number("/bytes/fetched");
    one.wire = number("/bytes/moved");
    one.kv_bytes = number("/bytes/decode_kv");
  }
  const EvalKey key = KeyOf(place, method);
  Accumulate(cells_[key], one);
  for (const EvalGrouping grouping : groupings_) Accumulate(groups_[grouping][key][GroupOf(grouping, place)], one);
  if (place.num_turns > 1)
    turns_.push_back({place, key, result.prompt_tokens, one.cached, result.ttft_s * 1e3, correct});
}

void EvalReport::Refuse(const EvalMethod& method, const std::string& why) {
  refused_[{method.label, method.decode_label}] = why;
}

void EvalReport::AddFirstLogits(const EvalPlace& place, const EvalMethod& method, std::span<const float> logits,
                                std::span<const float> exact) {
  EvalCell& cell = cells_[KeyOf(place, method)];
  ++cell.first_compared;
  cell.first_equal += std::max_element(logits.begin(), logits.end()) - logits.begin() ==
                      std::max_element(exact.begin(), exact.end()) - exact.begin();
  cell.cosines.push_back(engine::CosineOf(logits, exact));
}

std::set<std::pair<std::string, int64_t>> EvalReport::CoreTasks() const {
  std::set<std::pair<std::string, int64_t>> core;
  for (const auto& [key, cell] : cells_) {
    if (IsOracle(key) && double(cell.correct) >= kCoreAccuracy * double(cell.n)) core.insert({key.task, key.length});
  }
  return core;
}

std::map<EvalKey, EvalCell> EvalReport::CoreAverages() const {
  const auto core = CoreTasks();
  std::map<EvalKey, EvalCell> averages;
  for (const auto& [key, cell] : cells_) {
    if (core.contains({key.task, key.length})) Accumulate(averages[CoreKey(key)], cell);
  }
  return averages;
}

std::vector<std::pair<EvalKey, EvalReport::Groups>> EvalReport::GroupRows(EvalGrouping grouping) const {
  const auto found = groups_.find(grouping);
  if (found == groups_.end()) return {};
  const auto core = CoreTasks();
  std::vector<std::pair<EvalKey, Groups>> rows(found->second.begin(), found->second.end());
  std::map<EvalKey, Groups> sums;
  for (const auto& [key, groups] : found->second) {
    if (!core.contains({key.task, key.length})) continue;
    for (const auto& [group, cell] : groups) Accumulate(sums[CoreKey(key)][group], cell);
  }
  rows.insert(rows.end(), sums.begin(), sums.end());
  return rows;
}

void EvalReport::PrintTable() const {
  size_t width = 24;
  for (const auto& [key, cell] : cells_) width = std::max(width, MethodName(key.reuse, key.decode).size());
  fmt::print(
      "{:<16} {:>6} {:<{}} {:<8} {:>4} {:>8} {:>15} {:>8} {:>8} {:>7} {:>7} {:>7} {:>8} {:>8} {:>8} {:>8} {:>6} "
      "{:>7}\n",
      "task", "length", "reuse", width, "from", "n", "accuracy", "95 %", "ttft p50", "p95", "cached", "aligned",
      "recomp.", "computed", "fetched", "moved", "KV", "first=", "cosine");
  const auto row = [width](const EvalKey& key, const EvalCell& cell) {
    const auto& [task, length, reuse, decode, provenance] = key;
    const auto [low, high] = Confidence95(cell.correct, cell.n);
    fmt::print(
        "{:<16} {:>6} {:<{}} {:<8} {:>4} {:>7.1f}% {:>6.1f} – {:>5.1f}% {:>5.0f} ms {:>5.0f} ms {:>6.1f}% {:>6.1f}% "
        "{:>6.1f}% {:>7.1f}% {:>5.1f} MB {:>5.1f} MB {:>5.1f} MB {:>6} {:>7}\n",
        task, length, MethodName(reuse, decode), width, provenance, cell.n, Percent(cell.correct, cell.n), 100 * low,
        100 * high, Percentile(cell.ttft_ms, 0.5), Percentile(cell.ttft_ms, 0.95),
        Percent(cell.cached, cell.prompt_tokens), Percent(cell.aligned, cell.prompt_tokens),
        Percent(cell.recomputed, cell.prompt_tokens), Percent(cell.computed, cell.prompt_tokens),
        MegabytesEach(cell.fetched, cell), MegabytesEach(cell.wire, cell), MegabytesEach(cell.kv_bytes, cell),
        cell.first_compared > 0 ? fmt::format("{:.0f}%", Percent(cell.first_equal, cell.first_compared)) : "-",
        cell.first_compared > 0 ? fmt::format("{:.4f}", Mean(cell.cosines)) : "-");
  };
  for (const auto& [key, cell] : cells_) row(key, cell);
  for (const auto& [key, cell] : CoreAverages()) row(key, cell);
  for (const EvalGrouping grouping : groupings_) PrintGroups(grouping);
  if (!refused_.empty()) fmt::print("\nnot served together:\n");
  for (const auto& [methods, why] : refused_) fmt::print("  {} / {}: {}\n", methods.first, methods.second, why);
}

// A line for each cell, a column for each group: right answers / all answers.
void EvalReport::PrintGroups(EvalGrouping grouping) const {
  const auto rows = GroupRows(grouping);
  std::set<Group> columns;
  for (const auto& [key, groups] : rows) {
    for (const auto& [group, cell] : groups) columns.insert(group);
  }
  fmt::print("\n{:<16} {:>6} {:<40} {:<8}", std::string("by ") + EvalGroupingName(grouping), "length", "reuse", "from");
  for (const Group& group : columns) fmt::print(" {:>16}", group.name);
  fmt::print("\n");
  for (const auto& [key, groups] : rows) {
    fmt::print("{:<16} {:>6} {:<40} {:<8}", key.task, key.length, MethodName(key.reuse, key.decode), key.provenance);
    for (const Group& group : columns) {
      const auto cell = groups.find(group);
      fmt::print(" {:>16}",
                 cell == groups.end()
                     ? "-"
                     : fmt::format("{:.1f}% of {}", Percent(cell->second.correct, cell->second.n), cell->second.n));
    }
    fmt::print("\n");
  }
}

json EvalReport::ToJson() const {
  json rows = json::array();
  const auto row = [&](const EvalKey& key, const EvalCell& cell) {
    const auto [low, high] = Confidence95(cell.correct, cell.n);
    json entry = MethodJson(key);
    entry.update(
        {{"n", cell.n},
         {"accuracy", double(cell.correct) / double(cell.n)},
         {"ci95", {low, high}},
         {"ttft_ms", {{"p50", Percentile(cell.ttft_ms, 0.5)}, {"p95", Percentile(cell.ttft_ms, 0.95)}}},
         {"tokens",
          {{"prompt", cell.prompt_tokens},
           {"cached", cell.cached},
           {"aligned", cell.aligned},
           {"recomputed", cell.recomputed},
           {"computed", cell.computed}}},
         {"copies", {{"same_context", cell.same_context}, {"isolated", cell.isolated}, {"foreign", cell.foreign}}},
         {"first_token",
          {{"compared", cell.first_compared},
           {"equal", cell.first_equal},
           {"cosine_mean", Mean(cell.cosines)},
           {"cosine_p05", Percentile(cell.cosines, 0.05)}}},
         {"bytes", {{"fetched", cell.fetched}, {"wire", cell.wire}, {"decode_kv", cell.kv_bytes}}}});
    rows.push_back(std::move(entry));
  };
  for (const auto& [key, cell] : cells_) row(key, cell);
  for (const auto& [key, cell] : CoreAverages()) row(key, cell);
  json out = {{"rows", rows}};
  for (const auto& [methods, why] : refused_)
    out["refused"].push_back({{"reuse", methods.first}, {"decode", methods.second}, {"why", why}});
  for (const EvalGrouping grouping : groupings_) {
    for (const auto& [key, groups] : GroupRows(grouping)) {
      for (const auto& [group, cell] : groups) {
        const auto [low, high] = Confidence95(cell.correct, cell.n);
        json entry = MethodJson(key);
        entry.update({{"by", EvalGroupingName(grouping)},
                      {"group", group.name},
                      {"n", cell.n},
                      {"accuracy", double(cell.correct) / double(cell.n)},
                      {"ci95", {low, high}},
                      {"ttft_ms", {{"p50", Percentile(cell.ttft_ms, 0.5)}, {"p95", Percentile(cell.ttft_ms, 0.95)}}}});
        out["groups"].push_back(std::move(entry));
      }
    }
  }
  for (const Turn& turn : turns_) {
    json entry = MethodJson(turn.key);
    entry.update({{"id", turn.place.id},
                  {"turn", turn.place.turn},
                  {"position", turn.place.position},
                  {"history_tokens", turn.place.history_tokens},
                  {"prompt_tokens", turn.prompt_tokens},
                  {"cached_tokens", turn.cached},
                  {"ttft_ms", turn.ttft_ms},
                  {"correct", turn.correct}});
    out["turns"].push_back(std::move(entry));
  }
  return out;
}

bool EvalReport::IsCrossed() const {
  std::set<std::string> reuse, decode;
  for (const auto& [key, cell] : cells_) {
    reuse.insert(key.reuse);
    decode.insert(key.decode);
  }
  return reuse.size() > 1 && decode.size() > 1;
}

// Plots accuracy over median TTFT with one dot per method. The dot's area is the KV that decoding holds, relative to
// the largest, as in SamKV's figure 1.
std::string EvalReport::Plot(int64_t length, const std::string& provenance, PlotOf of) const {
  std::vector<PlotSeries> series;
  PlotAxis time{.label = "time to first token, median", .unit = " ms", .max = 0};
  const auto averages = CoreAverages();
  const auto shown = [&](const EvalKey& key) {
    if (key.length != length || (key.provenance != provenance && key.provenance != "-")) return false;
    return of == PlotOf::kAll || (of == PlotOf::kPrefill && methods::IsDense(key.decode)) ||
           (of == PlotOf::kDecode && key.reuse == methods::kExact);
  };
  double most = 0;
  for (const auto& [key, cell] : averages) {
    if (shown(key)) most = std::max(most, MegabytesEach(cell.kv_bytes, cell));
  }
  for (const auto& [key, cell] : averages) {
    if (!shown(key)) continue;
    const double accuracy = Percent(cell.correct, cell.n), ttft_ms = Percentile(cell.ttft_ms, 0.5);
    const double memory = MegabytesEach(cell.kv_bytes, cell), share = most > 0 ? memory / most : 0.25;
    series.push_back({fmt::format("{}: {:.1f} %, {:.0f} MB", MethodName(key.reuse, key.decode), accuracy, memory),
                      {{ttft_ms, accuracy, 3 + 11 * std::sqrt(share)}},
                      {}});
    time.max = std::max(time.max, ttft_ms);
  }
  if (series.empty()) return "";
  time.max = std::max(time.max, 1e-3);
  return ScatterPlot(fmt::format("{} tokens, segments cached {}{}", length, ProvenancePhrase(provenance),
                                 of == PlotOf::kPrefill  ? ": prefill methods"
                                 : of == PlotOf::kDecode ? ": decode methods behind an exact prefill"
                                                         : ""),
                     time, {.label = "", .unit = " %", .max = 100, .num_ticks = 5}, series);
}

// Accuracy of every pair over the core tasks: a row for each prefill method, a column for each decode method.
std::string EvalReport::PairTable(int64_t length, const std::string& provenance) const {
  std::map<std::string, std::map<std::string, EvalCell>> pairs;
  std::set<std::string> columns;
  for (const auto& [key, cell] : CoreAverages()) {
    if (key.length != length || (key.provenance != provenance && key.provenance != "-")) continue;
    pairs[key.reuse][key.decode] = cell;
    columns.insert(key.decode);
  }
  for (const auto& [methods, why] : refused_) {
    if (pairs.contains(methods.first)) columns.insert(methods.second);
  }
  if (pairs.empty()) return "";
  std::string html =
      fmt::format("<h3>{} tokens, segments cached {}: every pair, core tasks</h3><table class='pairs'><tr><th>", length,
                  ProvenancePhrase(provenance));
  for (const std::string& decode : columns) html += "<th>" + EscapeHtml(decode);
  for (const auto& [reuse, row] : pairs) {
    html += "<tr><th>" + EscapeHtml(reuse);
    for (const std::string& decode : columns) {
      const auto cell = row.find(decode);
      const auto refused = refused_.find({reuse, decode});
      if (cell != row.end()) {
        const double accuracy = Percent(cell->second.correct, cell->second.n);
        html += fmt::format("<td style='background:hsl({:.0f} 60% 85%)'>{:.1f}", 1.2 * accuracy, accuracy);
      } else {
        html += refused == refused_.end() ? "<td>" : "<td title='" + EscapeHtml(refused->second) + "'>refused";
      }
    }
  }
  return html + "</table>";
}

// Plots the TTFT of every turn over the tokens in front of its new text; the line connects the turns' medians.
std::string EvalReport::HistoryPlot(int64_t length) const {
  std::map<std::string, std::map<int64_t, std::vector<const Turn*>>> methods;  // by turn
  PlotAxis history{.label = "tokens of history in front of the turn", .unit = "", .max = 1};
  PlotAxis time{.label = "", .unit = " ms", .max = 1e-3};
  for (const Turn& turn : turns_) {
    if (turn.key.length != length) continue;
    std::string name = MethodName(turn.key.reuse, turn.key.decode);
    if (turn.key.provenance != "-") name += ", " + turn.key.provenance;
    methods[name][turn.place.turn].push_back(&turn);
    history.max = std::max(history.max, double(turn.place.history_tokens));
    time.max = std::max(time.max, turn.ttft_ms);
  }
  if (methods.empty()) return "";
  std::vector<PlotSeries> series;
  for (const auto& [name, turns] : methods) {
    PlotSeries& one = series.emplace_back(PlotSeries{name, {}, {}});
    for (const auto& [number, all] : turns) {
      std::vector<double> x, y;
      for (const Turn* turn : all) {
        one.dots.push_back({double(turn->place.history_tokens), turn->ttft_ms, 2});
        x.push_back(double(turn->place.history_tokens));
        y.push_back(turn->ttft_ms);
      }
      one.line.push_back({Percentile(x, 0.5), Percentile(y, 0.5), 0});
    }
  }
  return ScatterPlot(fmt::format("{} tokens: time to first token of each turn", length), history, time, series);
}

std::string EvalReport::GroupTable(EvalGrouping grouping) const {
  const auto rows = GroupRows(grouping);
  std::set<Group> columns;
  for (const auto& [key, groups] : rows) {
    for (const auto& [group, cell] : groups) columns.insert(group);
  }
  std::string html =
      fmt::format("<h2>By {}</h2><table><tr><th>task<th>length<th>reuse<th>cached", EvalGroupingName(grouping));
  for (const Group& group : columns) html += "<th>" + EscapeHtml(group.name);
  for (const auto& [key, groups] : rows) {
    html +=
        fmt::format("<tr{}><td>{}<td>{}<td>{}<td>{}", key.task == kCore ? " class='core'" : "", EscapeHtml(key.task),
                    key.length, EscapeHtml(MethodName(key.reuse, key.decode)), key.provenance);
    for (const Group& group : columns) {
      const auto cell = groups.find(group);
      html += cell == groups.end()
                  ? "<td>"
                  : fmt::format("<td>{:.1f} % of {}", Percent(cell->second.correct, cell->second.n), cell->second.n);
    }
  }
  return html + "</table>";
}

std::string EvalReport::ToHtml(const std::string& title) const {
  std::string html = fmt::format(
      "<!doctype html><html lang='en'><meta charset='utf-8'><title>{0}</title><style>body{{font:14px "
      "system-ui,sans-serif;"
      "margin:2em;max-width:1200px}}table{{border-collapse:collapse}}td,th{{padding:2px 8px;text-align:right;"
      "border-bottom:1px solid #ddd}}td:nth-child(-n+4),th:nth-child(-n+4){{text-align:left}}.core{{font-weight:bold}}"
      "</style><h1>{0}</h1><p>Accuracy: the answer equals the expected text. Interval: Wilson, 95 %. Core tasks: those "
      "that <code>exact</code> answers at 80 % or more at that length. A dot's area is the KV that the decode worker "
      "holds when it begins.</p>",
      EscapeHtml(title));
  std::set<int64_t> lengths;
  for (const auto& [key, cell] : cells_) lengths.insert(key.length);
  for (const int64_t length : lengths) {
    for (const char* provenance : {"context", "isolated", "foreign"}) {
      const bool any = std::any_of(cells_.begin(), cells_.end(), [&](const auto& entry) {
        return entry.first.length == length && entry.first.provenance == provenance;
      });
      if (!any) continue;
      if (!IsCrossed()) {
        html += Plot(length, provenance, PlotOf::kAll);
        continue;
      }
      html += Plot(length, provenance, PlotOf::kPrefill) + Plot(length, provenance, PlotOf::kDecode);
      html += PairTable(length, provenance);
    }
    html += HistoryPlot(length);
  }
  for (const EvalGrouping grouping : groupings_) html += GroupTable(grouping);
  html +=
      "<h2>Cells</h2><table><tr><th>task<th>length<th>reuse<th>cached<th>n<th>accuracy<th>95 %<th>TTFT p50<th>p95<th>"
      "prefix<th>aligned<th>recomputed<th>computed<th>fetched<th>moved<th>KV<th>first token</tr>";
  const auto row = [&](const EvalKey& key, const EvalCell& cell) {
    const auto& [task, length, reuse, decode, provenance] = key;
    const auto [low, high] = Confidence95(cell.correct, cell.n);
    html += fmt::format(
        "<tr{}><td>{}<td>{}<td>{}<td>{}<td>{}<td>{:.1f} %<td>{:.1f}–{:.1f}<td>{:.0f} ms<td>{:.0f} ms<td>{:.1f} %"
        "<td>{:.1f} %<td>{:.1f} %<td>{:.1f} %<td>{:.1f} MB<td>{:.1f} MB<td>{:.1f} MB<td>{}</tr>",
        task == kCore ? " class='core'" : "", task, length, EscapeHtml(MethodName(reuse, decode)), provenance, cell.n,
        Percent(cell.correct, cell.n), 100 * low, 100 * high, Percentile(cell.ttft_ms, 0.5),
        Percentile(cell.ttft_ms, 0.95), Percent(cell.cached, cell.prompt_tokens),
        Percent(cell.aligned, cell.prompt_tokens), Percent(cell.recomputed, cell.prompt_tokens),
        Percent(cell.computed, cell.prompt_tokens), MegabytesEach(cell.fetched, cell), MegabytesEach(cell.wire, cell),
        MegabytesEach(cell.kv_bytes, cell),
        cell.first_compared > 0 ? fmt::format("{:.0f} % equal, cosine {:.4f}",
                                              Percent(cell.first_equal, cell.first_compared), Mean(cell.cosines))
                                : "");
  };
  for (const auto& [key, cell] : CoreAverages()) row(key, cell);
  for (const auto& [key, cell] : cells_) row(key, cell);
  return html + "</table></html>\n";
}

}  // namespace spl::cli
