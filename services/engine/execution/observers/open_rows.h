// Lets the last rows of a prompt see everything that the model itself would, whatever the policy says (tri-shape).
#pragma once

#include "services/engine/execution/observers/layer_observer.h"

namespace spl::engine {

// For a pass of one slice.
class OpenRows final : public LayerObserver {
 public:
  // Opens rows at this position and after it.
  explicit OpenRows(int32_t first_position) : first_position_(first_position) {}
  absl::Status AfterAttention(const LayerView& view) override;

 private:
  const int32_t first_position_;
};

}  // namespace spl::engine
