// Loading of a split for decode_attention_cuda.cu: K and V of one page after the other go through a ring in shared
// memory, each warp with its own 16 tokens of every page.
#pragma once

#include "kernels/attention/decode_splits_cuda.h"

namespace spl::kernels::cuda::decode_attention {

// Number of stages in a warp's ring; a stage holds K or V of its 16 tokens of a page. kShare CTAs share an SM of sm_80:
// few if the launch has few, so that each one has more loads in flight.
constexpr int Stages(int head_dim, int share) { return 12 / share * 128 / head_dim; }

// Positions of a KV head that a CTA attends to, or entries of a list, which then take the place of positions.
struct Attended {
  const int32_t* table;           // pages
  const int32_t* list = nullptr;  // positions; null: none is attended to
  int32_t kv_len = 0;             // positions, or entries
  int32_t list_split = 0;
  // The first entry of each lane if splits are likely_split long, read before the list's length was known.
  int32_t likely_split = 0, likely_position = 0;

  // Reads the list of a stream. slot: of the CTA among those of its head; table_smem: p.table_entries for its pages.
  // Returns with the previous kernel done.
  __device__ __forceinline__ void ReadList(const Params& p, int64_t stream, int32_t slot, int32_t* table_smem) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int32_t entries = min(p.table_entries, (kv_len + kPageTokens - 1) / kPageTokens);
    for (int i = threadIdx.x; i < entries; i += kThreads) table_smem[i] = table[i];
    if (p.table_entries > 0) table = table_smem;
    const auto stride = static_cast<int32_t>(p.lists.stride);
    list = p.lists.tokens + stream * stride;
    likely_split = p.list_split > 0 ? p.list_split : ListSplitTokens(stride);
    const int32_t entry = slot * likely_split + lane / 16 * kPageTokens + 16 * warp + lane % 16;
    WaitForPrevious();
    if (entry < stride) likely_position = list[entry];
    const int32_t count = min(p.lists.counts[stream], stride);
    if (static_cast<uint32_t>(likely_position) >= static_cast<uint32_t>(kv_len)) likely_position = 0;
    kv_len = count;
    list_split = p.list_split > 0 ? p.list_split : ListSplitTokens(count);
    __syncthreads();
  }
};

// A warp's ring. Stages are used in the order in which they are loaded: K of a page, then V of it.
template <int kHeadDim, int kStages, bool kLists>
class PageRing {
 public:
  static constexpr int kRowBytes = 2 * kHeadDim, kStageBytes = 16 * kRowBytes, kBytes = kStages * kStageBytes;

  // smem: of all warps' rings.
  __device__ __forceinline__ PageRing(const Params& p, const Attended& x, const ActiveSplits& splits, int slot,
                                      bool selected, char* smem)
      : p_(p), x_(x), selected_(selected), first_page_(splits.At(slot) * (splits.split / kPageTokens)) {
    // Lane i looks up page i of the split.
    const int lane = threadIdx.x % 32;
    physical_ = kNoPage;
    if (lane < splits.split / kPageTokens) {
      const int32_t begin = (first_page_ + lane) * kPageTokens;
      const bool visible = begin < x.kv_len && (begin < splits.sinks || begin + kPageTokens > splits.band_begin);
      if (visible) physical_ = kLists && selected ? 0 : x.table[first_page_ + lane];
    }
    to_load_ = __ballot_sync(0xffffffffu, physical_ >= 0);
    ring_ = SmemAddress(smem) + threadIdx.x / 32 * kBytes;
  }
  __device__ __forceinline__ unsigned pages() const { return to_load_; }  // bits; before the first is loaded
  __device__ __forceinline__ int32_t first_page() const { return first_page_; }

  // Starts to load until the ring is full. Where pages are read before the previous kernel is done, the one with the
  // newest position is not complete yet.
  __device__ __forceinline__ void Fill() {
    int filled = 0;
    if (p_.early && !(kLists && selected_)) {
      const int32_t newest = (x_.kv_len - 1) / kPageTokens - first_page_;
#pragma unroll 1
      for (; filled < kStages - 1 && to_load_ != 0 && __ffs(to_load_) - 1 < newest; ++filled) CopyNext();
      WaitForPrevious();
    }
#pragma unroll 1
    for (; filled < kStages - 1; ++filled) CopyNext();
  }
  // The stage that is next in order, loaded; the one behind it in the ring is refilled.
  __device__ __forceinline__ uint32_t Next() {
    CpAsyncWait<kStages - 2>();
    __syncwarp();  // every lane's copies have landed, and every lane is done with the stage that is refilled now
    CopyNext();
    const uint32_t stage = ring_ + use_stage_ * kStageBytes;
    if (++use_stage_ == kStages) use_stage_ = 0;
    return stage;
  }

 private:
  static constexpr int kChunks = kRowBytes / 16;           // 16-byte chunks per token
  static constexpr int kCopies = kStageBytes / (32 * 16);  // per lane

  __device__ __forceinline__ void CopyNext() {
    if (to_load_ != 0) {
      const int i = __ffs(to_load_) - 1;
      const int32_t begin = (first_page_ + i) * kPageTokens + 16 * (threadIdx.x / 32);
      if (kLists && selected_)
        CopyListed(i, begin);
      else
        CopyPage(i, begin);
      if (load_v_) to_load_ &= to_load_ - 1;
      load_v_ = !load_v_;
    }
    CpAsyncCommit();
    if (++load_stage_ == kStages) load_stage_ = 0;
  }
  // begin: position or entry of this warp's first token.
  __device__ __forceinline__ void CopyPage(int i, int32_t begin) {
    const int lane = threadIdx.x % 32;
    const int32_t page = __shfl_sync(0xffffffffu, physical_, i);
    const int64_t row = (static_cast<int64_t>(page) * 2 + load_v_) * kPageTokens + 16 * (threadIdx.x / 32);
    const char* source = reinterpret_cast<const char*>(p_.batch.pool.base) + row * kRowBytes;
#pragma unroll
    for (int n = 0; n < kCopies; ++n) {
      const int token = (n * 32 + lane) / kChunks, chunk = lane % kChunks;
      CpAsync16(ring_ + load_stage_ * kStageBytes + Swizzled<kRowBytes>(token, chunk),
                source + token * kRowBytes + chunk * 16, begin + token < x_.kv_len);
    }
  }
  __device__ __forceinline__ void CopyListed(int i, int32_t begin) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (i / 2 != rows_of_) {
      rows_of_ = i / 2;
      const int32_t entry = (first_page_ + 2 * rows_of_ + lane / 16) * kPageTokens + 16 * warp + lane % 16;
      int32_t position = x_.likely_position;
      if (rows_of_ > 0 || x_.list_split != x_.likely_split) position = entry < x_.kv_len ? x_.list[entry] : 0;
      listed_row_ = int64_t{x_.table[position / kPageTokens]} * 2 * kPageTokens + position % kPageTokens;
    }
    const char* half = reinterpret_cast<const char*>(p_.batch.pool.base) + (load_v_ ? kPageTokens * kRowBytes : 0);
#pragma unroll
    for (int n = 0; n < kCopies; ++n) {
      const int token = (n * 32 + lane) / kChunks, chunk = lane % kChunks;
      const int64_t row = __shfl_sync(0xffffffffu, listed_row_, i % 2 * 16 + token);
      CpAsync16(ring_ + load_stage_ * kStageBytes + Swizzled<kRowBytes>(token, chunk),
                half + row * kRowBytes + chunk * 16, begin + token < x_.kv_len);
    }
  }

  const Params& p_;
  const Attended& x_;
  const bool selected_;
  const int32_t first_page_;
  int32_t physical_;
  uint32_t ring_;
  unsigned to_load_;
  bool load_v_ = false;
  int load_stage_ = 0, use_stage_ = 0;
  // With a list: lanes 0 to 15 hold the rows of this warp's entries of page 2 rows_of, the others those of the next.
  int64_t listed_row_ = 0;
  int rows_of_ = -1;
};

}  // namespace spl::kernels::cuda::decode_attention
