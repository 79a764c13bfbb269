// Copies many pieces of one device's memory in one launch: pages that are scattered over a pool.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace spl::kernels::cuda {

// Pointers and size are multiples of 16. Pieces do not overlap where they are written.
struct CopyPiece {
  void* to = nullptr;
  const void* from = nullptr;
  uint64_t bytes = 0;
};

// `pieces`: [count], readable by the device (device memory, or page-locked host memory) until the launch has run.
// Asynchronous on `stream`. Cost: reads and writes at the rate of device memory for pieces of 4 KiB and more.
cudaError_t CopyPieces(const CopyPiece* pieces, int64_t count, cudaStream_t stream);

}  // namespace spl::kernels::cuda
