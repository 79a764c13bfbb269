// A stream's step of sparse_attention_cuda.cu: scores (score_tiles_cuda.h), choice, dealing, attention.
#pragma once

#include "kernels/cuda/cuda_launch.h"
#include "kernels/selection/sparcas/sample_tail_cuda.h"
#include "kernels/selection/sparcas/score_tiles_cuda.h"

namespace spl::kernels::cuda::sparse_attention {

// A stream's step, as a block of its cluster sees it. Pages: as in PackedTile. kMass: Params::kept_mass is asked for.
template <int kBlocks, int kThreads, bool kWide, typename Pages, bool kMass>
class StreamStep {
 public:
  static constexpr int kDim = Pages::kDim;
  using C = Cluster<kBlocks>;
  using Choice = RunChoice<kBlocks, kThreads>;
  static constexpr int kHeads = kWide ? 8 : 4, kWarps = kThreads / 32;
  using SmemT = Smem<kBlocks, kThreads, kHeads, kDim>;
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
        kv_len_(p.batch.kv_len[sequence]),
        budget_(min(staged_.budget, static_cast<int32_t>(p.list_stride))),
        choosable_(max(kv_len_ - staged_.recent, 0)),
        part_(choosable_, rank, kBlocks, kUnits),
        list_pages_(p.selection.compact_tables == nullptr ? nullptr : p.selection.ListPages(sequence, head)),
        pages_(list_pages_ + staged_.list_pages),
        table_(p.batch.page_tables + p.batch.table_offset[sequence] + head * p.batch.head_stride),
        q_(p.q + sequence * p.q_row_stride + int64_t{head} * p.group * kDim),
        rows_(reinterpret_cast<int32_t*>(raw + sizeof(SmemT))),
        own_pages_(rows_ + p.block_entries),
        barriers_(reinterpret_cast<char*>(own_pages_ + (p.block_tiles + 3) / 4 * 4)),
        listed_(reinterpret_cast<uint32_t*>(barriers_ + kWarps * packed_keys::TileRing::kBarrierBytes)),
        max_listed_(kWarps * packed_keys::TileRing::Bytes(p.stages) / sizeof(uint32_t)),
        scorer_(p, s_, part_, choosable_, pages_, barriers_, reinterpret_cast<char*>(listed_)) {}

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
    const int32_t first_page = list_pages_ == nullptr ? 0 : *list_pages_;
    const int32_t own_page = own < part_.end_tile ? table_[own] : 0,
                  page = listed < kv_len_ ? table_[listed / kTile] : 0;
    scorer_.Locate();
    // Brings the queries to the second-level cache only. They are read once the previous kernel has written them.
    if (static_cast<int>(threadIdx.x) < p_.group * kDim / 64)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(q_ + threadIdx.x * 64) : "memory");
    const int32_t dim = threadIdx.x < kPackedDims ? dims(parity())[threadIdx.x] : 0;
    Choice::Clear(s_.choice);
    if (first_page == kNoPage) return WaitForPrevious();
    C::ArriveOnly();  // waited for before the first write to another block, which must have started
    if (own < part_.end_tile) own_pages_[threadIdx.x] = own_page;
    for (int32_t i = own + kThreads; i < part_.end_tile; i += kThreads) own_pages_[i - part_.first_tile] = table_[i];
    BringKeys(num_chosen > 0, dim);
    const auto deal_known = [&] {
      if (listed < kv_len_) Deal(listed, page, num_chosen + (listed - known), entries);
      for (int32_t j = listed + kBlocks * kThreads; j < kv_len_; j += kBlocks * kThreads)
        Deal(j, table_[j / kTile], num_chosen + (j - known), entries);
      if (rank_ == 0 && threadIdx.x == 0) p_.counts[stream_] = count;
    };
    if (num_chosen > 0) {
      const auto end = scorer_.Score(deal_known);
      const ChoiceBins bins = WeightBins(static_cast<float>(p_.group), num_chosen);
      scorer_.Weigh(bins, end, p_.weights == nullptr ? nullptr : p_.weights + stream_ * p_.weights_stride);
      Choice::Choose(s_.choice, rank_, static_cast<uint32_t>(part_.begin), part_.end - part_.begin,
                     static_cast<uint32_t>(num_chosen), bins, scorer_.keys(), s_.picked,
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
      deal_known();
      C::Sync();
    }
    if (staged_.hot.any()) return;  // some of the rows are not in the pool yet
    Attend(listed_rows::PartEntries(count), here, num_chosen);
    if constexpr (kMass) {
      if (rank_ != 0 || threadIdx.x / 32 != kWarps - 1) return;  // this warp has the least to write
      if (num_chosen > 0) WriteKeptMass<kBlocks, kHeads>(p_, s_, choosable_, &p_.kept_mass[stream_]);
      if (kv_len_ <= budget_ && threadIdx.x % 32 == 0) p_.kept_mass[stream_] = 1.0f;
    }
  }

 private:
  __device__ __forceinline__ int parity() const { return step_.flags & StagedStep::kParity ? 1 : 0; }
  __device__ __forceinline__ int32_t* dims(int which) const {
    return staged_.dims + p_.dims_offset + (head_ * 2 + which) * kPackedDims;
  }
  // The packed keys are up to date, and the first ones on their way if they will be scored. dim: this thread's of
  // dims(parity()). Returns with the previous kernel done, and all blocks of the cluster running.
  __device__ __forceinline__ void BringKeys(bool scored, int32_t dim) {
    const bool refresh = step_.flags & StagedStep::kRefresh;
    const bool anew = refresh || (step_.flags & StagedStep::kFirst);
    const int32_t before = anew ? 0 : (max(step_.compact_len - staged_.recent, 0) + kTile - 1) / kTile;
    const int32_t from = max(before, part_.first_tile);
    const bool packs = refresh || from < part_.end_tile;
    if (!p_.early) WaitForPrevious();
    if (!packs) {
      if (scored) scorer_.LoadFirst();
      if (threadIdx.x < kPackedDims) s_.dims[threadIdx.x] = dim;
      __syncthreads();
    }
    WaitForPrevious();
    if (packs) {
      int32_t* after = rank_ == 0 ? dims(1 - parity()) : nullptr;
      Pack<kThreads, Pages>(p_, s_,
                            {reinterpret_cast<const __nv_bfloat16*>(q_), table_, HostPages(), pages_, dims(parity()),
                             after, refresh, from, part_.end_tile});
      if (scored) scorer_.LoadFirst();
    }
    scorer_.TakeQueries(q_);
    C::Wait();
  }

  __device__ __forceinline__ const std::byte* const* HostPages() const {
    if (!staged_.hot.any()) return nullptr;
    return staged_.hot.stream(p_.dims_offset / (2 * kPackedDims) + head_).host_pages;
  }

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
    const uint32_t first = s_.picked.first, all = s_.picked.num;
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
    if constexpr (kMass && kFirstSampler == 0) {
      if (!staged_.hot.any()) Sample();  // block 0 might have ended otherwise
    }
    C::Wait();
  }
  __device__ __forceinline__ int32_t BlockEntries(int32_t count) const {
    return listed_rows::PartEntries(count) * (listed_rows::kParts / kBlocks);
  }

  // Warps that attend to rows in this kernel.
  static constexpr int Attending() {
    if constexpr (kCodes<Pages>) {
      return kWarps;
    } else {
      return listed_rows::StagedForm<kBlocks, kHeads, kDim>::kWarps;
    }
  }
  // Warps from here on sample: those that do not attend, or all. The latter sample while they wait for the cluster.
  static constexpr int kFirstSampler = Attending() < kWarps ? Attending() : 0;
  // This warp's part of the sample.
  __device__ __forceinline__ void Sample() {
    constexpr int kNum = (kWarps - kFirstSampler) * kBlocks;
    constexpr int kOneOf = kNum < PackedSample::kMost ? 1 : kNum / PackedSample::kMost;
    const int own = rank_ * (kWarps - kFirstSampler) + static_cast<int>(threadIdx.x) / 32 - kFirstSampler;
    if (own % kOneOf == 0) SampleTail<kBlocks, kWide, Pages>(p_, s_, pages_, choosable_, own / kOneOf, kNum / kOneOf);
  }
  // of_part: rows of each part; here: rows of this block.
  __device__ __forceinline__ void Attend(int32_t of_part, int32_t here, int32_t num_chosen) {
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
    const auto meanwhile = [&] {
      if constexpr (kMass && kFirstSampler > 0) {
        if (num_chosen > 0) Sample();
      }
    };
    if constexpr (kCodes<Pages>) {
      listed_rows::AttendRows<kBlocks, kThreads, Pages>(rows, rank_, results, s_.theirs);
    } else {
      listed_rows::AttendStagedRows<kBlocks, kThreads, Pages>(rows, rank_, results, s_.theirs, meanwhile);
    }
  }

  const Params& p_;
  const StagedStep step_;
  const StagedSequence& staged_;
  SmemT& s_;
  const int sequence_, head_, stream_, rank_;
  const int32_t kv_len_, budget_, choosable_;  // positions below choosable_ may be chosen
  const Part part_;                            // its tiles of those
  const int32_t* const list_pages_;            // null: the streams have no pages but those of keys and values
  const int32_t* const pages_;                 // with packed keys
  const int32_t* const table_;
  const unsigned short* const q_;
  int32_t* const rows_;       // dealt to this block
  int32_t* const own_pages_;  // pages of this block's tiles
  char* const barriers_;      // those of all rings
  uint32_t* const listed_;    // chosen positions of this block, counted from its first; in the place of the tiles. Then
                              // Results
  const uint32_t max_listed_;
  TileScorer<kBlocks, kThreads, kWide, Pages> scorer_;
};

}  // namespace spl::kernels::cuda::sparse_attention
