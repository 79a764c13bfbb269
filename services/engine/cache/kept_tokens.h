// The tokens of a prompt that each layer keeps, if some are left out (SamKV's sparse KV; docs/methods/samkv.md).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "services/engine/model/position_ranges.h"

namespace spl::engine {

// All tokens behind the prompt are kept. Immutable once shared.
struct KeptTokens {
  int32_t num_tokens = 0;              // length of the prompt
  std::vector<PositionRanges> layers;  // [num_layers]; all heads of a layer keep the same

  // True if `page` of a stream of `layer` holds a token that is kept, or a position behind the prompt.
  bool KeepsPage(int32_t layer, int32_t page) const;
};

// InvalidArgument names the mistake: not one list per layer, ranges out of order or outside of the prompt, a layer that
// does not keep the last token.
absl::Status ValidateKeptTokens(const KeptTokens& kept, int32_t num_layers, int64_t prompt_tokens);

}  // namespace spl::engine
