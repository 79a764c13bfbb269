#include "services/engine/selection/step_costs.h"

#include <algorithm>
#include <utility>

#include "services/base/check.h"

namespace spl::engine {
namespace {

// Seconds for each position, and in each step: those of an H100 and an 8B model, in round numbers. Only their ratios
// and the positions at which choosing breaks even decide anything.
constexpr double kBuiltInStep = 5e-3, kBuiltInDense = 40e-9, kBuiltInChosen = 8e-9;
constexpr int64_t kBuiltInEven = 16'384, kBuiltInLeast = 32'768;
constexpr int64_t kBuiltInLongest = int64_t{1} << 22, kBuiltInMost = 1024;

double Between(double from, double to, double share) { return from + (to - from) * share; }

}  // namespace

StepCosts::StepCosts(std::vector<Row> rows) : rows_(std::move(rows)) {
  for (size_t i = 0; i < rows_.size(); ++i) {
    SPLICE_CHECK(!rows_[i].points.empty() && (i == 0 || rows_[i - 1].length < rows_[i].length), "rows by length");
    SPLICE_CHECK(std::is_sorted(rows_[i].points.begin(), rows_[i].points.end(),
                                [](const Point& a, const Point& b) { return a.sequences < b.sequences; }),
                 "points by their number of sequences");
  }
}

StepCosts StepCosts::BuiltIn() {
  std::vector<Row> rows;
  for (const int64_t length : {kBuiltInLeast, kBuiltInLongest}) {
    Row& row = rows.emplace_back(Row{length, {}});
    for (int64_t n = 1; n <= kBuiltInMost; ++n) {
      const auto positions = static_cast<double>(n * length);
      const double dense = kBuiltInStep + positions * kBuiltInDense;
      const double chosen = kBuiltInStep + static_cast<double>(kBuiltInEven) * (kBuiltInDense - kBuiltInChosen) +
                            positions * kBuiltInChosen;
      row.points.push_back({n, dense, chosen, dense / 2});
    }
  }
  StepCosts costs(std::move(rows));
  costs.is_built_in_ = true;
  return costs;
}

// Dense between the points around it, chosen of the upper one.
StepCosts::Cost StepCosts::Of(const Row& row, int64_t sequences) {
  const auto above = std::lower_bound(row.points.begin(), row.points.end(), sequences,
                                      [](const Point& point, int64_t n) { return point.sequences < n; });
  if (above == row.points.end() || (above == row.points.begin() && above->sequences != sequences)) return {};
  Cost cost{true, above->dense_s, above->chosen_s, above->change_s};
  if (above->sequences == sequences) return cost;
  const Point& below = *(above - 1);
  cost.dense_s = Between(
      below.dense_s, above->dense_s,
      static_cast<double>(sequences - below.sequences) / static_cast<double>(above->sequences - below.sequences));
  return cost;
}

StepCosts::Cost StepCosts::At(const StepLoad& load) const {
  if (load.sequences <= 0) return {};
  const int64_t length = load.positions / load.sequences;
  const auto above = std::upper_bound(rows_.begin(), rows_.end(), length,
                                      [](int64_t wanted, const Row& row) { return wanted < row.length; });
  if (above == rows_.begin()) return {};
  const Row& row = *(above - 1);
  Cost cost = Of(row, load.sequences);
  if (!cost.measured || above == rows_.end()) return cost;
  const Cost longer = Of(*above, load.sequences);
  if (!longer.measured) return cost;  // so many of that length have no room; what is saved grows with the length
  const double share = static_cast<double>(length - row.length) / static_cast<double>(above->length - row.length);
  return {true, Between(cost.dense_s, longer.dense_s, share), Between(cost.chosen_s, longer.chosen_s, share),
          Between(cost.change_s, longer.change_s, share)};
}

}  // namespace spl::engine
