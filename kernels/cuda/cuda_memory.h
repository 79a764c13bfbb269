// Owned device and pinned host memory.
#pragma once

#include <cstddef>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/common/buffer.h"

namespace spl::kernels::cuda {

// Zeroed. ResourceExhausted says how much is missing.
absl::StatusOr<std::unique_ptr<Buffer>> AllocateDevice(size_t bytes);
// Page-locked host memory: copies to and from it run at the link's speed and beside the host's work.
absl::StatusOr<std::unique_ptr<Buffer>> AllocatePinned(size_t bytes);

}  // namespace spl::kernels::cuda
