// One scatter plot as SVG inside an HTML page.
#pragma once

#include <string>
#include <vector>

namespace spl::cli {

struct PlotDot {
  double x = 0, y = 0;
  double radius = 5;  // pixels
};

struct PlotSeries {
  std::string label;  // in the legend, escaped by the plot
  std::vector<PlotDot> dots;
  std::vector<PlotDot> line;  // drawn through these in their order; radius is not used
};

struct PlotAxis {
  std::string label;
  std::string unit;  // behind every number
  double max = 1;    // the axis begins at 0; above 0
  int num_ticks = 4;
};

// A heading and the plot below it; colours by the order of the series.
std::string ScatterPlot(const std::string& title, const PlotAxis& x_axis, const PlotAxis& y_axis,
                        const std::vector<PlotSeries>& series);

// Text as HTML shows it.
std::string EscapeHtml(const std::string& text);

}  // namespace spl::cli
