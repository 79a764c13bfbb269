// A stream's step of sparse_attention_cuda.cu: scores (stream_scores_cuda.h), choice, dealing, attention.
#pragma once

#include "kernels/cuda/cuda_launch.h"
#include "kernels/selection/sparcas/sparse_block_cuda.h"

namespace spl::kernels::cuda::sparse_attention {

// A lane's sum of the exponentials of a head's scores, counted from `base`.
struct RunningSum {
  float base = kLowest, sum = 0;
};

// A stream's step, as a block of its cluster sees it. Pages: as in PackedTile.
template <int kBlocks, int kThreads, bool kWide, typename Pages>
class StreamStep {
 public:
  static constexpr int kDim = Pages::kDim;
  using C = Cluster<kBlocks>;
  using Choice = RunChoice<kBlocks, kThreads>;
  static constexpr int kHeads = kWide ? 8 : 4, kWarps = kThreads / 32;
  using SmemT = Smem<kBlocks, kThreads, kHeads, kDim>;
  using Products = packed_keys::Products<kWide>;
  static constexpr int kLaneHeads = Products::kLaneHeads, kSums = kWide ? 1 : 2;  // sums of a lane and head
  using Cursor = TileCursor<kWarps>;
  using Results = ResultsOf<kBlocks, kHeads, Pages>;

  __device__ __forceinline__ StreamStep(const Params& p, int sequence, int head, int rank, char* raw)
      : p_(p),
        step_(p.selection.steps[sequence]),
        staged_(p.selection.sequences[sequence]),
        s_(*reinterpret_cast<SmemT*>(raw)),
        sequence_(sequence),
        head_(head),
        stream_(sequence * p.num_kv_heads + head),
        rank_(rank),
        warp_(static_cast<int>(threadIdx.x) / 32),
        kv_len_(p.batch.kv_len[sequence]),
        budget_(min(staged_.budget, static_cast<int32_t>(p.list_stride))),
        choosable_(max(kv_len_ - staged_.recent, 0)),
        part_(choosable_, rank, kBlocks, kUnits),
        pages_(p.selection.CompactPages(sequence, head)),
        table_(p.batch.page_tables + p.batch.table_offset[sequence] + head * p.batch.head_stride),
        q_(p.q + sequence * p.q_row_stride + int64_t{head} * p.group * kDim),
        rows_(reinterpret_cast<int32_t*>(raw + sizeof(SmemT))),
        own_pages_(rows_ + p.block_entries),
        barriers_(reinterpret_cast<char*>(own_pages_ + (p.block_tiles + 3) / 4 * 4)),
        listed_(reinterpret_cast<uint32_t*>(barriers_ + kWarps * packed_keys::TileRing::kBarrierBytes)),
        max_listed_(kWarps * packed_keys::TileRing::Bytes(p.stages) / sizeof(uint32_t)),
        ring_(barriers_ + warp_ * packed_keys::TileRing::kBarrierBytes,
              reinterpret_cast<char*>(listed_) + warp_ * packed_keys::TileRing::Bytes(p.stages), p.stages),
        keys_(reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(listed_) +
                                          kWarps * packed_keys::TileRing::Bytes(p.stages))),
        places_(p, pages_, part_, warp_) {}

  __device__ __forceinline__ void Run() {
    const int32_t flags = p_.selection.flags | p_.selection.plan;
    if ((step_.flags & flags) != flags) return WaitForPrevious();
    // Everything, or the end, is in the list without a choice.
    const int32_t count = min(kv_len_, budget_), known = kv_len_ <= budget_ ? 0 : choosable_;
    const int32_t num_chosen = count - (kv_len_ - known), entries = BlockEntries(count);
    const int32_t here = min(max(count - rank_ * entries, 0), entries);  // rows that this block attends to
    // All that this thread needs from tables is asked for before any of it is waited for.
    const int32_t own = part_.first_tile + static_cast<int32_t>(threadIdx.x);
    const int32_t listed = known + rank_ * kThreads + static_cast<int32_t>(threadIdx.x);
    const int32_t first_page = p_.selection.compact_tables == nullptr ? 0 : *p_.selection.ListPages(sequence_, head_);
    const int32_t own_page = own < part_.end_tile ? table_[own] : 0,
                  page = listed < kv_len_ ? table_[listed / kTile] : 0;
    if (places_.num() > 0) places_.Of(0);
    Choice::Clear(s_.choice);
    if (first_page == kNoPage) return WaitForPrevious();
    C::Arrive();  // waited for before the first write to another block, which must have started
    if (own < part_.end_tile) own_pages_[threadIdx.x] = own_page;
    for (int32_t i = own + kThreads; i < part_.end_tile; i += kThreads) own_pages_[i - part_.first_tile] = table_[i];
    BringKeys(num_chosen > 0);
    if (listed < kv_len_) Deal(listed, page, num_chosen + (listed - known), entries);
    for (int32_t j = listed + kBlocks * kThreads; j < kv_len_; j += kBlocks * kThreads)
      Deal(j, table_[j / kTile], num_chosen + (j - known), entries);
    if (rank_ == 0 && threadIdx.x == 0) p_.counts[stream_] = count;
    if (num_chosen > 0) {
      const Cursor end = Score();
      const ChoiceBins bins = WeightBins(static_cast<float>(p_.group), num_chosen);
      Weigh(bins, end);
      Choice::Choose(s_.choice, rank_, static_cast<uint32_t>(part_.begin), part_.end - part_.begin,
                     static_cast<uint32_t>(num_chosen), bins, keys_, s_.picked,
                     // Noted first, for a lane may have many and others none.
                     [&](int i, uint32_t n, uint32_t place) {
                       if (n < max_listed_) {
                         listed_[n] = static_cast<uint32_t>(i);
                       } else {
                         Deal(part_.begin + i, own_pages_[i / kTile], static_cast<int32_t>(place), entries);
                       }
                     });
      __syncthreads();
      DealListed(entries);
    } else {
      C::Sync();
    }
    if (staged_.hot.any()) return;  // some of the rows are not in the pool yet
    Attend(listed_rows::PartEntries(count), here);
  }

 private:
  __device__ __forceinline__ void LoadFirst() {
#pragma unroll 1
    for (int n = 0; n < min(ring_.stages(), places_.num()); ++n) ring_.Load(n, 1, places_.Of(n));
  }
  // The packed keys are up to date, and the first ones on their way if they will be scored. Returns with the previous
  // kernel done, and all blocks of the cluster running.
  __device__ __forceinline__ void BringKeys(bool scored) {
    const int parity = step_.flags & StagedStep::kParity ? 1 : 0;
    const bool refresh = step_.flags & StagedStep::kRefresh;
    int32_t* tables = staged_.dims + p_.dims_offset + head_ * 2 * kPackedDims;
    const int32_t* dims = tables + parity * kPackedDims;
    const bool anew = refresh || (step_.flags & StagedStep::kFirst);
    const int32_t before = anew ? 0 : (max(step_.compact_len - staged_.recent, 0) + kTile - 1) / kTile;
    const int32_t from = max(before, part_.first_tile);
    const bool packs = refresh || from < part_.end_tile;
    if (!p_.early) WaitForPrevious();
    if (!packs) {
      const int32_t dim = threadIdx.x < kPackedDims ? dims[threadIdx.x] : 0;
      if (scored) LoadFirst();
      if (threadIdx.x < kPackedDims) s_.dims[threadIdx.x] = dim;
      __syncthreads();
    }
    WaitForPrevious();
    if (packs) {
      int32_t* after = rank_ == 0 ? tables + (1 - parity) * kPackedDims : nullptr;
      Pack<kThreads, Pages>(p_, s_,
                            {reinterpret_cast<const __nv_bfloat16*>(q_), table_, HostPages(), pages_, dims, after,
                             refresh, from, part_.end_tile});
      if (scored) LoadFirst();
    }
    products_.TakeQueries(q_, s_.dims, p_.group, kDim, p_.scale);
    C::Wait();
  }

  __device__ __forceinline__ const std::byte* const* HostPages() const {
    if (!staged_.hot.any()) return nullptr;
    return staged_.hot.stream(p_.dims_offset / (2 * kPackedDims) + head_).host_pages;
  }

  // First pass: maximum and sum of exponentials of each head over each unit, told to all blocks; then over the stream.
  // Returns a cursor behind the warp's last tile.
  __device__ __forceinline__ Cursor Score();
  // Products of two tiles at a time, so that there is more to do between two steps that depend on each other.
  struct Pair {
    uint32_t stages[2];
    typename Products::Results x[2];
    float units[2][kLaneHeads];
  };
  __device__ __forceinline__ void Multiply(Pair& pair) const;
  // Adds one of the pair to the sums of its unit, which are told if it is the last one, and goes to the next tile.
  __device__ __forceinline__ void AddTile(RunningSum (&sums)[kLaneHeads][kSums], Cursor& at, Pair& pair, int m);
  // first: of the unit; the sums then count from the largest of its scores.
  __device__ __forceinline__ void AddScores(RunningSum (&sums)[kLaneHeads][kSums], const typename Products::Results& x,
                                            const float (&units)[kLaneHeads], bool first) const;
  // Without kWide lanes are raised together whose heads are all even or all odd.
  static __device__ __forceinline__ bool Raises(bool own);
  // Sum n of the exponentials of a head's scores, counted from where `to` counts.
  __device__ __forceinline__ float SumOf(const RunningSum& to, const typename Products::Results& x, int n, int h,
                                         float unit) const;
  // The same once `to` counts from the largest of these scores, if that is larger than what it counted from.
  __device__ __forceinline__ float Raise(RunningSum& to, const typename Products::Results& x, int n, int h,
                                         float unit) const;
  __device__ __forceinline__ void HideFrom(int32_t left, typename Products::Results& x) const;
  // The lanes that have other positions of this head add theirs; the unit's sums go to every block.
  __device__ __forceinline__ void TellUnit(int32_t unit, int head, const RunningSum (&own)[kSums]);
  // Second pass, backwards: the key of each position's weight, counted by bin. at: behind the warp's last tile.
  __device__ __forceinline__ void Weigh(const ChoiceBins& bins, Cursor at);
  // The weights of a tile at two rows of one part: lanes c and c ^ 1, then c and c ^ 2, share their parts.
  __device__ __forceinline__ void AddHeads(const typename Products::Results& x, const float (&units)[kLaneHeads],
                                           const float (&minus)[kLaneHeads], float (&of)[2]) const;

  // Position j, whose page is `page`, is the place-th of the list: goes there, and to the block that attends to it.
  __device__ __forceinline__ void Deal(int32_t j, int32_t page, int32_t place, int32_t entries) {
    p_.tokens[stream_ * p_.list_stride + place] = j;
    DealRow(j, page, place, entries);
  }
  __device__ __forceinline__ void DealRow(int32_t j, int32_t page, int32_t place, int32_t entries) {
    int32_t block = 0;
#pragma unroll
    for (int b = 1; b < kBlocks; ++b) block += place >= b * entries;
    C::Store(reinterpret_cast<uint32_t*>(&rows_[place - block * entries]), block,
             static_cast<uint32_t>(page * (2 * kTile) + j % kTile));
  }
  // Deals what has been noted. Returns when all rows of the cluster have been dealt and nobody reads the noted
  // positions or the keys: results take their place. The list itself is written behind the barrier's arrival, which
  // waits for all writes before it.
  __device__ __forceinline__ void DealListed(int32_t entries) {
    constexpr int kHeld = 4;
    const auto [first, all] = s_.picked;
    const uint32_t num = min(all, max_listed_);
    int32_t held[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const uint32_t n = threadIdx.x + i * kThreads;
      if (n >= num) continue;
      held[i] = static_cast<int32_t>(listed_[n]);
      DealRow(part_.begin + held[i], own_pages_[held[i] / kTile], static_cast<int32_t>(first + n), entries);
    }
    for (uint32_t n = threadIdx.x + kHeld * kThreads; n < num; n += kThreads) {
      const auto i = static_cast<int32_t>(listed_[n]);
      Deal(part_.begin + i, own_pages_[i / kTile], static_cast<int32_t>(first + n), entries);
    }
    C::Arrive();
    int32_t* const tokens = p_.tokens + stream_ * p_.list_stride + first;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (threadIdx.x + i * kThreads < num) tokens[threadIdx.x + i * kThreads] = part_.begin + held[i];
    }
    C::Wait();
  }
  __device__ __forceinline__ int32_t BlockEntries(int32_t count) const {
    return listed_rows::PartEntries(count) * (listed_rows::kParts / kBlocks);
  }

  // of_part: rows of each part; here: rows of this block.
  __device__ __forceinline__ void Attend(int32_t of_part, int32_t here) {
    const int64_t first_head = int64_t{stream_} * p_.group;
    const listed_rows::GivenRows rows{.pool = p_.batch.pool.base,
                                      .rows = rows_,
                                      .of_part = of_part,
                                      .here = here,
                                      .q = reinterpret_cast<const __nv_bfloat16*>(q_),
                                      .group = p_.group,
                                      .scale = p_.scale,
                                      .out = p_.out + first_head * kDim,
                                      .lse = p_.lse == nullptr ? nullptr : p_.lse + first_head};
    auto& results = *reinterpret_cast<Results*>(listed_);
    if constexpr (kCodes<Pages>) {
      listed_rows::AttendRows<kBlocks, kThreads, Pages>(rows, rank_, results, s_.theirs);
    } else {
      listed_rows::AttendStagedRows<kBlocks, kThreads, Pages>(rows, rank_, results, s_.theirs);
    }
  }

  const Params& p_;
  const StagedStep step_;
  const StagedSequence& staged_;
  SmemT& s_;
  const int sequence_, head_, stream_, rank_, warp_;
  const int32_t kv_len_, budget_, choosable_;  // positions below choosable_ may be chosen
  const Part part_;                            // its tiles of those
  const int32_t* const pages_;
  const int32_t* const table_;
  const unsigned short* const q_;
  int32_t* const rows_;       // dealt to this block
  int32_t* const own_pages_;  // pages of this block's tiles
  char* const barriers_;      // those of all rings
  uint32_t* const listed_;    // chosen positions of this block, counted from its first; in the place of the tiles. Then
                              // Results
  const uint32_t max_listed_;
  packed_keys::TileRing ring_;
  uint32_t* const keys_;  // keys of this block's positions
  TilePlaces<kWarps, Pages> places_;
  Products products_;
};

}  // namespace spl::kernels::cuda::sparse_attention
