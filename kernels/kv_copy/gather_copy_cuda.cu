#include <algorithm>

#include "kernels/kv_copy/gather_copy_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;  // loads of a thread under way
// Few blocks: copies run beside the model and need little of the device to reach the rate of the link.
constexpr int64_t kBlocksMax = 128;

__global__ void __launch_bounds__(kThreads) CopyPiecesKernel(const CopyPiece* pieces, int64_t count) {
  for (int64_t i = blockIdx.x; i < count; i += gridDim.x) {
    const CopyPiece piece = pieces[i];
    const uint4* const from = static_cast<const uint4*>(piece.from);
    uint4* const to = static_cast<uint4*>(piece.to);
    const int64_t units = static_cast<int64_t>(piece.bytes / sizeof(uint4));
    for (int64_t at = threadIdx.x; at < units; at += kThreads * kUnroll) {
      uint4 held[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (at + u * kThreads < units) held[u] = __ldcs(from + at + u * kThreads);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (at + u * kThreads < units) __stcs(to + at + u * kThreads, held[u]);
      }
    }
  }
}

}  // namespace

cudaError_t CopyPieces(const CopyPiece* pieces, int64_t count, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  CopyPiecesKernel<<<static_cast<unsigned>(std::min(count, kBlocksMax)), kThreads, 0, stream>>>(pieces, count);
  return cudaGetLastError();
}

}  // namespace spl::kernels::cuda
