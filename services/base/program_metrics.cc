#include "services/base/program_metrics.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

namespace spl {

std::vector<ProgramFamilies> CollectPrograms(std::span<const ProgramMetrics> programs) {
  std::vector<ProgramFamilies> collected;
  for (const ProgramMetrics& program : programs)
    collected.push_back({program.component, program.metrics->registry().Collect()});
  return collected;
}

std::vector<prometheus::MetricFamily> MergedFamilies(std::vector<ProgramFamilies> programs) {
  std::vector<prometheus::MetricFamily> merged;
  std::map<std::string, size_t> places;  // name → index in `merged`
  for (ProgramFamilies& program : programs) {
    for (prometheus::MetricFamily& family : program.families) {
      for (prometheus::ClientMetric& series : family.metric)
        if (!program.component.empty()) series.label.insert(series.label.begin(), {"component", program.component});
      const auto [place, is_new] = places.try_emplace(family.name, merged.size());
      if (is_new) {
        merged.push_back(std::move(family));
        continue;
      }
      std::move(family.metric.begin(), family.metric.end(), std::back_inserter(merged[place->second].metric));
    }
  }
  return merged;
}

}  // namespace spl
