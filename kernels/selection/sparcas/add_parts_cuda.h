// The sum of all parts of a list (listed_rows_cuda.h), of which each block of a cluster has some. Included by .cu files
// only.
#pragma once

#include "kernels/selection/sparcas/listed_rows_cuda.h"

namespace spl::kernels::cuda::listed_rows {

// Sum of f(0) .. f(n - 1) in a binary tree; n is a power of two.
template <int n, typename F>
__device__ __forceinline__ auto TreeSum(const F& f, int first = 0) {
  if constexpr (n == 1) {
    return f(first);
  } else {
    return TreeSum<n / 2>(f, first) + TreeSum<n / 2>(f, first + n / 2);
  }
}

// The factors by which a warp adds up n parts of one head. Each is computed once, not for every element: lanes share
// them, unless there are few. All lanes must ask for the same head.
template <int n>
struct PartFactors {
  static constexpr int kMine = n <= 8 ? n : n > 32 ? n / 32 : 1;  // a lane's factors
  float max = kNothing, sum, exact;

  // max_sum(i), exact_sum(i): of part i.
  template <typename MaxSum, typename Exact>
  __device__ __forceinline__ PartFactors(const MaxSum& max_sum, const Exact& exact_sum) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float2 own[kMine];
#pragma unroll
    for (int m = 0; m < kMine; ++m) {
      own[m] = max_sum(First(lane) + m);
      max = fmaxf(max, own[m].x);
    }
#pragma unroll
    for (int offset = 1; offset < n / kMine; offset *= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, offset));
#pragma unroll
    for (int m = 0; m < kMine; ++m) mine_[m] = Exp2(own[m].x - max);
    sum = Tree([&](int m) { return own[m].y * mine_[m]; });
    exact = Tree([&](int m) { return exact_sum(First(lane) + m) * mine_[m]; });
  }
  // Sum of x(i) times the factor of part i, in a binary tree.
  template <typename X>
  __device__ __forceinline__ float Sum(const X& x) const {
    return TreeSum<n>(
        [&](int i) { return x(i) * (n == kMine ? mine_[i] : __shfl_sync(0xffffffffu, mine_[i % kMine], i / kMine)); });
  }

 private:
  static __device__ __forceinline__ int First(int lane) { return lane % (n / kMine) * kMine; }
  // The same tree over parts of which each lane has its own.
  template <typename X>
  static __device__ __forceinline__ float Tree(const X& x) {
    float sum = TreeSum<kMine>(x);
#pragma unroll
    for (int offset = 1; offset < n / kMine; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    return sum;
  }

  float mine_[kMine];
};

// Adds up all parts of the cluster, of which each block has stored its own, or sums of neighbouring ones: Results or
// StagedResults. write(head, dim, value, lse) for this block's share of the elements; lse in powers of two. Called by
// all threads behind a barrier of the block. A block may end when it returns.
template <int kBlocks, int kHeads, int kDim, int kThreads, typename ResultsT, typename Write>
__device__ __forceinline__ void AddParts(const ResultsT& r, TheirResults<kBlocks, kHeads, kDim>& theirs, int rank,
                                         int group, const Write& write) {
  using C = Cluster<kBlocks>;
  constexpr int kOwn = ResultsT::kNum, kShare = kHeads * kDim / kBlocks;
  const int t = static_cast<int>(threadIdx.x);
  for (int e = t; e < kHeads * kDim; e += kThreads) {
    const int head = e / kDim, dim = e % kDim;  // one head a warp
    if (head >= group) break;
    const PartFactors<kOwn> parts([&](int i) { return r.max_sum(i, head); }, [&](int i) { return r.exact(i, head); });
    const float x = parts.Sum([&](int i) { return r.out(i, head, dim); });
    C::Store(reinterpret_cast<uint32_t*>(&theirs.share[rank][e % kShare]), e / kShare, __float_as_uint(x));
    if (dim < kBlocks) {
      const uint64_t both = static_cast<uint64_t>(__float_as_uint(parts.sum)) << 32 | __float_as_uint(parts.max);
      C::Store(reinterpret_cast<uint64_t*>(&theirs.of_block[rank][head]), dim, both);
      C::Store(reinterpret_cast<uint32_t*>(&theirs.exact[rank][head]), dim, __float_as_uint(parts.exact));
    }
  }
  C::Sync();
  for (int e = t; e < kShare; e += kThreads) {
    const int head = (rank * kShare + e) / kDim, dim = (rank * kShare + e) % kDim;
    if (head >= group) break;
    const PartFactors<kBlocks> blocks([&](int b) { return theirs.of_block[b][head]; },
                                      [&](int b) { return theirs.exact[b][head]; });
    const float x = blocks.Sum([&](int b) { return theirs.share[b][e]; });
    write(head, dim, blocks.sum > 0 ? x / blocks.sum : 0.0f,
          blocks.exact > 0 ? blocks.max + log2f(blocks.exact) : -INFINITY);
  }
}

}  // namespace spl::kernels::cuda::listed_rows
