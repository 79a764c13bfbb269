// Host memory as a Buffer, allocated by the CPU and reference backends.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/common/buffer.h"

namespace spl::kernels {

// Zeroed, 64-byte aligned. Large buffers come straight from the system, zero on first touch and ask for huge pages (a
// KV pool is read all over: with 4 KiB pages the TLB misses on most page table entries). ResourceExhausted: no memory.
absl::StatusOr<std::unique_ptr<Buffer>> AllocateHostBuffer(size_t bytes);

}  // namespace spl::kernels
