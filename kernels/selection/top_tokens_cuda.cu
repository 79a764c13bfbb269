// One cluster of blocks per stream; token_choice_cuda.h makes the choice. Scores are read from memory each time they
// are used: all of them fit in the second-level cache.
#include "kernels/cuda/cuda_launch.h"
#include "kernels/selection/token_choice_cuda.h"
#include "kernels/selection/top_tokens_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kThreads = 512;

struct Params {
  const float* scores;
  int64_t scores_stride;
  SelectionBatch selection;
  const int32_t* kv_len;
  int32_t* tokens;
  int32_t* counts;
  int64_t list_stride;
  int32_t granularity, num_kv_heads;
  float weight;
};

template <int kBlocks, bool kWeights>
__global__ void __launch_bounds__(kThreads) TopTokensKernel(const __grid_constant__ Params p) {
  using Choice = TokenChoice<kBlocks, kThreads>;
  extern __shared__ __align__(16) char raw[];
  auto& s = *reinterpret_cast<typename Choice::Smem*>(raw);
  auto* masks = reinterpret_cast<uint32_t(*)[4]>(raw + sizeof(s));  // [tiles of a block]
  LetNextStart();
  const int stream = blockIdx.x / kBlocks, sequence = stream / p.num_kv_heads, head = stream % p.num_kv_heads;
  const int rank = Cluster<kBlocks>::Rank();
  if (!p.selection.Selects(sequence, head)) {
    WaitForPrevious();
    return;
  }
  const StagedSequence& staged = p.selection.sequences[sequence];
  const Candidates own = p.selection.CandidatesOf(sequence, head, p.kv_len[sequence]);
  const int32_t kv_len = own.count, g = p.granularity;  // as if candidates were the sequence
  const int32_t budget = min(staged.budget, static_cast<int32_t>(p.list_stride));
  int32_t* tokens = p.tokens + stream * p.list_stride;
  if (kv_len <= budget) {
    WaitForPrevious();
    for (int32_t j = rank * kThreads + static_cast<int32_t>(threadIdx.x); j < kv_len; j += kBlocks * kThreads) {
      tokens[j] = own.Position(j);
    }
    if (rank == 0 && threadIdx.x == 0) p.counts[stream] = kv_len;
    return;
  }
  Choice::Clear(s);
  WaitForPrevious();
  const int32_t num = (kv_len + g - 1) / g, taken = budget / g, share = (num + kBlocks - 1) / kBlocks;
  const int32_t first_forced = max(max(kv_len - staged.recent, 0) / g, num - taken);
  const int32_t begin = min(rank * share, num), end = min(begin + share, num);
  const float* scores = p.scores + stream * p.scores_stride;
  // The last granule is always taken, and is the last of the list: all others are whole.
  if (rank == 0 && threadIdx.x == 0) p.counts[stream] = (taken - 1) * g + kv_len - (num - 1) * g;
  // The k-th largest score beside the forced ones is at most the mean of that many.
  const ChoiceBins bins = kWeights ? WeightBins(p.weight, taken - (num - first_forced)) : BinsOf(0, kForcedKey);
  const auto key = [&](int i) {
    if (begin + i >= first_forced) return kForcedKey;
    return kWeights ? WeightKey(scores[begin + i]) : OrderedKey(scores[begin + i]);
  };
  __syncthreads();
  for (int i = threadIdx.x; i < end - begin; i += kThreads) Choice::Count(s, bins, key(i));
  Choice::Choose(
      s, rank, static_cast<uint32_t>(begin), end - begin, static_cast<uint32_t>(taken), bins, key,
      [&](int tile) { return masks[tile]; },
      [&](int i, int place) {
        const int32_t first = (begin + i) * g, last = min(first + g, kv_len);
        for (int32_t j = first; j < last; ++j) tokens[place * g + (j - first)] = own.Position(j);
      });
}

template <int kBlocks>
cudaError_t Launch(const Params& p, int num_sequences, int32_t max_kv_len, cudaStream_t stream) {
  using Choice = TokenChoice<kBlocks, kThreads>;
  const int32_t granules = (max_kv_len + p.granularity - 1) / p.granularity, share = (granules + kBlocks - 1) / kBlocks;
  const int bytes = static_cast<int>(sizeof(typename Choice::Smem)) + (share + Choice::kTile - 1) / Choice::kTile * 16;
  const auto kernel = p.weight > 0 ? TopTokensKernel<kBlocks, true> : TopTokensKernel<kBlocks, false>;
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e != cudaSuccess) return e;
  const dim3 grid(static_cast<unsigned>(kBlocks) * p.num_kv_heads * num_sequences);
  return LaunchClustersEarly(kBlocks, kernel, grid, kThreads, bytes, stream, p);
}

}  // namespace

cudaError_t TopTokens(const TopTokensArgs& a, const SelectionBatch& selection, const int32_t* kv_len,
                      int32_t num_sequences, int32_t max_kv_len, cudaStream_t stream, float weight) {
  if (num_sequences == 0) return cudaSuccess;
  int device = 0, major = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (e != cudaSuccess) return e;
  const Params p{a.scores,       a.scores_stride, selection,     kv_len,         a.lists.tokens,
                 a.lists.counts, a.lists.stride,  a.granularity, a.num_kv_heads, weight};
  // Few scores are not worth a cluster's barriers.
  constexpr int32_t kOneBlock = 4096;
  if (major < 9 || max_kv_len / a.granularity <= kOneBlock) return Launch<1>(p, num_sequences, max_kv_len, stream);
  return Launch<8>(p, num_sequences, max_kv_len, stream);
}

}  // namespace spl::kernels::cuda
