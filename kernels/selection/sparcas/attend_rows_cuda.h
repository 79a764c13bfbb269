// A block's part of the attention of one stream to rows that it has been given, and its cluster's sum. Included by .cu
// files only.
#pragma once

#include "kernels/attention/attention_cuda_common.h"
#include "kernels/selection/sparcas/add_parts_cuda.h"

namespace spl::kernels::cuda::listed_rows {

// The rows that a block attends to, [0, here) of `rows`; they count rows of the pool as Softmax::Add does.
struct GivenRows {
  const std::byte* pool;
  const int32_t* rows;
  int32_t of_part;         // rows of each part
  int32_t here;            // rows of this block
  const __nv_bfloat16* q;  // queries of the stream's group
  int group;
  float scale;         // sm_scale · log2(e)
  __nv_bfloat16* out;  // [group, kDim]
  float* lse;          // [group] or null

  __device__ __forceinline__ void Write(int64_t element, float value, bool first_of_head, int head, float log) const {
    out[element] = __float2bfloat16_rn(value);
    if (first_of_head && lse != nullptr) lse[head] = log * kLn2;
  }
};

// K and V of a row, from memory to the second-level cache.
template <typename Pages>
__device__ __forceinline__ void PrefetchRow(const std::byte* pool, int32_t page, int32_t slot) {
  const std::byte* row = pool + int64_t{page} * 2 * Pages::kHalfBytes + slot * Pages::kRowBytes;
#pragma unroll
  for (int line = 0; line < (Pages::kRowBytes + 127) / 128; ++line) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(row + 128 * line));
    asm volatile("prefetch.global.L2 [%0];" ::"l"(row + 128 * line + Pages::kHalfBytes));
  }
}

// Called by all threads of a cluster whose blocks have all started. The bits of the result depend on the rows and their
// order alone: not on kBlocks or kThreads.
template <int kBlocks, int kThreads, typename Pages, int kHeads>
__device__ __forceinline__ void AttendRows(const GivenRows& x, int rank, Results<kBlocks, kHeads, Pages::kDim>& results,
                                           TheirResults<kBlocks, kHeads, Pages::kDim>& theirs) {
  constexpr int kOwn = kParts / kBlocks, kDim = Pages::kDim;
  // All rows are asked for at once: registers would hold a few of them.
  for (int32_t i = threadIdx.x; i < x.here; i += kThreads) {
    PrefetchRow<Pages>(x.pool, x.rows[i] / (2 * kPageTokens), x.rows[i] % (2 * kPageTokens));
  }
  typename Pages::Softmax softmax(x.scale);
  softmax.TakeQueries(x.q, x.group);
#pragma unroll 1
  for (int part = static_cast<int>(threadIdx.x) / 32; part < kOwn; part += kThreads / 32) {
    softmax.Clear();
    const int32_t end = min((part + 1) * x.of_part, x.here);
#pragma unroll 1
    for (int32_t at = part * x.of_part; at < end; at += kRowsAtOnce) softmax.Add(x.pool, x.rows + at, end - at);
    softmax.Store(results, part);
  }
  __syncthreads();
  AddParts<kBlocks, kHeads, kDim, kThreads>(
      results, theirs, rank, x.group,
      [&](int head, int dim, float value, float lse) { x.Write(head * kDim + dim, value, dim == 0, head, lse); });
}

}  // namespace spl::kernels::cuda::listed_rows
