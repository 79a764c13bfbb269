// The consumer warpgroups of the wgmma prefill kernels, and the shared memory through which a loader feeds them.
//
// Each consumer warpgroup computes 64 query rows: S = Q K^T (Q in registers: shared memory then carries K and V alone),
// an online softmax in base 2, and O += P V (P in registers). S of the next stage and P V of this one run on the tensor
// cores while the softmax runs, as in FlashAttention-3 (Shah et al., 2024, section 3.2). The second warpgroup begins
// when the first one has its first scores, so that each has its softmax beside the other's products; they keep that
// distance by themselves: making them take turns in every stage (section 3.1) was no faster here with q in registers.
//
// A kernel brings the walk of the keys: a loader that keeps the rings full, and a `Keys` class that says which keys of
// a stage a row sees. Included by .cu files only.
#pragma once

#include "kernels/attention/attention_cuda_common.h"
#include "kernels/attention/prefill_softmax_sm90.h"
#include "kernels/cuda/cuda_ptx.h"

namespace spl::kernels::cuda {

inline constexpr int kConsumers = 2;           // warpgroups
inline constexpr int kConsumerRows = 64;       // query rows of a warpgroup
inline constexpr int kStages = 3;              // stages of the K ring and of the V ring
inline constexpr int kProducerRegisters = 40;  // a thread of the producer warpgroup
inline constexpr int kConsumerRegisters = 232;

// All tiles are 128-byte swizzled blocks of 64 columns: [block][row][64]. `W` is a work item; num_rows < 0 in it: there
// is no more work.
template <int kHeadDim, typename W>
struct alignas(1024) PrefillSmem {
  static constexpr int kBlocks = kHeadDim / 64;
  using Work = W;

  __nv_bfloat16 q[kConsumers * kConsumerRows * kHeadDim];  // in the order that Keys::QAddress knows
  __nv_bfloat16 k[kStages][kBlocks][kTileKeys][64];
  __nv_bfloat16 v[kStages][2][kBlocks][kPageTokens][64];
  uint64_t q_full, q_empty;
  uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  // Two: an entry is overwritten once every consumer thread has released q of the next item, and by then all are past
  // this one.
  W work[2];

  // One thread. `k_arrivals`: arrivals of the loader that fill a K stage, beside its bytes.
  __device__ void InitBarriers(int k_arrivals) {
    constexpr int kWarps = 4 * kConsumers;
    MbarrierInit(SmemAddress(&q_full), 1);
    MbarrierInit(SmemAddress(&q_empty), 128 * kConsumers);
    for (int i = 0; i < kStages; ++i) {
      MbarrierInit(SmemAddress(&k_full[i]), k_arrivals);
      MbarrierInit(SmemAddress(&k_empty[i]), kWarps);
      MbarrierInit(SmemAddress(&v_full[i]), 1);
      MbarrierInit(SmemAddress(&v_empty[i]), kWarps);
    }
  }
};

// The rows of one warpgroup.
struct ConsumerTile {
  int32_t row;       // first row of the work item, in the batch
  int32_t first;     // the warpgroup's first row, counted from there
  int32_t num_rows;  // rows of the work item; 0: nothing is written
  int32_t qo_head;
  int32_t kv_len;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Row sums of the quad's four threads.
__device__ inline void SumRows(const RowState& state, float (&total)[2], float (&inverse)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    total[r] = state.l[r] + __shfl_xor_sync(0xffffffffu, state.l[r], 1);
    total[r] += __shfl_xor_sync(0xffffffffu, total[r], 2);
    inverse[r] = total[r] > 0 ? 1.0f / total[r] : 0.0f;
  }
}

// Slots past kv_len may hold NaN, and 0 * NaN is NaN: V gets zeros there. begin: positions of the stage's two halves.
// Both warpgroups write these zeros: each needs its own to have arrived, and neither has to wait for the other.
template <typename Smem>
__device__ void ClearUnwrittenValues(Smem& smem, int stage, const int32_t (&begin)[2], int32_t kv_len, int group) {
  bool cleared = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (begin[half] + kPageTokens <= kv_len) continue;
    cleared = true;
    for (int slot = max(kv_len - begin[half], 0) + threadIdx.x % 128 / 8; slot < kPageTokens; slot += 16) {
#pragma unroll
      for (int block = 0; block < Smem::kBlocks; ++block) {
        reinterpret_cast<uint4*>(smem.v[stage][half][block][slot])[threadIdx.x % 8] = uint4{};
      }
    }
  }
  if (!cleared) return;
  FenceProxyAsync();
  NamedBarrierSync(1 + group, 128);
}

// out [rows, num_qo_heads, kHeadDim] bf16, lse [rows, num_qo_heads] or null.
template <int kHeadDim>
__device__ void WriteRows(const ConsumerTile& tile, int row0, const float (&o)[kHeadDim / 2], const RowState& state,
                          const float (&total)[2], const float (&inverse)[2], int num_qo_heads, __nv_bfloat16* out,
                          float* lse) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = row0 + 8 * r;
    const int64_t at = static_cast<int64_t>(tile.row + row) * num_qo_heads + tile.qo_head;
    __nv_bfloat16* const to = out + at * kHeadDim + 8 * (lane % 4);
#pragma unroll
    for (int i = 0; i < kHeadDim / 32; ++i) {
      const auto word = [&](int block) {
        return PackBf16(o[16 * i + 4 * block + 2 * r] * inverse[r], o[16 * i + 4 * block + 2 * r + 1] * inverse[r]);
      };
      const uint4 x = QuadTranspose(word(0), word(1), word(2), word(3));
      if (row < tile.num_rows) *reinterpret_cast<uint4*>(to + 32 * i) = x;
    }
    if (lse != nullptr && lane % 4 == 0 && row < tile.num_rows) {
      lse[at] = total[r] > 0 ? kLn2 * (state.m[r] + log2f(total[r])) : -INFINITY;
    }
  }
}

// A warpgroup's accumulators, in registers, and the products that fill them. The products are asynchronous: a caller
// waits (WgmmaWait) and pins what it reads.
template <int kHeadDim>
struct Accumulators {
  float s[64];                 // scores of the current stage
  float o[kHeadDim / 2] = {};  // sums of weighted values
  uint32_t weights[32];        // the stage before, as A operand
  RowState state;
  float shrink[2];

  // S = Q K^T over a K stage. q: 16 rows of each warp as A operand.
  __device__ void IssueScores(const uint32_t (&q)[kHeadDim / 16][4], uint32_t k_address) {
    WgmmaPin(s);
    WgmmaFence();
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      WgmmaRsK(s, q[step], WgmmaDescriptor(k_address + step / 4 * (kTileKeys * 128) + step % 4 * 32, 16, 1024),
               step != 0);
    }
    WgmmaCommit();
  }
  // O += P V over a V stage.
  __device__ void IssueValues(uint32_t v_address) {
    constexpr int kBlockBytes = kPageTokens * 128;
    constexpr int kHalfBytes = kHeadDim / 64 * kBlockBytes;
    WgmmaPin(o);
    WgmmaFence();
#pragma unroll
    for (int step = 0; step < kTileKeys / 16; ++step) {
      WgmmaRs(o, &weights[4 * step],
              WgmmaDescriptor(v_address + step / 4 * kHalfBytes + step % 4 * (16 * 128), kBlockBytes, 1024), 1);
    }
    WgmmaCommit();
  }
  // Most stages far into a context raise no row's maximum.
  __device__ void ShrinkSums() {
    if (!__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) o[i] *= shrink[i / 2 % 2];
  }
};

// The rings as one warpgroup walks them.
template <typename Smem>
struct ConsumerRings {
  Smem& smem;
  Ring<1> q;
  Ring<2> work;
  Ring<kStages> k, v;

  __device__ explicit ConsumerRings(Smem& s) : smem(s) {}
  __device__ void WaitKeys() const { MbarrierWait(SmemAddress(&smem.k_full[k.stage]), k.phase); }
  __device__ void WaitValues() const { MbarrierWait(SmemAddress(&smem.v_full[v.stage]), v.phase); }
  __device__ void NextItem() {
    q.Advance();
    work.Advance();
  }
  __device__ void ReleaseKeys() {
    Release(&smem.k_empty[k.stage]);
    k.Advance();
  }
  __device__ void ReleaseValues() {
    Release(&smem.v_empty[v.stage]);
    v.Advance();
  }

 private:
  static __device__ void Release(uint64_t* barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) MbarrierArrive(SmemAddress(barrier));
  }
};

// Lets the second warpgroup begin its first stage when the first one has the scores of its own.
class StaggeredStart {
 public:
  __device__ void Begin(int group) const {
    if (is_first_ && group == 1) NamedBarrierSync(kStaggered, 128 * kConsumers);
  }
  __device__ void HasScores(int group) {
    if (is_first_ && group == 0) NamedBarrierArrive(kStaggered, 128 * kConsumers);
    is_first_ = false;
  }

 private:
  // 1 + the number of a warpgroup are its own barriers.
  static constexpr int kStaggered = 1 + kConsumers;
  bool is_first_ = true;
};

// Runs the consumer warpgroups until a work item says that there is no more. `Keys`, one for each work item:
//   Keys(work, group)
//   ConsumerTile tile() const                       the warpgroup's rows
//   static uint32_t QAddress(smem, group, block)    of the warpgroup's first row in a block of 64 columns
//   void Read(smem, stage)                          the stage's description; all threads, while the tensor cores run
//   bool last() const                               no stage follows the one that was read
//   void Mask(s, smem, stage, position0, position1) -inf for the keys of that stage that a row does not see
//   const int32_t (&begin() const)[2]               positions of the two halves of the last stage
// `p` has positions, scale (sm_scale * log2(e)), num_qo_heads, out and lse.
template <int kHeadDim, typename Keys, typename Smem, typename Params>
__device__ void Consume(Smem& smem, const Params& p) {
  const int group = threadIdx.x / 128 - 1;  // 0 or 1
  const int warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32;
  ConsumerRings<Smem> rings(smem);
  StaggeredStart start;
  for (;;) {
    MbarrierWait(SmemAddress(&smem.q_full), rings.q.phase);
    const auto& work = smem.work[rings.work.stage];
    if (work.num_rows < 0) break;
    Keys keys(work, group);
    uint32_t q[kHeadDim / 16][4];  // this warp's 16 rows as A operand
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      LdMatrix4(q[step], Keys::QAddress(smem, group, step / 4) +
                             Swizzled<128>(warp * 16 + (lane & 15), step % 4 * 2 + lane / 16));
    }
    MbarrierArrive(SmemAddress(&smem.q_empty));
    rings.NextItem();
    const ConsumerTile tile = keys.tile();
    // Rows past the end have position -1: they are not written.
    const int row0 = tile.first + warp * 16 + lane / 4, row1 = row0 + 8;
    const int32_t position0 = row0 < tile.num_rows ? p.positions[tile.row + row0] : -1;
    const int32_t position1 = row1 < tile.num_rows ? p.positions[tile.row + row1] : -1;

    Accumulators<kHeadDim> acc;
    // Masks the scores, which have arrived, gives their K stage back, and turns them into weights.
    const auto take_scores = [&] {
      WgmmaPin(acc.s);
      keys.Mask(acc.s, smem, rings.k.stage, position0, position1);
      rings.ReleaseKeys();
      Softmax(acc.s, p.scale, acc.state, acc.shrink);
    };
    rings.WaitKeys();
    start.Begin(group);
    acc.IssueScores(q, SmemAddress(smem.k[rings.k.stage]));
    keys.Read(smem, rings.k.stage);
    WgmmaWait<0>();
    start.HasScores(group);
    take_scores();
    PackWeights(acc.s, acc.weights);
    while (!keys.last()) {
      rings.WaitKeys();
      acc.IssueScores(q, SmemAddress(smem.k[rings.k.stage]));
      rings.WaitValues();
      acc.IssueValues(SmemAddress(smem.v[rings.v.stage]));
      keys.Read(smem, rings.k.stage);
      WgmmaWait<1>();
      take_scores();
      // Keeps the assembler from moving the wait for P V in front of the softmax that is to hide it: a branch on the
      // softmax's last result, never taken (row sums are not negative).
      if (acc.state.l[0] < 0 || acc.state.l[1] < 0) __nanosleep(1);
      WgmmaWait<0>();
      WgmmaPin(acc.o);
      rings.ReleaseValues();
      acc.ShrinkSums();
      PackWeights(acc.s, acc.weights);
    }
    rings.WaitValues();
    ClearUnwrittenValues(smem, rings.v.stage, keys.begin(), tile.kv_len, group);
    acc.IssueValues(SmemAddress(smem.v[rings.v.stage]));
    float total[2], inverse[2];
    SumRows(acc.state, total, inverse);  // meanwhile
    WgmmaWait<0>();
    WgmmaPin(acc.o);
    rings.ReleaseValues();
    WriteRows<kHeadDim>(tile, row0, acc.o, acc.state, total, inverse, p.num_qo_heads, p.out, p.lse);
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace spl::kernels::cuda
