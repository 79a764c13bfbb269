// Loading of a split for decode_attention_cuda.cu: K and V of one page after the other go through a ring in shared
// memory, each warp with its own 16 tokens of every page.
#pragma once

#include "kernels/attention/decode_splits_cuda.h"
#include "kernels/attention/decode_tiles_cuda.h"

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

// A warp's ring. Stages are used in the order in which they are loaded: K of a page, then V of it. With codes the stage
// of K brings the scales of both halves along.
template <typename Tiles, int kStages, bool kLists>
class PageRing {
 public:
  static constexpr int kRowBytes = Tiles::kRowBytes, kStageBytes = 16 * kRowBytes;
  // Scales of a stage: 16 bytes of K, then of V. With lists the 4 bytes around each scale, then which of them it is.
  static constexpr int kScaleBytes = !Tiles::kCodes ? 0 : kLists ? 32 * 4 + 32 : 32;
  static constexpr int kBytes = kStages * (kStageBytes + kScaleBytes);

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
    scales_ = ring_ + kStages * kStageBytes + use_stage_ * kScaleBytes;
    if (++use_stage_ == kStages) use_stage_ = 0;
    return stage;
  }
  // The scale of K (half 0) or V of one of the 16 tokens whose K was returned last.
  __device__ __forceinline__ uint32_t Scale(int half, int token) const {
    const int i = 16 * half + token;
    if (kLists && selected_) return LoadShared1(scales_ + 4 * i + LoadShared1(scales_ + 128 + i));
    return LoadShared1(scales_ + i);
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
    const int warp = threadIdx.x / 32;
    const char* page_bytes = reinterpret_cast<const char*>(p_.batch.pool.base) + int64_t{page} * 2 * Tiles::kHalfBytes;
    const char* source = page_bytes + (load_v_ ? Tiles::kHalfBytes : 0) + 16 * warp * kRowBytes;
#pragma unroll
    for (int n = 0; n < kCopies; ++n) {
      const int token = (n * 32 + lane) / kChunks, chunk = lane % kChunks;
      CpAsync16(ring_ + load_stage_ * kStageBytes + Tiles::Place(token, chunk), source + token * kRowBytes + chunk * 16,
                begin + token < x_.kv_len);
    }
    if constexpr (Tiles::kCodes) {
      if (!load_v_ && lane < 2)
        CpAsync16(LoadScales() + 16 * lane, page_bytes + lane * Tiles::kHalfBytes + Tiles::kScalesAt + 16 * warp, true);
    }
  }
  __device__ __forceinline__ void CopyListed(int i, int32_t begin) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (i / 2 != rows_of_) {
      rows_of_ = i / 2;
      const int32_t entry = (first_page_ + 2 * rows_of_ + lane / 16) * kPageTokens + 16 * warp + lane % 16;
      int32_t position = x_.likely_position;
      if (rows_of_ > 0 || x_.list_split != x_.likely_split) position = entry < x_.kv_len ? x_.list[entry] : 0;
      listed_page_ = x_.table[position / kPageTokens];
      listed_slot_ = position % kPageTokens;
    }
    const char* half = reinterpret_cast<const char*>(p_.batch.pool.base) + (load_v_ ? Tiles::kHalfBytes : 0);
#pragma unroll
    for (int n = 0; n < kCopies; ++n) {
      const int token = (n * 32 + lane) / kChunks, chunk = lane % kChunks;
      const int64_t page = __shfl_sync(0xffffffffu, listed_page_, i % 2 * 16 + token);
      const int slot = __shfl_sync(0xffffffffu, listed_slot_, i % 2 * 16 + token);
      CpAsync16(ring_ + load_stage_ * kStageBytes + Tiles::Place(token, chunk),
                half + page * 2 * Tiles::kHalfBytes + slot * kRowBytes + chunk * 16, begin + token < x_.kv_len);
    }
    if constexpr (Tiles::kCodes) {
      if (load_v_) return;
      // Lane l has the scale of K, or from 16 on of V, of token l % 16.
      const int64_t page = __shfl_sync(0xffffffffu, listed_page_, i % 2 * 16 + lane % 16);
      const int slot = __shfl_sync(0xffffffffu, listed_slot_, i % 2 * 16 + lane % 16);
      CpAsync4(LoadScales() + 4 * lane,
               half + (page * 2 + lane / 16) * Tiles::kHalfBytes + Tiles::kScalesAt + (slot & ~3),
               begin + lane % 16 < x_.kv_len ? 4 : 0);
      StoreShared1(LoadScales() + 128 + lane, slot & 3);
    }
  }
  // Scales of the stage that is loaded.
  __device__ __forceinline__ uint32_t LoadScales() const {
    return ring_ + kStages * kStageBytes + load_stage_ * kScaleBytes;
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
  uint32_t scales_ = 0;
  // With a list: lanes 0 to 15 hold the rows of this warp's entries of page 2 rows_of, the others those of the next.
  int32_t listed_page_ = 0, listed_slot_ = 0;
  int rows_of_ = -1;
};

}  // namespace spl::kernels::cuda::decode_attention
