// Estimates of a decode step, on their way from the device to the host: how much of each KV head's attention lies on
// the tokens that it chose (kernels/selection/sparcas/sparse_attention.h, "mass").
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend/session.h"
#include "services/base/status.h"

namespace spl::engine {

// The estimates of all rows of a step, on the host. Heads that did not choose in it have any value.
struct KeptMass {
  std::span<const float> values;  // [num_layers, num_rows, num_kv_heads]; empty: nothing was estimated
  size_t num_rows = 0, num_kv_heads = 0;

  float of(int32_t layer, size_t row, int32_t kv_head) const {
    return values[(static_cast<size_t>(layer) * num_rows + row) * num_kv_heads + static_cast<size_t>(kv_head)];
  }
};

// Must be destroyed before its executor. Used by the executor's thread.
class PendingMass {
 public:
  PendingMass() = default;  // nothing was estimated
  // copy: f32 [num_layers, num_rows, num_kv_heads].
  PendingMass(std::unique_ptr<kernels::HostCopy> copy, size_t num_layers, size_t num_rows, size_t num_kv_heads)
      : copy_(std::move(copy)), num_layers_(num_layers), num_rows_(num_rows), num_kv_heads_(num_kv_heads) {}
  // The same, of values that are here.
  PendingMass(std::vector<float> values, size_t num_rows, size_t num_kv_heads)
      : values_(std::move(values)), num_rows_(num_rows), num_kv_heads_(num_kv_heads) {}

  // Waits for the values, which are valid as long as this object is not moved. Also returns an error of the pass that
  // computed them.
  absl::StatusOr<KeptMass> Wait() {
    if (copy_ == nullptr) return KeptMass{values_, num_rows_, num_kv_heads_};
    SPLICE_ASSIGN_OR_RETURN(const void* host, copy_->Wait());
    const size_t count = num_layers_ * num_rows_ * num_kv_heads_;
    return KeptMass{{static_cast<const float*>(host), count}, num_rows_, num_kv_heads_};
  }

 private:
  std::unique_ptr<kernels::HostCopy> copy_;
  std::vector<float> values_;
  size_t num_layers_ = 0, num_rows_ = 0, num_kv_heads_ = 0;
};

}  // namespace spl::engine
