#include "tools/cli/eval_plot.h"

#include <fmt/format.h>

#include <algorithm>

namespace spl::cli {
namespace {

constexpr const char* kColours[] = {"#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd",
                                    "#8c564b", "#17becf", "#7f7f7f", "#e377c2", "#bcbd22"};
// Sizes in pixels: the plot with its axes, and the margins left of and below them. The legend is to the right.
constexpr double kWidth = 560, kHeight = 320, kLegend = 360, kLegendLine = 17, kLeft = 60, kBottom = 40, kTop = 10;
constexpr double kUsed = 0.92;  // share of the width that the x axis fills

double XOf(const PlotAxis& axis, double value) { return kLeft + (kWidth - kLeft) * kUsed * value / axis.max; }
double YOf(const PlotAxis& axis, double value) {
  return kHeight - kBottom - (kHeight - kBottom - kTop) * value / axis.max;
}

std::string Axes(const PlotAxis& x_axis, const PlotAxis& y_axis) {
  std::string svg = fmt::format(
      "<line x1='{0}' y1='{1}' x2='{2}' y2='{1}' stroke='#999'/><line x1='{0}' y1='{3}' x2='{0}' y2='{1}' "
      "stroke='#999'/>",
      kLeft, kHeight - kBottom, kWidth, kTop);
  for (int i = 0; i <= y_axis.num_ticks; ++i) {
    const double value = y_axis.max * i / y_axis.num_ticks, y = YOf(y_axis, value);
    svg += fmt::format(
        "<text x='{:.1f}' y='{:.1f}' font-size='11' text-anchor='end'>{:.0f}{}</text><line x1='{:.1f}' y1='{:.1f}' "
        "x2='{:.1f}' y2='{:.1f}' stroke='#eee'/>",
        kLeft - 6, y + 4, value, y_axis.unit, kLeft, y, kWidth, y);
  }
  for (int i = 0; i <= x_axis.num_ticks; ++i) {
    const double value = x_axis.max * i / x_axis.num_ticks;
    svg += fmt::format("<text x='{:.1f}' y='{:.1f}' font-size='11' text-anchor='middle'>{:.0f}{}</text>",
                       XOf(x_axis, value), kHeight - kBottom + 16, value, x_axis.unit);
  }
  return svg + fmt::format("<text x='{:.1f}' y='{:.1f}' font-size='12' text-anchor='middle'>{}</text>",
                           (kLeft + kWidth) / 2, kHeight - 6, EscapeHtml(x_axis.label));
}

}  // namespace

std::string EscapeHtml(const std::string& text) {
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

std::string ScatterPlot(const std::string& title, const PlotAxis& x_axis, const PlotAxis& y_axis,
                        const std::vector<PlotSeries>& series) {
  const double height = std::max(kHeight, kLegendLine * static_cast<double>(series.size() + 1));
  std::string svg = fmt::format("<h3>{}</h3><svg viewBox='0 0 {} {}' width='{}' role='img'>", EscapeHtml(title),
                                kWidth + kLegend, height, kWidth + kLegend);
  svg += Axes(x_axis, y_axis);
  for (size_t i = 0; i < series.size(); ++i) {
    const char* const colour = kColours[i % std::size(kColours)];
    for (const PlotDot& dot : series[i].dots)
      svg += fmt::format("<circle cx='{:.1f}' cy='{:.1f}' r='{:.1f}' fill='{}' fill-opacity='0.75'/>",
                         XOf(x_axis, dot.x), YOf(y_axis, dot.y), dot.radius, colour);
    if (!series[i].line.empty()) {
      svg += "<polyline fill='none' stroke='" + std::string(colour) + "' points='";
      for (const PlotDot& dot : series[i].line)
        svg += fmt::format("{:.1f},{:.1f} ", XOf(x_axis, dot.x), YOf(y_axis, dot.y));
      svg += "'/>";
    }
    svg += fmt::format("<circle cx='{}' cy='{}' r='5' fill='{}'/><text x='{}' y='{}' font-size='11'>{}</text>",
                       kWidth + 10, 16 + kLegendLine * double(i), colour, kWidth + 20, 20 + kLegendLine * double(i),
                       EscapeHtml(series[i].label));
  }
  return svg + "</svg>";
}

}  // namespace spl::cli
