// Which of a prompt's tokens each layer keeps when some are left out (SamKV's sparse KV; docs/methods/samkv.md).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "services/engine/model/position_ranges.h"

namespace spl::engine {

// Immutable once shared. What follows the prompt is kept whole.
struct KeptTokens {
  int32_t num_tokens = 0;              // of the prompt
  std::vector<PositionRanges> layers;  // [num_layers]; all heads of a layer keep the same

  // Whether `page` of a stream of `layer` holds a token that is kept, or any behind the prompt.
  bool KeepsPage(int32_t layer, int32_t page) const;
};

// InvalidArgument, naming what is wrong: not a list for each layer, ranges out of order or outside of the prompt, a
// layer without the last token.
absl::Status ValidateKeptTokens(const KeptTokens& kept, int32_t num_layers, int64_t prompt_tokens);

}  // namespace spl::engine
