// Finds the local heads whose window cuts off much of their attention: edge-mass restore (docs/methods/redknot.md,
// "Restore"; RedKnot's introduction promises it and gives no formula).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace spl::engine {

// Log-sum-exps of the probes, [num_probes, num_qo_heads]. `seen`: over what the heads see; `all`: over everything that
// the model lets them see.
struct ProbeLse {
  std::span<const float> seen, all;
  int32_t num_probes = 0;
  int32_t num_qo_heads = 0;
  int32_t num_kv_heads = 0;  // divides num_qo_heads
};

// Edge mass of each KV head, in [0, 1]:
//   e_h = max over the query heads of KV head h of  mean over the probes of (1 - exp(lse_seen - lse_all))
std::vector<float> EdgeMass(const ProbeLse& probes);

// The heads with e > threshold, at most `most` of them, the largest e first (ties to the lower head); ascending.
std::vector<int32_t> HeadsToRestore(std::span<const float> edge_mass, std::span<const float> thresholds, int32_t most);

}  // namespace spl::engine
