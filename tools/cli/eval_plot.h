// Draws a scatter plot as SVG, for an HTML page.
#pragma once

#include <string>
#include <vector>

namespace spl::cli {

struct PlotDot {
  double x = 0, y = 0;
  double radius = 5;  // pixels
};

struct PlotSeries {
  std::string label;  // for the legend; the plot escapes it
  std::vector<PlotDot> dots;
  std::vector<PlotDot> line;  // a line through these in their order; radius is ignored
};

struct PlotAxis {
  std::string label;
  std::string unit;  // written behind every number
  double max = 1;    // end of the axis, which begins at 0; > 0
  int num_ticks = 4;
};

// Returns a heading and the plot below it. The order of the series gives their colours.
std::string ScatterPlot(const std::string& title, const PlotAxis& x_axis, const PlotAxis& y_axis,
                        const std::vector<PlotSeries>& series);

// Escapes text for HTML.
std::string EscapeHtml(const std::string& text);

}  // namespace spl::cli
