// As attend_rows_cuda.h, for rows of bf16 that come through shared memory. Included by .cu files only.
//
// Registers hold the rows of one step, and a block waits for each step's keys and then for its values. Here a warp has
// asked for the rows of its next steps before it takes those of this one, so that as many bytes are on their way as
// memory needs to be busy. Few warps do it: what is on its way counts, not who asked.
//
// A warp has neighbouring parts and adds them up in the tree's order as they end, so that the memory of results does
// not grow with the number of parts. Sums count from powers of two: they have the same bits as if all parts had been
// kept.
#pragma once

#include "kernels/selection/sparcas/attend_rows_cuda.h"

namespace spl::kernels::cuda::listed_rows {

template <int kBlocks, int kHeads, int kDim>
struct StagedForm {
  static constexpr bool kWide = kHeads > 4;
  static constexpr int kWarps = kBlocks == 2 ? (kWide ? 4 : 8) : (kBlocks == 4 && kWide ? 8 : 16);  // that attend
  static constexpr int kSlots = kBlocks == 2 ? (kWide ? 5 : 3) : 2;  // keys or values of a step
  static constexpr int kOwn = kParts / kBlocks / kWarps;             // parts of a warp
  static constexpr int kLevels = kOwn == 1 ? 0 : kOwn == 2 ? 1 : kOwn == 4 ? 2 : kOwn == 8 ? 3 : 4;
  static constexpr int kLanes = kWide ? 32 : 16;  // that have heads
  static constexpr int kStride = 2 * kDim + 16;   // bytes of a row: rows begin in different banks
  static constexpr int kChunks = kDim / 8;        // pieces of 16 bytes in a row
  static constexpr int kSlotBytes = kRowsAtOnce * kStride;
  static_assert(kOwn >= 1 && 1 << kLevels == kOwn);
};

// A warp's memory.
template <typename Form, int kHeads, int kDim>
struct alignas(16) StagedWarp {
  struct Sums {
    float out[kHeads][kDim + 8];
    float2 max_sum[kHeads];
    float exact[kHeads];
  };
  union {
    char slots[Form::kSlots][Form::kSlotBytes];
    Sums sums;  // once all rows have been taken
  };
  // Sums that wait for their right neighbour in the tree, by level; each lane has its own.
  struct Held {
    float4 out[kDim / 16][Form::kLanes];
    float2 sums[3][Form::kLanes];
  };
  alignas(16) char held[Form::kLevels == 0 ? 16 : Form::kLevels * sizeof(Held)];
};

template <int kBlocks, int kHeads, int kDim>
struct StagedResults {
  using Form = StagedForm<kBlocks, kHeads, kDim>;
  static constexpr int kNum = Form::kWarps;
  StagedWarp<Form, kHeads, kDim> warps[kNum];

  __device__ __forceinline__ float out(int i, int head, int dim) const { return warps[i].sums.out[head][dim]; }
  __device__ __forceinline__ float2 max_sum(int i, int head) const { return warps[i].sums.max_sum[head]; }
  __device__ __forceinline__ float exact(int i, int head) const { return warps[i].sums.exact[head]; }
};

// A warp's parts, one after the other.
template <int kBlocks, int kHeads, int kDim>
class StagedSoftmax : public WideSoftmax<kDim> {
  using Base = WideSoftmax<kDim>;
  using Form = StagedForm<kBlocks, kHeads, kDim>;
  using Parts = PartSums<kDim>;
  using Parts::c_, Parts::exact_, Parts::g_, Parts::max_, Parts::o_, Parts::sum_;

 public:
  using Memory = StagedWarp<Form, kHeads, kDim>;

  // rows: of this warp, [0, count).
  __device__ __forceinline__ StagedSoftmax(float scale, Memory& memory, const std::byte* pool, const int32_t* rows,
                                           int count)
      : Base(scale),
        memory_(memory),
        lane_(static_cast<int>(threadIdx.x) % 32),
        rows_(rows),
        count_(count),
        from_(pool + lane_ % Form::kChunks * 16),
        slots_(SmemAddress(memory.slots)),
        to_(slots_ + lane_ / Form::kChunks * Form::kStride + lane_ % Form::kChunks * 16) {}
  // Asks for the first rows. Before Run.
  __device__ __forceinline__ void Begin() {
#pragma unroll
    for (int i = 0; i < Form::kSlots; ++i) Ask(i);
  }

  // of_part: rows of a part, a multiple of kRowsAtOnce.
  __device__ __forceinline__ void Run(int32_t of_part) {
    int32_t at = 0;
#pragma unroll 1
    for (int part = 0; part < Form::kOwn; ++part) {
      this->Clear();
      const int32_t end = min((part + 1) * of_part, count_);
#pragma unroll 1
      for (; at < end; at += kRowsAtOnce) Step(at, end - at);
#pragma unroll
      for (int h = 0; h < 2; ++h) sum_[h] = Base::OverRows(sum_[h]), exact_[h] = Base::OverRows(exact_[h]);
      int level = 0;
      for (; part >> level & 1; ++level) AddHeld(level);
      if (part + 1 < Form::kOwn) Hold(level);
    }
    __syncwarp();
    StoreSums();
  }

 private:
  static constexpr int64_t kValues = int64_t{kPageTokens} * kDim * 2;  // bytes from K to V

  // Keys (even) or values (odd) of step n / 2 go to the slot of the next n that has one.
  __device__ __forceinline__ void Ask(int n) {
    const int32_t first = n / 2 * kRowsAtOnce, last = count_ - 1;
    if (first <= last) {
      constexpr int kTogether = 32 / Form::kChunks;  // rows that a warp asks for at once
      const std::byte* const from = from_ + (n % 2 == 0 ? 0 : kValues);
      const uint32_t to = to_ + ask_ * Form::kSlotBytes;
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; i += kTogether) {
        const int32_t row = rows_[min(first + i + lane_ / Form::kChunks, last)];
        CpAsync16(to + i * Form::kStride, from + int64_t{row} * (2 * kDim), true);
      }
    }
    CpAsyncCommit();
    ask_ = ask_ + 1 == Form::kSlots ? 0 : ask_ + 1;
  }
  // The slot whose rows are needed next, once they are there.
  __device__ __forceinline__ uint32_t Take() {
    CpAsyncWait<Form::kSlots - 1>();
    __syncwarp();
    return slots_ + ask_ * Form::kSlotBytes;
  }

  // count: rows of this part from `at` on.
  __device__ __forceinline__ void Step(int32_t at, int count) {
    float s[4];
    {
      const uint32_t keys = Take() + g_ * Form::kStride + c_ * 16;
      uint4 k[2][kDim / 32];
#pragma unroll
      for (int u = 0; u < kDim / 32; ++u) {
        k[0][u] = LoadShared16(keys + u * 64);
        k[1][u] = LoadShared16(keys + u * 64 + 8 * Form::kStride);
      }
      __syncwarp();
      Ask(at / kRowsAtOnce * 2 + Form::kSlots);
      Base::Score(k, s);
    }
    uint32_t first, second;
    this->WeighRows(s, count, first, second);
    const uint32_t w0 = TransposeMatrix(first), w1 = TransposeMatrix(second);
    // Matrices of 8 rows and 8 dimensions, turned: both halves of the dimensions of block t, then of the other rows.
    const uint32_t values = Take() + (lane_ % 8 + lane_ / 16 * 8) * Form::kStride + lane_ / 8 % 2 * 16;
#pragma unroll
    for (int t = 0; t < kDim / 16; ++t) {
      uint32_t a[4];
      LdMatrix4Trans(a, values + t * 32);
      Mma16816(o_[t], a, w0, w1);
    }
    __syncwarp();
    Ask(at / kRowsAtOnce * 2 + 1 + Form::kSlots);
  }

  __device__ __forceinline__ bool has_heads() const { return c_ < Form::kLanes / 8; }
  __device__ __forceinline__ typename Memory::Held& held(int level) const {
    return reinterpret_cast<typename Memory::Held*>(memory_.held)[level];
  }
  __device__ __forceinline__ int held_lane() const { return g_ * (Form::kLanes / 8) + c_; }
  __device__ __forceinline__ void Hold(int level) {
    if (!has_heads()) return;
    const int lane = held_lane();
    auto& to = held(level);
#pragma unroll
    for (int t = 0; t < kDim / 16; ++t) to.out[t][lane] = {o_[t][0], o_[t][1], o_[t][2], o_[t][3]};
#pragma unroll
    for (int h = 0; h < 2; ++h) to.sums[h][lane] = {max_[h], sum_[h]};
    to.sums[2][lane] = {exact_[0], exact_[1]};
  }
  __device__ __forceinline__ void AddHeld(int level) {
    if (!has_heads()) return;
    const int lane = held_lane();
    const auto& left = held(level);
    const float2 exact = left.sums[2][lane];
    float before[2], now[2];  // factors
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 x = left.sums[h][lane];
      const float max = fmaxf(x.x, max_[h]);
      before[h] = Exp2(x.x - max), now[h] = Exp2(max_[h] - max);
      max_[h] = max;
      sum_[h] = x.y * before[h] + sum_[h] * now[h];
      exact_[h] = (h == 0 ? exact.x : exact.y) * before[h] + exact_[h] * now[h];
    }
#pragma unroll
    for (int t = 0; t < kDim / 16; ++t) {
      const float4 x = left.out[t][lane];
      o_[t][0] = x.x * before[0] + o_[t][0] * now[0];
      o_[t][1] = x.y * before[1] + o_[t][1] * now[1];
      o_[t][2] = x.z * before[0] + o_[t][2] * now[0];
      o_[t][3] = x.w * before[1] + o_[t][3] * now[1];
    }
  }
  __device__ __forceinline__ void StoreSums() {
    if (!has_heads()) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int head = 2 * c_ + h;
      if (g_ == 0) memory_.sums.max_sum[head] = {max_[h], sum_[h]}, memory_.sums.exact[head] = exact_[h];
#pragma unroll
      for (int t = 0; t < kDim / 16; ++t) {
        memory_.sums.out[head][16 * t + g_] = o_[t][h];
        memory_.sums.out[head][16 * t + 8 + g_] = o_[t][2 + h];
      }
    }
  }

  Memory& memory_;
  const int lane_;
  const int32_t* const rows_;
  const int32_t count_;
  const std::byte* const from_;  // this lane's part of a row
  const uint32_t slots_, to_;
  int ask_ = 0;  // the slot that is asked for next: the one whose rows have been taken last
};

// As AttendRows. Warps that do not attend call meanwhile().
template <int kBlocks, int kThreads, typename Pages, int kHeads, typename Meanwhile>
__device__ __forceinline__ void AttendStagedRows(const GivenRows& x, int rank,
                                                 StagedResults<kBlocks, kHeads, Pages::kDim>& results,
                                                 TheirResults<kBlocks, kHeads, Pages::kDim>& theirs,
                                                 const Meanwhile& meanwhile) {
  constexpr int kDim = Pages::kDim;
  using Form = StagedForm<kBlocks, kHeads, kDim>;
  static_assert(Form::kWarps <= kThreads / 32);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp < Form::kWarps) {
    const int32_t rows = Form::kOwn * x.of_part, first = min(warp * rows, x.here);
    StagedSoftmax<kBlocks, kHeads, kDim> softmax(x.scale, results.warps[warp], x.pool, x.rows + first,
                                                 min(rows, x.here - first));
    // A warp that asks for all of its rows at once would wait for the queries behind them.
    constexpr bool kQueriesFirst = Form::kOwn == 1;
    if constexpr (!kQueriesFirst) softmax.Begin();
    softmax.TakeQueries(x.q, x.group);
    if constexpr (kQueriesFirst) softmax.Begin();
    softmax.Run(x.of_part);
  } else {
    meanwhile();
  }
  __syncthreads();
  AddParts<kBlocks, kHeads, kDim, kThreads>(
      results, theirs, rank, x.group,
      [&](int head, int dim, float value, float lse) { x.Write(head * kDim + dim, value, dim == 0, head, lse); });
}

}  // namespace spl::kernels::cuda::listed_rows
