// Cost of computing tokens of a prompt, in work that can be timed on one prompt and predicted for another.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "services/engine/model/model_config.h"

namespace spl::engine {

// Floating-point operations of a plain prefill (a multiply-add counts as two). Per token and layer: the products with
// the weights (only the experts that run), and 4 · q_size for each position that the layer sees (scores and values).
// Norms, rotation and logits are left out: a few in a thousand. Immutable; any thread.
class PrefillCost {
 public:
  explicit PrefillCost(const ModelConfig& config);

  // Cost of rows at these positions in layers [begin, end). Each row sees all positions in front of it.
  double Of(std::span<const int32_t> positions, int32_t begin, int32_t end) const;
  // Cost of positions [first, first + count) in all layers.
  double Of(int64_t first, int64_t count) const;
  // Cost of a token without its attention, in all layers.
  double PerToken() const;
  // Cost of the attention of a token to one in front of it, in the layers that see all of the prompt.
  double PerPair() const;

 private:
  double OfRow(int64_t position, int32_t begin, int32_t end) const;

  const double attention_;      // per position that is seen
  std::vector<double> linear_;  // [num_layers]
  std::vector<int32_t> windows_;
};

}  // namespace spl::engine
