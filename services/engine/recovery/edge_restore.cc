#include "services/engine/recovery/edge_restore.h"

#include <algorithm>
#include <cmath>

namespace spl::engine {

std::vector<float> EdgeMass(const ProbeLse& probes) {
  const int32_t group = probes.num_qo_heads / probes.num_kv_heads;
  std::vector<float> edge(static_cast<size_t>(probes.num_kv_heads), 0);
  for (int32_t h = 0; h < probes.num_qo_heads; ++h) {
    double sum = 0;
    for (int32_t i = 0; i < probes.num_probes; ++i) {
      const size_t at = static_cast<size_t>(i) * static_cast<size_t>(probes.num_qo_heads) + static_cast<size_t>(h);
      // A row that sees nothing of its own has lse -infinity, and everything outside.
      sum += std::clamp(1 - std::exp(double{probes.seen[at]} - probes.all[at]), 0.0, 1.0);
    }
    float& most = edge[h / group];
    most = std::max(most, static_cast<float>(sum / probes.num_probes));
  }
  return edge;
}

std::vector<int32_t> HeadsToRestore(std::span<const float> edge_mass, std::span<const float> thresholds, int32_t most) {
  std::vector<int32_t> heads;
  for (size_t h = 0; h < edge_mass.size(); ++h) {
    if (edge_mass[h] > thresholds[h]) heads.push_back(static_cast<int32_t>(h));
  }
  std::stable_sort(heads.begin(), heads.end(), [&](int32_t a, int32_t b) { return edge_mass[a] > edge_mass[b]; });
  if (heads.size() > static_cast<size_t>(std::max(most, 0))) heads.resize(std::max(most, 0));
  std::sort(heads.begin(), heads.end());
  return heads;
}

}  // namespace spl::engine
