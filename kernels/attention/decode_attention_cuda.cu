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
#include "kernels/attention/attention_cuda_common.h"
#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/cuda_ptx.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kWarps = kPageTokens / 16;
constexpr int kThreads = 32 * kWarps;
constexpr int kGroupSplits = 32;
constexpr int kPartsAtOnce = 16;  // partial results of a sum over splits or groups that one thread has in flight
constexpr size_t kCounters = size_t{1} << 18;  // at the start of every workspace, whatever the shape

// Positions per split. A function of the sequence's own length, so that nothing else in the batch can change a sum's
// order: short splits spread a short context over the device, long ones cost less per token.
constexpr int kMidContext = 4096, kLongContext = 65536;
__host__ __device__ constexpr int32_t SplitTokens(int32_t kv_len) {
  return kv_len <= kMidContext ? 512 : kv_len <= kLongContext ? 1024 : 2048;
}
// Entries per split of a list: a function of their number. A short list over few sequences must keep the device busy.
constexpr int kMidList = 4096, kLongList = 16384;
__host__ __device__ constexpr int32_t ListSplitTokens(int32_t count) {
  return count <= kMidList ? 128 : count <= kLongList ? 256 : 512;
}
constexpr int kMaxSplitPages = 2048 / kPageTokens;
static_assert(kMaxSplitPages <= 32, "one lane looks up one page");

struct Params {
  HeadRules rules;
  PagedBatch batch;
  const Band* plans;  // see DecodeArgs
  const int64_t* plan_offset;
  TokenLists lists;
  int32_t list_split;
  int32_t table_entries;                 // page table entries that a block with a list keeps in shared memory; 0: none
  int32_t slot_begin[kMaxKvHeads + 1];   // first split of KV head h among the splits of a sequence
  int32_t group_begin[kMaxKvHeads + 1];  // and among the groups
  const __nv_bfloat16* q;
  int64_t q_row_stride;
  __nv_bfloat16* out;
  float* lse;
  unsigned* head_counters;   // [num_sequences, num_kv_heads]
  unsigned* group_counters;  // [num_sequences, groups]
  // Results of splits and of groups: [num_sequences, slots or groups, query heads of a KV head] x head_dim floats, not
  // yet divided by the sum, and the running maximum (log2 units) and the sum.
  float4* split_out;
  float2* split_max_sum;
  float4* group_out;
  float2* group_max_sum;
  int32_t num_kv_heads, group;
  float scale;
  bool early;
};

// Splits that hold something visible, in ascending order.
struct ActiveSplits {
  int32_t split;              // positions
  int32_t sinks, band_begin;  // visible: [0, sinks) and [band_begin, kv_len)
  int32_t sink_splits, first_band_split, count;

  __device__ ActiveSplits(Band band, int32_t kv_len) : ActiveSplits(band, kv_len, SplitTokens(kv_len)) {}
  __device__ ActiveSplits(Band band, int32_t kv_len, int32_t split_tokens) : split(split_tokens) {
    band_begin = kv_len > band.window ? kv_len - band.window : 0;
    sinks = band.sinks < band_begin ? band.sinks : band_begin;
    first_band_split = band_begin / split;
    sink_splits = min((sinks + split - 1) / split, first_band_split);
    count = kv_len <= 0 ? 0 : sink_splits + (kv_len - 1) / split - first_band_split + 1;
  }
  __device__ int32_t At(int i) const { return i < sink_splits ? i : first_band_split + i - sink_splits; }
};

// The most splits that can be active for any kv_len up to max_kv_len.
int32_t MaxSplits(Band band, int32_t max_kv_len) {
  const auto splits = [](int64_t tokens, int64_t split) { return (tokens + split - 1) / split; };
  int64_t all = 1;
  for (const int32_t longest : {kMidContext, kLongContext, kMaxDecodeKvLen}) {
    const int32_t tokens = std::min(max_kv_len, longest);
    all = std::max(all, splits(tokens, SplitTokens(tokens)));
  }
  // A window of w tokens touches no more splits than when its first token is the last of one.
  constexpr int kShortest = SplitTokens(1);
  const int64_t of_band = splits(band.sinks, kShortest) + splits(int64_t{band.window} - 1, kShortest) + 1;
  return static_cast<int32_t>(std::min(all, of_band));
}

int32_t MaxListSplits(int64_t stride, int32_t list_split) {
  int64_t most = 1;
  for (const int64_t longest : {int64_t{kMidList}, int64_t{kLongList}, stride}) {
    const int64_t count = std::min(stride, longest);
    const int64_t split = list_split > 0 ? list_split : ListSplitTokens(static_cast<int32_t>(count));
    most = std::max(most, (count + split - 1) / split);
  }
  return static_cast<int32_t>(most);
}

// Number of stages in a warp's ring; a stage holds K or V of its 16 tokens of a page. kShare CTAs share an SM of sm_80:
// few if the launch has few, so that each one has more loads in flight.
constexpr int Stages(int head_dim, int share) { return 12 / share * 128 / head_dim; }
constexpr int MostPerSm(int head_tiles) { return head_tiles == 1 ? 4 : 3; }  // by registers

// kHeadTiles: 8 query heads each. kLists: some streams attend to lists.
template <int kHeadDim, int kHeadTiles, int kShare, bool kLists>
__global__ void __launch_bounds__(kThreads, std::min(kShare, MostPerSm(kHeadTiles)))
    DecodeMmaKernel(const __grid_constant__ Params p) {
  constexpr int kStages = Stages(kHeadDim, kShare);
  constexpr int kRowBytes = 2 * kHeadDim;
  constexpr int kChunks = kRowBytes / 16;  // 16-byte chunks per token
  constexpr int kStageBytes = 16 * kRowBytes;
  constexpr int kRingBytes = kStages * kStageBytes;
  constexpr int kCopies = kStageBytes / (32 * 16);  // per lane
  constexpr int kMergeStride = kHeadDim + 4;        // floats; keeps the four lanes of a quad apart
  constexpr int kMergeBytes = 8 * kHeadTiles * kMergeStride * 4;
  static_assert(kMergeBytes <= kRingBytes);
  extern __shared__ __align__(1024) char smem[];
  __shared__ float2 warp_max_sum[kWarps][8 * kHeadTiles];
  __shared__ bool is_last;

  LetNextStart();
  if (!p.early) WaitForPrevious();

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, c = lane % 4;
  const int sequence = blockIdx.y, slot = blockIdx.x;
  int head = 0;
  while (slot >= p.slot_begin[head + 1]) ++head;
  const int slot_in_head = slot - p.slot_begin[head];
  const int64_t first_row_head = static_cast<int64_t>(sequence) * p.num_kv_heads * p.group + head * p.group;
  int32_t kv_len = p.batch.kv_len[sequence];
  const int32_t* table = p.batch.page_tables + p.batch.table_offset[sequence] + head * p.batch.head_stride;

  const Band band = p.plans == nullptr ? BandOf(p.rules.head[head]) : p.plans[p.plan_offset[sequence] + head];
  bool selected = false;
  const int32_t* list = nullptr;
  int32_t list_split = 0, likely_split = 0, likely_position = 0;
  if constexpr (kLists) {
    selected = band.window == kSelectedWindow;
    if (selected) {  // from here on, list entries replace positions
      auto* in_smem = reinterpret_cast<int32_t*>(smem + kWarps * kRingBytes);
      const int32_t table_entries = min(p.table_entries, (kv_len + kPageTokens - 1) / kPageTokens);
      for (int i = threadIdx.x; i < table_entries; i += kThreads) in_smem[i] = table[i];
      if (p.table_entries > 0) table = in_smem;
      const auto stride = static_cast<int32_t>(p.lists.stride);
      const int64_t stream = int64_t{sequence} * p.num_kv_heads + head;
      list = p.lists.tokens + stream * stride;
      likely_split = p.list_split > 0 ? p.list_split : ListSplitTokens(stride);
      const int32_t entry = slot_in_head * likely_split + lane / 16 * kPageTokens + 16 * warp + lane % 16;
      WaitForPrevious();
      // Loads the first entries before the length of the list is known.
      if (entry < stride) likely_position = list[entry];
      const int32_t count = min(p.lists.counts[stream], stride);
      if (static_cast<uint32_t>(likely_position) >= static_cast<uint32_t>(kv_len)) likely_position = 0;
      kv_len = count;
      list_split = p.list_split > 0 ? p.list_split : ListSplitTokens(count);
      __syncthreads();
    }
  }
  const ActiveSplits splits =
      !kLists || !selected ? ActiveSplits(band, kv_len) : ActiveSplits(Band{0, kFullWindow}, kv_len, list_split);
  if (slot_in_head >= max(splits.count, 1)) return;
  if (splits.count == 0) {
    WaitForPrevious();
    for (int i = threadIdx.x; i < p.group * kHeadDim; i += kThreads) {
      p.out[first_row_head * kHeadDim + i] = __float2bfloat16(0.0f);
    }
    if (p.lse != nullptr && threadIdx.x < p.group) p.lse[first_row_head + threadIdx.x] = -INFINITY;
    return;
  }
  const int32_t first_page = splits.At(slot_in_head) * (splits.split / kPageTokens);
  // Lane i looks up page i of the split.
  int32_t physical = kNoPage;
  if (lane < splits.split / kPageTokens) {
    const int32_t begin = (first_page + lane) * kPageTokens;
    const bool visible = begin < kv_len && (begin < splits.sinks || begin + kPageTokens > splits.band_begin);
    if (visible) physical = kLists && selected ? 0 : table[first_page + lane];
  }
  const unsigned pages = __ballot_sync(0xffffffffu, physical >= 0);

  // K and V of one page after the other go through the ring.
  const uint32_t ring = SmemAddress(smem) + warp * kRingBytes;
  unsigned to_load = pages, to_use = pages;
  bool load_v = false;
  int load_stage = 0, use_stage = 0;
  // With a list: lanes 0 to 15 hold the rows of this warp's entries of page 2 rows_of, the others those of the next.
  int64_t listed_row = 0;
  int rows_of = -1;
  const auto copy_next = [&] {
    if (to_load != 0) {
      const int i = __ffs(to_load) - 1;
      const int32_t begin = (first_page + i) * kPageTokens + 16 * warp;
      if (kLists && selected) {
        if (i / 2 != rows_of) {
          rows_of = i / 2;
          const int32_t entry = (first_page + 2 * rows_of + lane / 16) * kPageTokens + 16 * warp + lane % 16;
          int32_t position = likely_position;
          if (rows_of > 0 || list_split != likely_split) position = entry < kv_len ? list[entry] : 0;
          listed_row = int64_t{table[position / kPageTokens]} * 2 * kPageTokens + position % kPageTokens;
        }
        const char* half = reinterpret_cast<const char*>(p.batch.pool.base) + (load_v ? kPageTokens * kRowBytes : 0);
#pragma unroll
        for (int n = 0; n < kCopies; ++n) {
          const int token = (n * 32 + lane) / kChunks, chunk = lane % kChunks;
          const int64_t row = __shfl_sync(0xffffffffu, listed_row, i % 2 * 16 + token);
          CpAsync16(ring + load_stage * kStageBytes + Swizzled<kRowBytes>(token, chunk),
                    half + row * kRowBytes + chunk * 16, begin + token < kv_len);
        }
      } else {
        const int32_t page = __shfl_sync(0xffffffffu, physical, i);
        const int64_t row = (static_cast<int64_t>(page) * 2 + load_v) * kPageTokens + 16 * warp;
        const char* source = reinterpret_cast<const char*>(p.batch.pool.base) + row * kRowBytes;
#pragma unroll
        for (int n = 0; n < kCopies; ++n) {
          const int token = (n * 32 + lane) / kChunks, chunk = lane % kChunks;
          CpAsync16(ring + load_stage * kStageBytes + Swizzled<kRowBytes>(token, chunk),
                    source + token * kRowBytes + chunk * 16, begin + token < kv_len);
        }
      }
      if (load_v) to_load &= to_load - 1;
      load_v = !load_v;
    }
    CpAsyncCommit();
    if (++load_stage == kStages) load_stage = 0;
  };
  const auto next_stage = [&] {
    CpAsyncWait<kStages - 2>();
    __syncwarp();  // every lane's copies have landed, and every lane is done with the stage that is refilled now
    copy_next();
    const uint32_t stage = ring + use_stage * kStageBytes;
    if (++use_stage == kStages) use_stage = 0;
    return stage;
  };
  int filled = 0;
  if (p.early && !(kLists && selected)) {  // the page that holds the newest position is not complete yet
    const int32_t newest = (kv_len - 1) / kPageTokens - first_page;
#pragma unroll 1
    for (; filled < kStages - 1 && to_load != 0 && __ffs(to_load) - 1 < newest; ++filled) copy_next();
    WaitForPrevious();
  }
#pragma unroll 1
  for (; filled < kStages - 1; ++filled) copy_next();

  // q as B operand: lane holds head g, dims 16 k + 2 c (+1, +8, +9).
  uint32_t q[kHeadTiles][kHeadDim / 16][2];
#pragma unroll
  for (int t = 0; t < kHeadTiles; ++t) {
    const bool exists = 8 * t + g < p.group;
    const auto* row = reinterpret_cast<const uint32_t*>(p.q + sequence * p.q_row_stride +
                                                        (head * p.group + (exists ? 8 * t + g : 0)) * kHeadDim);
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      q[t][k][0] = exists ? row[8 * k + c] : 0;
      q[t][k][1] = exists ? row[8 * k + c + 4] : 0;
    }
  }

  float o[kHeadTiles][kHeadDim / 16][4] = {};  // rows: dims 16 i + g (+8); columns: heads 2 c, 2 c + 1
  float m[kHeadTiles][2], l[kHeadTiles][2];
#pragma unroll
  for (int t = 0; t < kHeadTiles; ++t) m[t][0] = m[t][1] = -INFINITY, l[t][0] = l[t][1] = 0;

  while (to_use != 0) {
    const int i = __ffs(to_use) - 1;
    to_use &= to_use - 1;
    const uint32_t k_tile = next_stage();

    // Tokens g, g + 8; heads 2 c, 2 c + 1. Two chains of products, for one alone waits for each of its own.
    constexpr int kChains = kHeadTiles == 1 ? 2 : 1;
    float s[kHeadTiles][4] = {}, odd[kHeadTiles][4] = {};
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      uint32_t a[4];
      LdMatrix4(a, k_tile + Swizzled<kRowBytes>(lane & 15, 2 * k + lane / 16));
#pragma unroll
      for (int t = 0; t < kHeadTiles; ++t) Mma16816(k % kChains == 0 ? s[t] : odd[t], a, q[t][k][0], q[t][k][1]);
    }
    if constexpr (kChains == 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[0][i] += odd[0][i];
    }
    const int32_t j = (first_page + i) * kPageTokens + 16 * warp + g;
    const bool visible0 = j < kv_len && (j < splits.sinks || j >= splits.band_begin);
    const bool visible1 = j + 8 < kv_len && (j + 8 < splits.sinks || j + 8 >= splits.band_begin);
    uint32_t weights[kHeadTiles][2];
#pragma unroll
    for (int t = 0; t < kHeadTiles; ++t) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& s0 = s[t][h];
        float& s1 = s[t][2 + h];
        s0 = visible0 ? s0 * p.scale : -INFINITY;
        s1 = visible1 ? s1 * p.scale : -INFINITY;
        float max = fmaxf(s0, s1);
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 4));
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 8));
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 16));
        max = fmaxf(max, m[t][h]);
        const float base = max == -INFINITY ? 0.0f : max;
        const float shrink = Exp2(m[t][h] - base);
        m[t][h] = max;
        s0 = Exp2(s0 - base);
        s1 = Exp2(s1 - base);
        l[t][h] = l[t][h] * shrink + (s0 + s1);  // this lane's tokens only
#pragma unroll
        for (int k = 0; k < kHeadDim / 16; ++k) {
          o[t][k][h] *= shrink;
          o[t][k][2 + h] *= shrink;
        }
      }
      // Rows are tokens; as B operand they must be columns.
      weights[t][0] = TransposeMatrix(PackBf16(s[t][0], s[t][1]));
      weights[t][1] = TransposeMatrix(PackBf16(s[t][2], s[t][3]));
    }
    const uint32_t v_tile = next_stage();
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      uint32_t a[4];
      LdMatrix4Trans(a, v_tile + Swizzled<kRowBytes>(lane / 16 * 8 + (lane & 7), 2 * k + (lane >> 3 & 1)));
#pragma unroll
      for (int t = 0; t < kHeadTiles; ++t) Mma16816(o[t][k], a, weights[t][0], weights[t][1]);
    }
  }
  CpAsyncWait<0>();
  __syncwarp();

  // Merge the warps: each writes its sums over its own ring.
  float* merge = reinterpret_cast<float*>(smem + warp * kRingBytes);
#pragma unroll
  for (int t = 0; t < kHeadTiles; ++t) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = l[t][h];
      sum += __shfl_xor_sync(0xffffffffu, sum, 4);
      sum += __shfl_xor_sync(0xffffffffu, sum, 8);
      sum += __shfl_xor_sync(0xffffffffu, sum, 16);
      const int column = 8 * t + 2 * c + h;
      if (g == 0) warp_max_sum[warp][column] = float2{m[t][h], sum};
#pragma unroll
      for (int k = 0; k < kHeadDim / 16; ++k) {
        merge[column * kMergeStride + 16 * k + g] = o[t][k][h];
        merge[column * kMergeStride + 16 * k + g + 8] = o[t][k][2 + h];
      }
    }
  }
  __syncthreads();

  // From here on a thread owns four dims of a query head.
  constexpr int kQuads = kHeadDim / 4;
  const int64_t first_slot = static_cast<int64_t>(sequence) * p.slot_begin[p.num_kv_heads] + p.slot_begin[head];
  const int64_t my_slot = first_slot + slot_in_head;
  const auto write = [&](int row, int quad, float4 x, float max, float sum) {
    const float inverse = sum > 0 ? 1.0f / sum : 0.0f;
    uint2 packed{PackBf16(x.x * inverse, x.y * inverse), PackBf16(x.z * inverse, x.w * inverse)};
    *reinterpret_cast<uint2*>(p.out + (first_row_head + row) * kHeadDim + 4 * quad) = packed;
    if (p.lse != nullptr && quad == 0) p.lse[first_row_head + row] = sum > 0 ? kLn2 * (max + log2f(sum)) : -INFINITY;
  };
  for (int at = threadIdx.x; at < p.group * kQuads; at += kThreads) {
    const int row = at / kQuads, quad = at % kQuads;
    float max = warp_max_sum[0][row].x;
#pragma unroll
    for (int w = 1; w < kWarps; ++w) max = fmaxf(max, warp_max_sum[w][row].x);
    const float base = max == -INFINITY ? 0.0f : max;
    float sum = 0;
    float4 x{0, 0, 0, 0};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float weight = Exp2(warp_max_sum[w][row].x - base);
      sum += weight * warp_max_sum[w][row].y;
      const float4 y =
          *reinterpret_cast<const float4*>(smem + w * kRingBytes + (row * kMergeStride + 4 * quad) * sizeof(float));
      x = float4{x.x + weight * y.x, x.y + weight * y.y, x.z + weight * y.z, x.w + weight * y.w};
    }
    if (splits.count == 1) {
      write(row, quad, x, max, sum);
    } else {
      if (quad == 0) p.split_max_sum[my_slot * p.group + row] = float2{max, sum};
      p.split_out[(my_slot * p.group + row) * kQuads + quad] = x;
    }
  }
  if (splits.count == 1) return;

  // True in the CTA that arrives last of n; the counter is back at zero then, and the writes of the others are visible.
  const auto arrive_last = [&](unsigned* counter, int n) {
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();  // cumulative: covers what the barrier ordered before it
      is_last = atomicInc(counter, n - 1) == static_cast<unsigned>(n) - 1;
      __threadfence();
    }
    __syncthreads();
    return is_last;
  };
  // Adds up n parts in ascending order; done(row, quad, x, max, sum) per thread.
  const auto add_up = [&](const float4* parts, const float2* max_sums, int n_parts, const auto& done) {
    auto* some = reinterpret_cast<float2*>(smem);
    const int at_once = kWarps * kRingBytes / static_cast<int>(sizeof(float2)) / p.group;
    for (int first = 0; first < p.group * kQuads; first += kThreads) {
      const int at = min(first + static_cast<int>(threadIdx.x), p.group * kQuads - 1);
      const int row = at / kQuads, quad = at % kQuads;
      float max = -INFINITY, sum = 0;
      float4 x{0, 0, 0, 0};
      for (int begin = 0; begin < n_parts; begin += at_once) {
        const int n = min(at_once, n_parts - begin);
        float4 y[kPartsAtOnce];
        const auto load = [&](int i) {
#pragma unroll
          for (int k = 0; k < kPartsAtOnce; ++k) {
            if (i + k < n) y[k] = __ldcg(&parts[(static_cast<int64_t>(begin + i + k) * p.group + row) * kQuads + quad]);
          }
        };
        load(0);
        __syncthreads();
        for (int i = threadIdx.x; i < n * p.group; i += kThreads) {
          some[i] = __ldcg(&max_sums[static_cast<int64_t>(begin) * p.group + i]);
        }
        __syncthreads();
        float next = max;
        for (int i = 0; i < n; ++i) next = fmaxf(next, some[i * p.group + row].x);
        const float base = next == -INFINITY ? 0.0f : next;
        const float shrink = Exp2(max - base);
        max = next;
        sum *= shrink;
        x = float4{x.x * shrink, x.y * shrink, x.z * shrink, x.w * shrink};
        for (int i = 0; i < n; i += kPartsAtOnce) {
          if (i > 0) load(i);
#pragma unroll
          for (int k = 0; k < kPartsAtOnce; ++k) {
            if (i + k < n) {
              const float2 ms = some[(i + k) * p.group + row];
              const float weight = Exp2(ms.x - base);
              sum += weight * ms.y;
              x = float4{x.x + weight * y[k].x, x.y + weight * y[k].y, x.z + weight * y[k].z, x.w + weight * y[k].w};
            }
          }
        }
      }
      if (first + static_cast<int>(threadIdx.x) < p.group * kQuads) done(row, quad, x, max, sum);
    }
  };

  const int group = slot_in_head / kGroupSplits, groups = (splits.count + kGroupSplits - 1) / kGroupSplits;
  const int in_group = min(kGroupSplits, splits.count - group * kGroupSplits);
  const int64_t first_group = static_cast<int64_t>(sequence) * p.group_begin[p.num_kv_heads] + p.group_begin[head];
  const int64_t my_group = first_group + group;
  if (!arrive_last(&p.group_counters[my_group], in_group)) return;
  const int64_t group_slot = (first_slot + group * kGroupSplits) * p.group;
  add_up(p.split_out + group_slot * kQuads, p.split_max_sum + group_slot, in_group,
         [&](int row, int quad, float4 x, float max, float sum) {
           if (groups == 1) {
             write(row, quad, x, max, sum);
             return;
           }
           if (quad == 0) p.group_max_sum[my_group * p.group + row] = float2{max, sum};
           p.group_out[(my_group * p.group + row) * kQuads + quad] = x;
         });
  if (groups == 1 || !arrive_last(&p.head_counters[sequence * p.num_kv_heads + head], groups)) return;
  add_up(p.group_out + first_group * p.group * kQuads, p.group_max_sum + first_group * p.group, groups, write);
}

template <int kHeadDim, int kHeadTiles, int kShare, bool kLists>
cudaError_t LaunchShare(const Params& p, dim3 grid, cudaStream_t stream) {
  const auto kernel = DecodeMmaKernel<kHeadDim, kHeadTiles, kShare, kLists>;
  const int smem_bytes = kWarps * Stages(kHeadDim, kShare) * 16 * 2 * kHeadDim + p.table_entries * 4;
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (e != cudaSuccess) return e;
  if (p.early) return LaunchEarly(kernel, grid, kThreads, smem_bytes, stream, p);
  kernel<<<grid, kThreads, smem_bytes, stream>>>(p);
  return cudaGetLastError();
}

// smem_per_block: the most a CTA may have; sm_80 to sm_89 may not have enough for the deep ring.
template <int kHeadDim, int kHeadTiles>
cudaError_t Launch(const Params& p, int num_sms, int smem_per_block, int num_sequences, cudaStream_t stream) {
  const dim3 grid(p.slot_begin[p.num_kv_heads], num_sequences);
  const int64_t ctas = int64_t{grid.x} * grid.y;
  if (p.lists.tokens != nullptr) {
    // All of a short split is in flight at once; a deeper ring would keep the kernel that chooses off the
    // multiprocessor.
    if (smem_per_block >= (200 << 10) && ctas <= 2 * num_sms)
      return LaunchShare<kHeadDim, kHeadTiles, 2, true>(p, grid, stream);
    return LaunchShare<kHeadDim, kHeadTiles, 4, true>(p, grid, stream);
  }
  if (smem_per_block >= (200 << 10)) {
    if (ctas <= num_sms) return LaunchShare<kHeadDim, kHeadTiles, 1, false>(p, grid, stream);
    if (ctas <= 2 * num_sms) return LaunchShare<kHeadDim, kHeadTiles, 2, false>(p, grid, stream);
  }
  return LaunchShare<kHeadDim, kHeadTiles, 4, false>(p, grid, stream);
}

int32_t Groups(int32_t splits) { return (splits + kGroupSplits - 1) / kGroupSplits; }

}  // namespace

cudaError_t DecodeMma(const DecodeArgs& a, cudaStream_t stream) {
  int capability = 0, num_sms = 0, device = 0, smem_per_block = 0;
  cudaError_t e = DeviceInfo(&capability, &num_sms);
  if (e == cudaSuccess) e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&smem_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (e != cudaSuccess) return e;
  const int group = a.heads.num_qo_heads / a.heads.num_kv_heads;
  if (capability < 80 || !TensorCoreShape(a.heads, a.batch, a.dtype, a.q, a.q_row_stride, a.out) ||
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
  const bool lists = a.lists.tokens != nullptr;
  constexpr int32_t kMaxTableEntries = 2048;  // 8 KiB
  const int32_t entries = (a.max_kv_len + kPageTokens - 1) / kPageTokens;
  if (lists && entries <= kMaxTableEntries) p.table_entries = entries;
  for (int h = 0; h < a.heads.num_kv_heads; ++h) {
    const bool selected = a.rules.head[h].rule == VisibilityRule::kSelected;
    int32_t splits = selected ? 1 : MaxSplits(BandOf(a.rules.head[h]), a.max_kv_len);
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

  const auto launch = a.heads.head_dim == 64 ? (group <= 8 ? Launch<64, 1> : Launch<64, 2>)
                                             : (group <= 8 ? Launch<128, 1> : Launch<128, 2>);
  return launch(p, num_sms, smem_per_block, a.batch.num_sequences, stream);
}

// All heads kFull is the most that can be needed.
size_t DecodeWorkspaceBytes(const AttentionHeads& heads, int32_t num_sequences, int32_t max_kv_len,
                            int64_t list_stride) {
  int32_t splits = MaxSplits(Band{0, kFullWindow}, max_kv_len);
  constexpr int32_t kShortestListSplit = kPageTokens;
  splits = std::max(splits, MaxListSplits(std::min<int64_t>(list_stride, max_kv_len), kShortestListSplit));
  const size_t parts = static_cast<size_t>(num_sequences) * heads.num_qo_heads * (splits + Groups(splits));
  return kCounters * sizeof(unsigned) + parts * (heads.head_dim * sizeof(float) + sizeof(float2));
}

}  // namespace spl::kernels::cuda
