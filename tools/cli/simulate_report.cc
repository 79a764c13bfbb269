// Results of simulations as a table, as JSON and as figures.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "tools/cli/simulate.h"

namespace spl::cli {
namespace {

constexpr const char* kColours[] = {"#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd"};

// A round number at or above the value, for the end of an axis.
double RoundUp(double value) {
  if (value <= 0) return 1;
  const double power = std::pow(10, std::floor(std::log10(value)));
  for (const double factor : {1.0, 1.5, 2.0, 3.0, 5.0, 10.0}) {
    if (factor * power >= value) return factor * power;
  }
  return 10 * power;
}

std::string Svg(double width, double height, const std::string& title, const std::string& body) {
  return fmt::format(
      "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {0:.0f} {1:.0f}' width='{0:.0f}' role='img' "
      "font-family='sans-serif'><rect width='{0:.0f}' height='{1:.0f}' fill='white'/><text x='12' y='22' "
      "font-size='15' "
      "font-weight='bold'>{2}</text>{3}</svg>\n",
      width, height, title, body);
}

struct BarGroup {
  std::string label;
  std::string unit;
  double (*value)(const SimReport&);
};

// One panel of a figure over time.
struct TimeLine {
  std::string label;
  const char* colour;
  std::vector<double> values;
  bool dashed = false;
};

std::string TimePanel(double top, const std::string& label, const std::vector<double>& hours, double last_hour,
                      const std::vector<TimeLine>& lines) {
  constexpr double kLeft = 70, kRight = 720, kHeight = 130;
  double max = 0;
  for (const TimeLine& line : lines) {
    for (const double v : line.values) max = std::max(max, v);
  }
  max = RoundUp(max);
  const auto x = [&](double hour) { return kLeft + (kRight - kLeft) * hour / last_hour; };
  const auto y = [&](double value) { return top + kHeight * (1 - value / max); };
  std::string svg = fmt::format("<text x='{:.0f}' y='{:.0f}' font-size='12'>{}</text>", kLeft, top - 8, label);
  for (int i = 0; i <= 2; ++i) {
    const double value = max * i / 2;
    svg += fmt::format(
        "<line x1='{0:.0f}' y1='{2:.1f}' x2='{1:.0f}' y2='{2:.1f}' stroke='#ddd'/><text x='{3:.0f}' y='{4:.1f}' "
        "font-size='11' text-anchor='end'>{5:g}</text>",
        kLeft, kRight, y(value), kLeft - 6, y(value) + 4, value);
  }
  for (double hour = 0; hour <= last_hour + 1e-9; hour += last_hour / 8) {
    svg += fmt::format("<text x='{:.1f}' y='{:.0f}' font-size='11' text-anchor='middle'>{:.3g} h</text>", x(hour),
                       top + kHeight + 15, hour);
  }
  double legend = kLeft + 260;
  for (const TimeLine& line : lines) {
    svg += fmt::format("<polyline fill='none' stroke='{}' stroke-width='1.3'{} points='", line.colour,
                       line.dashed ? " stroke-dasharray='5 4'" : "");
    for (size_t i = 0; i < line.values.size(); ++i)
      svg += fmt::format("{:.1f},{:.1f} ", x(hours[i]), y(line.values[i]));
    svg += fmt::format("'/><text x='{:.0f}' y='{:.0f}' font-size='11' fill='{}'>{}</text>", legend, top - 8,
                       line.colour, line.label);
    legend += 8 + 7.0 * static_cast<double>(line.label.size());
  }
  return svg;
}

}  // namespace

std::string SimText(const std::vector<SimReport>& reports) {
  std::string text = fmt::format("{:<13} {:>9} {:>9} {:>9} {:>9} {:>9} {:>8} {:>9} {:>6} {:>8}\n", "policy", "requests",
                                 "refused", "TTFT p50", "p95", "p99 ms", "TPOT p95", "hit rate", "load", "max/mean");
  for (const SimReport& r : reports) {
    text += fmt::format("{:<13} {:>9} {:>9} {:>9.1f} {:>9.1f} {:>9.1f} {:>8.1f} {:>8.1f}% {:>5.0f}% {:>8.2f}\n",
                        r.policy, r.requests, r.refused, r.ttft_ms.p50, r.ttft_ms.p95, r.ttft_ms.p99, r.tpot_ms.p95,
                        100 * r.hit_rate, 100 * r.utilization, r.max_over_mean);
  }
  for (const SimReport& r : reports) {
    text += fmt::format("{}: a decision takes {:.0f} µs at the 99th percentile here\n", r.policy, r.decision_us_p99);
    if (r.scale.empty()) continue;
    text += fmt::format("{}: {:.1f} worker hours; {:.2f}% of requests within the TTFT target\n", r.policy,
                        r.worker_hours, 100 * r.good_fraction);
  }
  return text;
}

nlohmann::ordered_json SimJson(const std::vector<SimReport>& reports) {
  nlohmann::ordered_json out = nlohmann::ordered_json::array();
  for (const SimReport& r : reports) {
    nlohmann::ordered_json one = {{"policy", r.policy},
                                  {"requests", r.requests},
                                  {"refused", r.refused},
                                  {"ttft_ms", {{"p50", r.ttft_ms.p50}, {"p95", r.ttft_ms.p95}, {"p99", r.ttft_ms.p99}}},
                                  {"tpot_ms", {{"p50", r.tpot_ms.p50}, {"p95", r.tpot_ms.p95}, {"p99", r.tpot_ms.p99}}},
                                  {"hit_rate", r.hit_rate},
                                  {"utilization", r.utilization},
                                  {"max_over_mean", r.max_over_mean},
                                  {"duration_s", r.duration_s},
                                  {"decision_us_p99", r.decision_us_p99}};
    if (!r.scale.empty()) {
      one["worker_hours"] = r.worker_hours;
      one["good_fraction"] = r.good_fraction;
      for (const SimScalePoint& p : r.scale) {
        one["scale"].push_back({{"at_s", p.at_s},
                                {"rate", p.rate},
                                {"prefill", p.prefill},
                                {"decode", p.decode},
                                {"desired_prefill", p.desired_prefill},
                                {"desired_decode", p.desired_decode},
                                {"ttft_p95_s", p.ttft_p95_s},
                                {"tpot_p95_s", p.tpot_p95_s}});
      }
    }
    out.push_back(std::move(one));
  }
  return out;
}

std::string SimFigure(const std::string& title, const std::vector<SimReport>& reports) {
  const BarGroup groups[] = {{"TTFT p50", " ms", [](const SimReport& r) { return r.ttft_ms.p50; }},
                             {"TTFT p95", " ms", [](const SimReport& r) { return r.ttft_ms.p95; }},
                             {"hit rate", "%", [](const SimReport& r) { return 100 * r.hit_rate; }},
                             {"busiest / mean", "", [](const SimReport& r) { return r.max_over_mean; }}};
  constexpr double kPanel = 190, kBar = 26, kTop = 60;
  std::string svg;
  double left = 12;
  for (const BarGroup& group : groups) {
    double max = 0;
    for (const SimReport& r : reports) max = std::max(max, group.value(r));
    svg += fmt::format("<text x='{:.0f}' y='{:.0f}' font-size='12'>{}</text>", left, kTop - 10, group.label);
    for (size_t i = 0; i < reports.size(); ++i) {
      const double value = group.value(reports[i]), y = kTop + kBar * static_cast<double>(i);
      const double width = max > 0 ? 105 * value / max : 0;
      svg += fmt::format(
          "<rect x='{:.0f}' y='{:.0f}' width='{:.1f}' height='{:.0f}' fill='{}'/><text x='{:.1f}' y='{:.0f}' "
          "font-size='11'>{:.{}f}{}</text>",
          left, y, std::max(1.0, width), kBar - 6, kColours[i % std::size(kColours)], left + width + 5, y + 14, value,
          value < 10 ? 2 : 0, group.unit);
    }
    left += kPanel;
  }
  double legend = 12;
  const double bottom = kTop + kBar * static_cast<double>(reports.size()) + 18;
  for (size_t i = 0; i < reports.size(); ++i) {
    svg += fmt::format(
        "<rect x='{0:.0f}' y='{1:.0f}' width='10' height='10' fill='{2}'/><text x='{3:.0f}' y='{4:.0f}' "
        "font-size='12'>{5}</text>",
        legend, bottom - 9, kColours[i % std::size(kColours)], legend + 15, bottom, reports[i].policy);
    legend += 130;
  }
  return Svg(4 * kPanel + 12, bottom + 14, title, svg);
}

std::string ScaleFigure(const std::string& title, const SimReport& report, const router::PlannerOptions& targets) {
  std::vector<double> hours, rate, prefill, decode, ttft, ttft_target, tpot, tpot_target;
  // Few enough points for a screen: each is the mean of some intervals, and the worst of their latencies.
  const size_t step = std::max<size_t>(1, report.scale.size() / 480);
  for (size_t i = 0; i + step <= report.scale.size(); i += step) {
    double mean_rate = 0, worst_ttft = 0, worst_tpot = 0;
    for (size_t k = i; k < i + step; ++k) {
      mean_rate += report.scale[k].rate / static_cast<double>(step);
      worst_ttft = std::max(worst_ttft, report.scale[k].ttft_p95_s);
      worst_tpot = std::max(worst_tpot, report.scale[k].tpot_p95_s);
    }
    hours.push_back(report.scale[i].at_s / 3600);
    rate.push_back(mean_rate);
    prefill.push_back(report.scale[i].prefill);
    decode.push_back(report.scale[i].decode);
    ttft.push_back(1e3 * worst_ttft);
    ttft_target.push_back(1e3 * targets.ttft_target_s);
    tpot.push_back(1e3 * worst_tpot);
    tpot_target.push_back(1e3 * targets.tpot_target_s);
  }
  const double last = hours.empty() ? 1 : std::max(hours.back(), 1e-3);
  return Svg(750, 800, title,
             TimePanel(60, "requests per second", hours, last, {{"load", kColours[0], rate}}) +
                 TimePanel(240, "workers that serve", hours, last,
                           {{"prefill", kColours[1], prefill}, {"decode", kColours[2], decode}}) +
                 TimePanel(420, "TTFT p95, ms, worst of an interval", hours, last,
                           {{"seen", kColours[0], ttft}, {"target", "#d62728", ttft_target, true}}) +
                 TimePanel(600, "TPOT p95, ms, worst of an interval", hours, last,
                           {{"seen", kColours[0], tpot}, {"target", "#d62728", tpot_target, true}}));
}

}  // namespace spl::cli
