// A stream is served by several blocks; each copies every n-th part of its list.
#include <algorithm>

#include "kernels/cuda/cuda_launch.h"
#include "kernels/selection/candidates_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlockTokens = 4096;  // tokens per block, while there are no more blocks than kMaxBlocks
constexpr int kMaxBlocks = 16;

struct Params {
  SelectionBatch selection;
  const int32_t* kv_len;
  int32_t* tokens;
  int32_t* counts;
  int64_t list_stride;
  int32_t num_kv_heads;
};

__global__ void __launch_bounds__(kThreads) ListKernel(const __grid_constant__ Params p) {
  LetNextStart();
  const int stream = static_cast<int>(blockIdx.y), sequence = stream / p.num_kv_heads, head = stream % p.num_kv_heads;
  const StagedStep step = p.selection.steps[sequence];
  constexpr int32_t kBoth = StagedStep::kListed | StagedStep::kSelects;
  if ((step.flags & kBoth) != StagedStep::kListed || p.selection.ListPages(sequence, head)[0] == kNoPage) {
    WaitForPrevious();
    return;
  }
  const Candidates own = p.selection.CandidatesOf(sequence, head, p.kv_len[sequence]);
  const bool all = step.window == 0 || step.num_sinks + step.window >= own.count;
  const int32_t front = all ? own.count : step.num_sinks, back = all ? 0 : step.window;
  const int32_t count = min(front + back, static_cast<int32_t>(p.list_stride));
  WaitForPrevious();  // attention of the previous layer still reads the lists
  int32_t* const tokens = p.tokens + stream * p.list_stride;
  const auto stride = static_cast<int32_t>(gridDim.x * kThreads);
  for (auto k = static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x); k < count; k += stride)
    tokens[k] = own.Position(k < front ? k : own.count - back + (k - front));
  if (blockIdx.x == 0 && threadIdx.x == 0) p.counts[stream] = count;
}

}  // namespace

cudaError_t ListCandidates(const ListCandidatesArgs& a, const SelectionBatch& selection, const int32_t* kv_len,
                           int32_t num_sequences, int32_t max_kv_len, cudaStream_t stream) {
  if (num_sequences == 0) return cudaSuccess;
  const Params p{selection, kv_len, a.lists.tokens, a.lists.counts, a.lists.stride, a.num_kv_heads};
  const int blocks = std::clamp((max_kv_len + kBlockTokens - 1) / kBlockTokens, 1, kMaxBlocks);
  return LaunchEarly(ListKernel, dim3(blocks, a.num_kv_heads * num_sequences), kThreads, 0, stream, p);
}

}  // namespace spl::kernels::cuda
