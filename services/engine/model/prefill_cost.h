// What it takes to compute tokens of a prompt, as work that can be measured on one prompt and foretold for another.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "services/engine/model/model_config.h"

namespace spl::engine {

// Multiply-adds, counted twice, of a plain prefill: per token and layer the products with the weights (of experts those
// that run), and the attention to every position the layer sees, 4 · q_size each (scores and values). Norms, rotation
// and the logits are left out: a few in a thousand. Constant; any thread.
class PrefillCost {
 public:
  explicit PrefillCost(const ModelConfig& config);

  // Of rows at these positions in layers [begin, end), which see everything in front of them.
  double Of(std::span<const int32_t> positions, int32_t begin, int32_t end) const;
  // Of positions [first, first + count) in all layers.
  double Of(int64_t first, int64_t count) const;

 private:
  double OfRow(int64_t position, int32_t begin, int32_t end) const;

  const double attention_;      // for each position seen
  std::vector<double> linear_;  // [num_layers]
  std::vector<int32_t> windows_;
};

}  // namespace spl::engine
