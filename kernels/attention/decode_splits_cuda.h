// How decode_attention_cuda.cu divides streams among blocks, and the arguments of its stages.
#pragma once

#include <algorithm>

#include "kernels/attention/attention_cuda_common.h"
#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/cuda_ptx.h"

namespace spl::kernels::cuda::decode_attention {

inline constexpr int kWarps = kPageTokens / 16;
inline constexpr int kThreads = 32 * kWarps;
inline constexpr int kGroupSplits = 32;
inline constexpr size_t kCounters = size_t{1} << 18;  // at the start of every workspace, whatever the shape

// Positions per split. A function of the sequence's own length and of the type of its pages, so that nothing else in
// the batch can change a sum's order: short splits spread a short context over the device, long ones cost less per
// token. Codes take half the bytes and twice the instructions of bf16.
inline constexpr int kShortContext = 2048, kMidContext = 4096, kCodeContext = 16384, kLongContext = 65536;
__host__ __device__ constexpr int32_t SplitTokens(int32_t kv_len, bool codes) {
  if (codes) return kv_len <= kShortContext ? 256 : kv_len <= kCodeContext ? 512 : kv_len <= kLongContext ? 1024 : 2048;
  return kv_len <= kMidContext ? 512 : kv_len <= kLongContext ? 1024 : 2048;
}
// Entries per split of a list: a function of their number. A short list over few sequences must keep the device busy.
inline constexpr int kMidList = 4096, kLongList = 16384;
__host__ __device__ constexpr int32_t ListSplitTokens(int32_t count) {
  return count <= kMidList ? 128 : count <= kLongList ? 256 : 512;
}
inline constexpr int kMaxSplitPages = 2048 / kPageTokens;
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
inline int32_t MaxSplits(Band band, int32_t max_kv_len, bool codes) {
  const auto splits = [](int64_t tokens, int64_t split) { return (tokens + split - 1) / split; };
  int64_t all = 1;
  for (const int32_t longest : {kShortContext, kMidContext, kCodeContext, kLongContext, kMaxDecodeKvLen}) {
    const int32_t tokens = std::min(max_kv_len, longest);
    all = std::max(all, splits(tokens, SplitTokens(tokens, codes)));
  }
  // A window of w tokens touches no more splits than when its first token is the last of one.
  const int kShortest = SplitTokens(1, codes);
  const int64_t of_band = splits(band.sinks, kShortest) + splits(int64_t{band.window} - 1, kShortest) + 1;
  return static_cast<int32_t>(std::min(all, of_band));
}

inline int32_t MaxListSplits(int64_t stride, int32_t list_split) {
  int64_t most = 1;
  for (const int64_t longest : {int64_t{kMidList}, int64_t{kLongList}, stride}) {
    const int64_t count = std::min(stride, longest);
    const int64_t split = list_split > 0 ? list_split : ListSplitTokens(static_cast<int32_t>(count));
    most = std::max(most, (count + split - 1) / split);
  }
  return static_cast<int32_t>(most);
}

__host__ __device__ constexpr int32_t Groups(int32_t splits) { return (splits + kGroupSplits - 1) / kGroupSplits; }

}  // namespace spl::kernels::cuda::decode_attention
