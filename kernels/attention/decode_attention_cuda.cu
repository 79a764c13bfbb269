// Decode attention with tensor cores (mma m16n8k16, sm_80 and later), split along the context.
//
// One CTA computes one split (SplitTokens positions of one KV head of one sequence) for all query heads of that
// KV head, so K and V are read once. Its warps are independent: warp w owns slots [16 w, 16 w + 16) of every page,
// loads them into its own ring in shared memory (TMA on sm_90, else cp.async) and keeps its own running softmax; they
// meet once, at the end. Scores are computed transposed (rows are tokens, columns are query heads) so that 8 heads fill
// an mma.
//
// A stream that attends to a list of positions is split along the list: its entries replace positions, and each warp
// looks up the rows it loads. The rest of the code is the same, and so are the bits for any list that names every
// position.
//
// The last CTA of a group of kGroupSplits splits to finish adds them up in ascending order, and the last group of a KV
// head adds up the groups: two short steps instead of a long one, and the same bits whatever the timing.
#include <type_traits>

#include "kernels/attention/attention_cuda_common.h"
#include "kernels/attention/decode_merge_cuda.h"
#include "kernels/attention/decode_ring_cuda.h"
#include "kernels/attention/decode_softmax_cuda.h"
#include "kernels/attention/decode_splits_cuda.h"
#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/cuda_ptx.h"

namespace spl::kernels::cuda {
namespace {

using namespace decode_attention;  // NOLINT: the stages of this kernel

constexpr int MostPerSm(int head_tiles) { return head_tiles == 1 ? 4 : 3; }  // by registers

// Output of a KV head: a thread writes four dims of a query head.
template <int kHeadDim>
struct HeadOutput {
  const Params& p;
  int64_t first_row_head;  // rows of a KV head are those of its query heads

  __device__ __forceinline__ void Write(int row, int quad, float4 x, float max, float sum) const {
    const float inverse = sum > 0 ? 1.0f / sum : 0.0f;
    uint2 packed{PackBf16(x.x * inverse, x.y * inverse), PackBf16(x.z * inverse, x.w * inverse)};
    *reinterpret_cast<uint2*>(p.out + (first_row_head + row) * kHeadDim + 4 * quad) = packed;
    if (p.lse != nullptr && quad == 0) p.lse[first_row_head + row] = sum > 0 ? kLn2 * (max + log2f(sum)) : -INFINITY;
  }
  // Nothing is visible.
  __device__ __forceinline__ void WriteNothing() const {
    for (int i = threadIdx.x; i < p.group * kHeadDim; i += kThreads)
      p.out[first_row_head * kHeadDim + i] = __float2bfloat16(0.0f);
    if (p.lse != nullptr && threadIdx.x < p.group) p.lse[first_row_head + threadIdx.x] = -INFINITY;
  }
};

// Which split of which stream a CTA has.
struct SplitPlace {
  int sequence, head, slot;
};

// Adds up the splits of a group in the CTA that comes last of it, then the groups of a head in the last of those.
// first_slot: of the head's splits; smem: smem_bytes that are free again; is_last: shared memory.
template <int kHeadDim>
__device__ __forceinline__ void AddSplits(const Params& p, const HeadOutput<kHeadDim>& out, const ActiveSplits& splits,
                                          SplitPlace at, int64_t first_slot, char* smem, int smem_bytes,
                                          bool& is_last) {
  constexpr int kQuads = kHeadDim / 4;
  const int group = at.slot / kGroupSplits, groups = Groups(splits.count);
  const int in_group = min(kGroupSplits, splits.count - group * kGroupSplits);
  const int64_t first_group =
      static_cast<int64_t>(at.sequence) * p.group_begin[p.num_kv_heads] + p.group_begin[at.head];
  const int64_t my_group = first_group + group;
  if (!ArrivesLast(&p.group_counters[my_group], in_group, is_last)) return;
  const int64_t group_slot = (first_slot + group * kGroupSplits) * p.group;
  AddParts<kHeadDim>(p, p.split_out + group_slot * kQuads, p.split_max_sum + group_slot, in_group, smem, smem_bytes,
                     [&](int row, int quad, float4 y, float max, float sum) {
                       if (groups == 1) return out.Write(row, quad, y, max, sum);
                       if (quad == 0) p.group_max_sum[my_group * p.group + row] = float2{max, sum};
                       p.group_out[(my_group * p.group + row) * kQuads + quad] = y;
                     });
  if (groups == 1 || !ArrivesLast(&p.head_counters[at.sequence * p.num_kv_heads + at.head], groups, is_last)) return;
  AddParts<kHeadDim>(p, p.group_out + first_group * p.group * kQuads, p.group_max_sum + first_group * p.group, groups,
                     smem, smem_bytes,
                     [&](int row, int quad, float4 y, float max, float sum) { out.Write(row, quad, y, max, sum); });
}

// How a kernel reads pages of bf16, or of codes.
template <int kHeadDim, int kHeadTiles, bool kCodes>
struct Reader {
  using Tiles = std::conditional_t<kCodes, CodeTiles<kHeadDim>, WideTiles<kHeadDim>>;
  using Softmax = std::conditional_t<kCodes, CodeSoftmax<kHeadDim, kHeadTiles>, WideSoftmax<kHeadDim, kHeadTiles>>;
  template <int kShare, bool kLists>
  using Ring = PageRing<Tiles, Tiles::kStageScale * Stages(kHeadDim, kShare), kLists>;
};

// kHeadTiles: 8 query heads each. kLists: some streams attend to lists.
template <int kHeadDim, int kHeadTiles, bool kCodes, int kShare, bool kLists>
__global__ void __launch_bounds__(kThreads, std::min(kShare, MostPerSm(kHeadTiles)))
    DecodeMmaKernel(const __grid_constant__ Params p) {
  using Ring = typename Reader<kHeadDim, kHeadTiles, kCodes>::template Ring<kShare, kLists>;
  using Softmax = typename Reader<kHeadDim, kHeadTiles, kCodes>::Softmax;
  constexpr int kQuads = kHeadDim / 4;
  static_assert(Softmax::kMergeBytes <= Ring::kBytes);
  extern __shared__ __align__(1024) char smem[];
  __shared__ float2 warp_max_sum[kWarps][8 * kHeadTiles];
  __shared__ bool is_last;

  LetNextStart();
  if (!p.early) WaitForPrevious();

  const int warp = threadIdx.x / 32;
  const int sequence = blockIdx.y, slot = blockIdx.x;
  int head = 0;
  while (slot >= p.slot_begin[head + 1]) ++head;
  const int slot_in_head = slot - p.slot_begin[head];
  const HeadOutput<kHeadDim> out{p, static_cast<int64_t>(sequence) * p.num_kv_heads * p.group + head * p.group};
  Attended x{.table = p.batch.page_tables + p.batch.table_offset[sequence] + head * p.batch.head_stride,
             .kv_len = p.batch.kv_len[sequence]};
  const Band band = p.plans == nullptr ? BandOf(p.rules.head[head]) : p.plans[p.plan_offset[sequence] + head];
  if (band.window == kElsewhereWindow) {
    WaitForPrevious();
    return;
  }
  const bool selected = kLists && band.window == kSelectedWindow;
  if (selected)
    x.ReadList(p, int64_t{sequence} * p.num_kv_heads + head, slot_in_head,
               reinterpret_cast<int32_t*>(smem + kWarps * Ring::kBytes));
  const ActiveSplits splits = !selected ? ActiveSplits(band, x.kv_len, SplitTokens(x.kv_len, kCodes))
                                        : ActiveSplits(Band{0, kFullWindow}, x.kv_len, x.list_split);
  if (slot_in_head >= max(splits.count, 1)) return;
  if (splits.count == 0) {
    WaitForPrevious();
    out.WriteNothing();
    return;
  }

  // The split: page after page, each warp its tokens.
  Ring ring(p, x, splits, slot_in_head, selected, smem);
  unsigned pages = ring.pages();
  ring.Fill();
  Softmax softmax(p.scale);
  softmax.LoadQueries(p.q + sequence * p.q_row_stride + head * p.group * kHeadDim, p.group);
  while (pages != 0) {
    const int32_t page = ring.first_page() + __ffs(pages) - 1;
    pages &= pages - 1;
    softmax.Score(ring, ring.Next(), page * kPageTokens + 16 * warp, x.kv_len, splits);
    softmax.Add(ring.Next());
  }
  CpAsyncWait<0>();
  __syncwarp();

  // The warps: each writes its sums over its own ring.
  softmax.Store(warp_max_sum[warp], reinterpret_cast<float*>(smem + warp * Ring::kBytes));
  __syncthreads();
  const int64_t first_slot = static_cast<int64_t>(sequence) * p.slot_begin[p.num_kv_heads] + p.slot_begin[head];
  const int64_t my_slot = first_slot + slot_in_head;
  AddWarps<kHeadDim, Ring::kBytes, Softmax::kMergeStride>(
      p, warp_max_sum, smem, [&](int row, int quad, float4 y, float max, float sum) {
        if (splits.count == 1) return out.Write(row, quad, y, max, sum);
        if (quad == 0) p.split_max_sum[my_slot * p.group + row] = float2{max, sum};
        p.split_out[(my_slot * p.group + row) * kQuads + quad] = y;
      });
  if (splits.count == 1) return;

  AddSplits<kHeadDim>(p, out, splits, {sequence, head, slot_in_head}, first_slot, smem, kWarps * Ring::kBytes, is_last);
}

template <int kHeadDim, int kHeadTiles, bool kCodes, int kShare, bool kLists>
cudaError_t LaunchShare(const Params& p, dim3 grid, cudaStream_t stream) {
  using Ring = typename Reader<kHeadDim, kHeadTiles, kCodes>::template Ring<kShare, kLists>;
  const auto kernel = DecodeMmaKernel<kHeadDim, kHeadTiles, kCodes, kShare, kLists>;
  const int smem_bytes = kWarps * Ring::kBytes + p.table_entries * 4;
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (e != cudaSuccess) return e;
  if (p.early) return LaunchEarly(kernel, grid, kThreads, smem_bytes, stream, p);
  kernel<<<grid, kThreads, smem_bytes, stream>>>(p);
  return cudaGetLastError();
}

// smem_per_block: the most a CTA may have; sm_80 to sm_89 may not have enough for the deep ring.
template <int kHeadDim, int kHeadTiles, bool kCodes>
cudaError_t Launch(const Params& p, int num_sms, int smem_per_block, int num_sequences, cudaStream_t stream) {
  const dim3 grid(p.slot_begin[p.num_kv_heads], num_sequences);
  const int64_t ctas = int64_t{grid.x} * grid.y;
  if (p.lists.tokens != nullptr) {
    // All of a short split is in flight at once; a deeper ring would keep the kernel that chooses off the
    // multiprocessor.
    if (smem_per_block >= (200 << 10) && ctas <= 2 * num_sms)
      return LaunchShare<kHeadDim, kHeadTiles, kCodes, 2, true>(p, grid, stream);
    return LaunchShare<kHeadDim, kHeadTiles, kCodes, 4, true>(p, grid, stream);
  }
  if (smem_per_block >= (200 << 10)) {
    if (ctas <= num_sms) return LaunchShare<kHeadDim, kHeadTiles, kCodes, 1, false>(p, grid, stream);
    if (ctas <= 2 * num_sms) return LaunchShare<kHeadDim, kHeadTiles, kCodes, 2, false>(p, grid, stream);
  }
  return LaunchShare<kHeadDim, kHeadTiles, kCodes, 4, false>(p, grid, stream);
}

using Launcher = cudaError_t (*)(const Params&, int num_sms, int smem_per_block, int num_sequences, cudaStream_t);
template <bool kCodes>
Launcher ChooseLaunch(int head_dim, int group) {
  if (head_dim == 64) return group <= 8 ? Launch<64, 1, kCodes> : Launch<64, 2, kCodes>;
  return group <= 8 ? Launch<128, 1, kCodes> : Launch<128, 2, kCodes>;
}

}  // namespace

cudaError_t DecodeMma(const DecodeArgs& a, cudaStream_t stream) {
  int capability = 0, num_sms = 0, device = 0, smem_per_block = 0;
  cudaError_t e = DeviceInfo(&capability, &num_sms);
  if (e == cudaSuccess) e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&smem_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (e != cudaSuccess) return e;
  const int group = a.heads.num_qo_heads / a.heads.num_kv_heads;
  if (capability < 80 || !TensorCoreShape(a.heads, a.batch, a.dtype, a.q, a.q_row_stride, a.out, true) ||
      group > kMaxDecodeGroup || a.batch.num_sequences > 65535) {
    return cudaErrorNotSupported;
  }
  if (!Aligned16(a.workspace)) return cudaErrorInvalidValue;
  Params p{};
  p.rules = a.rules;
  p.batch = a.batch;
  p.plans = a.plans;
  p.plan_offset = a.plan_offset;
  p.lists = a.lists;
  p.list_split = a.list_split;
  const bool lists = a.lists.tokens != nullptr, codes = a.batch.pool.dtype == DType::kE4M3;
  constexpr int32_t kMaxTableEntries = 2048;  // 8 KiB
  const int32_t entries = (a.max_kv_len + kPageTokens - 1) / kPageTokens;
  if (lists && entries <= kMaxTableEntries) p.table_entries = entries;
  for (int h = 0; h < a.heads.num_kv_heads; ++h) {
    const bool selected = a.rules.head[h].rule == VisibilityRule::kSelected;
    const bool elsewhere = a.rules.head[h].rule == VisibilityRule::kElsewhere;
    int32_t splits = selected || elsewhere ? 1 : MaxSplits(BandOf(a.rules.head[h]), a.max_kv_len, codes);
    if (selected || (lists && a.plans != nullptr))
      splits = std::max(splits, MaxListSplits(std::min<int64_t>(a.lists.stride, a.max_kv_len), a.list_split));
    p.slot_begin[h + 1] = p.slot_begin[h] + splits;
    p.group_begin[h + 1] = p.group_begin[h] + Groups(splits);
  }
  p.q = static_cast<const __nv_bfloat16*>(a.q);
  p.q_row_stride = a.q_row_stride;
  p.out = static_cast<__nv_bfloat16*>(a.out);
  p.lse = a.lse;
  p.num_kv_heads = a.heads.num_kv_heads;
  p.group = group;
  p.scale = a.heads.sm_scale * kLog2e;
  p.early = a.early;

  const size_t num_sequences = a.batch.num_sequences;
  const size_t groups = num_sequences * p.group_begin[a.heads.num_kv_heads];
  const size_t slots = num_sequences * p.slot_begin[a.heads.num_kv_heads];
  if (num_sequences * a.heads.num_kv_heads + groups > kCounters) return cudaErrorNotSupported;
  p.head_counters = static_cast<unsigned*>(a.workspace);
  p.group_counters = p.head_counters + num_sequences * a.heads.num_kv_heads;
  // The 16-byte pieces first.
  p.split_out = reinterpret_cast<float4*>(p.head_counters + kCounters);
  p.group_out = p.split_out + slots * group * (a.heads.head_dim / 4);
  p.split_max_sum = reinterpret_cast<float2*>(p.group_out + groups * group * (a.heads.head_dim / 4));
  p.group_max_sum = p.split_max_sum + slots * group;

  const auto launch =
      codes ? ChooseLaunch<true>(a.heads.head_dim, group) : ChooseLaunch<false>(a.heads.head_dim, group);
  return launch(p, num_sms, smem_per_block, a.batch.num_sequences, stream);
}

// All heads kFull is the most that can be needed.
size_t DecodeWorkspaceBytes(const AttentionHeads& heads, int32_t num_sequences, int32_t max_kv_len, int64_t list_stride,
                            DType pages) {
  int32_t splits = MaxSplits(Band{0, kFullWindow}, max_kv_len, pages == DType::kE4M3);
  constexpr int32_t kShortestListSplit = kPageTokens;
  splits = std::max(splits, MaxListSplits(std::min<int64_t>(list_stride, max_kv_len), kShortestListSplit));
  const size_t parts = static_cast<size_t>(num_sequences) * heads.num_qo_heads * (splits + Groups(splits));
  return kCounters * sizeof(unsigned) + parts * (heads.head_dim * sizeof(float) + sizeof(float2));
}

}  // namespace spl::kernels::cuda
