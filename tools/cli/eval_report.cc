#include "tools/cli/eval_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

namespace spl::cli {
namespace {

using nlohmann::json;

constexpr char kCore[] = "core tasks";
constexpr double kCoreAccuracy = 0.8;

// Wilson's interval: sensible at 0 % and 100 % too.
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

double Mean(const std::vector<double>& values) {
  return values.empty() ? 0 : std::accumulate(values.begin(), values.end(), 0.0) / double(values.size());
}

double Cosine(std::span<const float> a, std::span<const float> b) {
  double ab = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    ab += double(a[i]) * b[i];
    aa += double(a[i]) * a[i];
    bb += double(b[i]) * b[i];
  }
  return ab / std::sqrt(std::max(aa * bb, 1e-300));
}

void Accumulate(EvalCell& into, const EvalCell& cell) {
  into.n += cell.n;
  into.correct += cell.correct;
  into.first_equal += cell.first_equal;
  into.first_compared += cell.first_compared;
  into.cosines.insert(into.cosines.end(), cell.cosines.begin(), cell.cosines.end());
  into.ttft_ms.insert(into.ttft_ms.end(), cell.ttft_ms.begin(), cell.ttft_ms.end());
  into.prompt_tokens += cell.prompt_tokens;
  into.cached += cell.cached;
  into.aligned += cell.aligned;
  into.recomputed += cell.recomputed;
  into.computed += cell.computed;
  into.fetched += cell.fetched;
  into.wire += cell.wire;
}

std::string Escape(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '&')
      out += "&amp;";
    else
      out += c;
  }
  return out;
}

// As the tables show it: what it decodes with only where that was chosen.
std::string MethodName(const std::string& reuse, const std::string& decode) {
  return decode == "auto" ? reuse : reuse + " / " + decode;
}

bool IsOracle(const std::string& reuse, const std::string& decode) {
  return reuse == "exact" && (decode == "auto" || decode == "dense");
}

constexpr const char* kColours[] = {"#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd",
                                    "#8c564b", "#17becf", "#7f7f7f", "#e377c2", "#bcbd22"};

}  // namespace

EvalReport::Key EvalReport::KeyOf(const std::string& task, int64_t length, const EvalMethod& method) {
  return {task, length, method.label, method.decode_label,
          method.reuses_segments() ? ProvenanceName(method.provenance) : "-"};
}

void EvalReport::Add(const std::string& task, int64_t length, const EvalMethod& method, const TextResult& result,
                     bool correct) {
  EvalCell& cell = cells_[KeyOf(task, length, method)];
  ++cell.n;
  cell.correct += correct;
  cell.ttft_ms.push_back(result.ttft_s * 1e3);
  cell.prompt_tokens += result.prompt_tokens;
  if (!result.receipt.is_object()) {  // in-process runs have no receipt: they compute everything
    cell.computed += result.prompt_tokens;
    return;
  }
  const auto number = [&](const char* pointer) {
    return result.receipt.value(json::json_pointer(pointer), int64_t{0});
  };
  cell.cached += number("/tokens/cached");
  cell.aligned += number("/tokens/aligned");
  cell.recomputed += number("/tokens/recomputed");
  cell.computed += number("/tokens/computed");
  cell.fetched += number("/bytes/fetched");
  cell.wire += number("/bytes/moved");
}

void EvalReport::AddFirstLogits(const std::string& task, int64_t length, const EvalMethod& method,
                                std::span<const float> logits, std::span<const float> exact) {
  EvalCell& cell = cells_[KeyOf(task, length, method)];
  ++cell.first_compared;
  cell.first_equal += std::max_element(logits.begin(), logits.end()) - logits.begin() ==
                      std::max_element(exact.begin(), exact.end()) - exact.begin();
  cell.cosines.push_back(Cosine(logits, exact));
}

std::map<EvalReport::Key, EvalCell> EvalReport::CoreAverages() const {
  std::set<std::pair<std::string, int64_t>> core;
  for (const auto& [key, cell] : cells_) {
    if (IsOracle(std::get<2>(key), std::get<3>(key)) && double(cell.correct) >= kCoreAccuracy * double(cell.n))
      core.insert({std::get<0>(key), std::get<1>(key)});
  }
  std::map<Key, EvalCell> averages;
  for (const auto& [key, cell] : cells_) {
    if (!core.contains({std::get<0>(key), std::get<1>(key)})) continue;
    Key average = key;
    std::get<0>(average) = kCore;
    Accumulate(averages[average], cell);
  }
  return averages;
}

void EvalReport::PrintTable() const {
  fmt::print("{:<16} {:>6} {:<32} {:<8} {:>4} {:>8} {:>15} {:>8} {:>8} {:>7} {:>7} {:>7} {:>7} {:>6} {:>7}\n", "task",
             "length", "reuse", "from", "n", "accuracy", "95 %", "ttft p50", "p95", "cached", "aligned", "recomp.",
             "computed", "first=", "cosine");
  const auto row = [](const Key& key, const EvalCell& cell) {
    const auto& [task, length, reuse, decode, provenance] = key;
    const auto [low, high] = Confidence95(cell.correct, cell.n);
    fmt::print(
        "{:<16} {:>6} {:<32} {:<8} {:>4} {:>7.1f}% {:>6.1f} – {:>5.1f}% {:>5.0f} ms {:>5.0f} ms {:>6.1f}% {:>6.1f}% "
        "{:>6.1f}% {:>7.1f}% {:>6} {:>7}\n",
        task, length, MethodName(reuse, decode), provenance, cell.n, Percent(cell.correct, cell.n), 100 * low,
        100 * high, Percentile(cell.ttft_ms, 0.5), Percentile(cell.ttft_ms, 0.95),
        Percent(cell.cached, cell.prompt_tokens), Percent(cell.aligned, cell.prompt_tokens),
        Percent(cell.recomputed, cell.prompt_tokens), Percent(cell.computed, cell.prompt_tokens),
        cell.first_compared > 0 ? fmt::format("{:.0f}%", Percent(cell.first_equal, cell.first_compared)) : "-",
        cell.first_compared > 0 ? fmt::format("{:.4f}", Mean(cell.cosines)) : "-");
  };
  for (const auto& [key, cell] : cells_) row(key, cell);
  for (const auto& [key, cell] : CoreAverages()) row(key, cell);
}

json EvalReport::ToJson() const {
  json rows = json::array();
  const auto row = [&](const Key& key, const EvalCell& cell) {
    const auto& [task, length, reuse, decode, provenance] = key;
    const auto [low, high] = Confidence95(cell.correct, cell.n);
    rows.push_back({{"task", task},
                    {"length", length},
                    {"reuse", reuse},
                    {"decode", decode},
                    {"provenance", provenance},
                    {"n", cell.n},
                    {"accuracy", double(cell.correct) / double(cell.n)},
                    {"ci95", {low, high}},
                    {"ttft_ms", {{"p50", Percentile(cell.ttft_ms, 0.5)}, {"p95", Percentile(cell.ttft_ms, 0.95)}}},
                    {"tokens",
                     {{"prompt", cell.prompt_tokens},
                      {"cached", cell.cached},
                      {"aligned", cell.aligned},
                      {"recomputed", cell.recomputed},
                      {"computed", cell.computed}}},
                    {"first_token",
                     {{"compared", cell.first_compared},
                      {"equal", cell.first_equal},
                      {"cosine_mean", Mean(cell.cosines)},
                      {"cosine_p05", Percentile(cell.cosines, 0.05)}}},
                    {"bytes", {{"fetched", cell.fetched}, {"wire", cell.wire}}}});
  };
  for (const auto& [key, cell] : cells_) row(key, cell);
  for (const auto& [key, cell] : CoreAverages()) row(key, cell);
  return {{"rows", rows}};
}

// Accuracy over the median time to first token, one dot a method, the area by recomputed share.
std::string EvalReport::Plot(int64_t length, const std::string& provenance) const {
  struct Dot {
    std::string label;
    double x, y, share;
  };
  std::vector<Dot> dots;
  double x_max = 0;
  for (const auto& [key, cell] : CoreAverages()) {
    if (std::get<1>(key) != length || (std::get<4>(key) != provenance && std::get<4>(key) != "-")) continue;
    dots.push_back({MethodName(std::get<2>(key), std::get<3>(key)), Percentile(cell.ttft_ms, 0.5),
                    Percent(cell.correct, cell.n), Percent(cell.recomputed + cell.computed, cell.prompt_tokens)});
    x_max = std::max(x_max, dots.back().x);
  }
  if (dots.empty()) return "";
  const double width = 560, height = 320, left = 50, bottom = 40;
  std::string svg = fmt::format(
      "<h3>{} tokens, segments cached {}</h3><svg viewBox='0 0 {} {}' width='{}' role='img'>"
      "<line x1='{}' y1='{}' x2='{}' y2='{}' stroke='#999'/><line x1='{}' y1='10' x2='{}' y2='{}' stroke='#999'/>",
      length, provenance == "context" ? "in context" : "in isolation", width + 200, height, width + 200, left,
      height - bottom, width, height - bottom, left, left, height - bottom);
  for (int y = 0; y <= 100; y += 20) {
    const double at = height - bottom - (height - bottom - 10) * y / 100;
    svg += fmt::format(
        "<text x='{}' y='{}' font-size='11' text-anchor='end'>{} %</text><line x1='{}' y1='{}' x2='{}' "
        "y2='{}' stroke='#eee'/>",
        left - 6, at + 4, y, left, at, width, at);
  }
  for (int i = 0; i <= 4; ++i) {
    const double x = left + (width - left) * i / 4 * 0.92;
    svg += fmt::format("<text x='{}' y='{}' font-size='11' text-anchor='middle'>{:.0f} ms</text>", x,
                       height - bottom + 16, x_max * i / 4);
  }
  svg += fmt::format("<text x='{}' y='{}' font-size='12' text-anchor='middle'>time to first token, median</text>",
                     (left + width) / 2, height - 6);
  for (size_t i = 0; i < dots.size(); ++i) {
    const Dot& dot = dots[i];
    const double x = left + (width - left) * 0.92 * (x_max > 0 ? dot.x / x_max : 0);
    const double y = height - bottom - (height - bottom - 10) * dot.y / 100;
    const char* colour = kColours[i % std::size(kColours)];
    svg += fmt::format("<circle cx='{:.1f}' cy='{:.1f}' r='{:.1f}' fill='{}' fill-opacity='0.75'/>", x, y,
                       4 + 8 * std::sqrt(dot.share / 100), colour);
    svg +=
        fmt::format("<circle cx='{}' cy='{}' r='5' fill='{}'/><text x='{}' y='{}' font-size='11'>{}: {:.1f} %</text>",
                    width + 10, 16 + 17 * i, colour, width + 20, 20 + 17 * i, Escape(dot.label), dot.y);
  }
  return svg + "</svg>";
}

std::string EvalReport::ToHtml(const std::string& title) const {
  std::string html = fmt::format(
      "<!doctype html><html lang='en'><meta charset='utf-8'><title>{0}</title><style>body{{font:14px "
      "system-ui,sans-serif;"
      "margin:2em;max-width:1200px}}table{{border-collapse:collapse}}td,th{{padding:2px 8px;text-align:right;"
      "border-bottom:1px solid #ddd}}td:nth-child(-n+4),th:nth-child(-n+4){{text-align:left}}.core{{font-weight:bold}}"
      "</style><h1>{0}</h1><p>Accuracy: the answer equals the expected text. Interval: Wilson, 95 %. Core tasks: those "
      "that <code>exact</code> answers at 80 % or more at that length. A dot's area is the share of the prompt that "
      "was "
      "computed or recomputed.</p>",
      Escape(title));
  std::set<int64_t> lengths;
  for (const auto& [key, cell] : cells_) lengths.insert(std::get<1>(key));
  for (const int64_t length : lengths) {
    for (const char* provenance : {"context", "isolated"}) {
      const bool any = std::any_of(cells_.begin(), cells_.end(), [&](const auto& entry) {
        return std::get<1>(entry.first) == length && std::get<4>(entry.first) == provenance;
      });
      if (any) html += Plot(length, provenance);
    }
  }
  html +=
      "<h2>Cells</h2><table><tr><th>task<th>length<th>reuse<th>cached<th>n<th>accuracy<th>95 %<th>TTFT p50<th>p95<th>"
      "prefix<th>aligned<th>recomputed<th>computed<th>fetched<th>moved<th>first token</tr>";
  const auto row = [&](const Key& key, const EvalCell& cell) {
    const auto& [task, length, reuse, decode, provenance] = key;
    const auto [low, high] = Confidence95(cell.correct, cell.n);
    html += fmt::format(
        "<tr{}><td>{}<td>{}<td>{}<td>{}<td>{}<td>{:.1f} %<td>{:.1f}–{:.1f}<td>{:.0f} ms<td>{:.0f} ms<td>{:.1f} %"
        "<td>{:.1f} %<td>{:.1f} %<td>{:.1f} %<td>{:.1f} MB<td>{:.1f} MB<td>{}</tr>",
        task == kCore ? " class='core'" : "", task, length, Escape(MethodName(reuse, decode)), provenance, cell.n,
        Percent(cell.correct, cell.n), 100 * low, 100 * high, Percentile(cell.ttft_ms, 0.5),
        Percentile(cell.ttft_ms, 0.95), Percent(cell.cached, cell.prompt_tokens),
        Percent(cell.aligned, cell.prompt_tokens), Percent(cell.recomputed, cell.prompt_tokens),
        Percent(cell.computed, cell.prompt_tokens), double(cell.fetched) / 1e6, double(cell.wire) / 1e6,
        cell.first_compared > 0 ? fmt::format("{:.0f} % equal, cosine {:.4f}",
                                              Percent(cell.first_equal, cell.first_compared), Mean(cell.cosines))
                                : "");
  };
  for (const auto& [key, cell] : CoreAverages()) row(key, cell);
  for (const auto& [key, cell] : cells_) row(key, cell);
  return html + "</table></html>\n";
}

}  // namespace spl::cli
