// One row of logits in a cluster of blocks, and the search for thresholds in it (sample_tokens_cuda.cu). Included by
// that file only.
#pragma once

#include "kernels/cuda/cuda_cluster.h"
#include "kernels/sampling/sample_tokens_cuda.h"
#include "kernels/sampling/sampling_math.h"
#include "kernels/sampling/weight_sum_cuda.h"

namespace spl::kernels::cuda::sample {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kStep = 128;  // logits that a warp takes at a time
constexpr int kGroups = 14;
constexpr int kBins = 32 * kGroups;
// Exponents of -41 and below, whose weights are 0, are in the last bin.
constexpr float kBinsPerExponent = (kBins - 2) / 41.0f;

struct Params {
  SampleTokensLaunch launch;
  const float* logits;
  int32_t* tokens;
  SampledRow* out;
  TopToken* top;
  int64_t scratch_stride;
  int32_t width, top_stride;
  int32_t span;  // logits of a warp, a multiple of kStep
};

struct Found {
  uint64_t left;   // the target less the sums of the bins before this one
  uint64_t in;     // the bin's sum
  uint64_t total;  // sum of all bins
  int bin;
};

// Blocks write for each other in two copies, which exchanges use in turn: the barrier of one copy lies between two uses
// of the other.
template <int kBlocks>
struct alignas(16) Smem {
  uint32_t low[2][kBins], high[2][kBins];  // histograms of 64-bit sums: one counts while the other is cleared
  uint64_t groups[2][kBlocks][kGroups];
  uint64_t values[2][kBlocks];
  uint64_t warp_values[kWarps];
  uint64_t list[kMaxTopTokens];  // token, logit << 32
  Found found;
  uint32_t bounds[2];
};

__device__ __forceinline__ uint64_t Plus(uint64_t a, uint64_t b) { return a + b; }
__device__ __forceinline__ uint64_t Larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

template <uint64_t (*kOp)(uint64_t, uint64_t), int kFirst = 16>
__device__ __forceinline__ uint64_t OverWarp(uint64_t x) {
#pragma unroll
  for (int offset = kFirst; offset > 0; offset /= 2) x = kOp(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

// Rises where y falls.
__device__ __forceinline__ int BinOf(float exponent) {
  constexpr float kBase = 8388608.0f;  // 2^23: the sum is whole
  const float sum = __fmaf_rn(exponent, -kBinsPerExponent, kBase);
  return min(static_cast<int>(__float_as_uint(sum) - __float_as_uint(kBase)), kBins - 1);
}

// The least key whose exponent is in `bin` or an earlier bin. Called by a whole warp.
__device__ __forceinline__ uint32_t FirstKey(int bin, float max, float scale) {
  const uint32_t max_key = sampling::OrderedKey(max), lane = threadIdx.x % 32;
  uint32_t first = 0;
#pragma unroll 1
  for (int shift = 27; shift >= 0; shift = shift == 2 ? 0 : shift - 5) {
    const uint32_t key = first + ((lane + 1) << shift) - 1;  // the last key of this lane's 32nd of the range
    const bool has = key >= max_key || BinOf(sampling::ExponentOf(sampling::OfKey(key), max, scale)) <= bin;
    first += static_cast<uint32_t>(__ffs(static_cast<int>(__ballot_sync(0xffffffffu, has))) - 1) << shift;
    if (shift == 0) break;
  }
  return first;
}

template <int kBlocks, bool kInSmem>
struct RowSearch {
  using C = Cluster<kBlocks>;

  const Params& p;
  const DeviceSampleRow& row;
  Smem<kBlocks>& smem;
  float* held;                  // [kWarps * span], this block's logits in shared memory
  const float* x;               // the row's logits
  const float* y;               // read in place of `held` if the row does not fit
  int rank, lane, warp, first;  // `first`: id of this lane's first logit
  int phase = 0, histogram = 0;

  __device__ __forceinline__ float4 Read(const float* from, int id) const {
    if (id + 4 <= p.width && reinterpret_cast<uintptr_t>(from) % 16 == 0)
      return *reinterpret_cast<const float4*>(from + id);
    const float nan = __int_as_float(0x7fffffff);  // has no weight and is never the largest
    return {id < p.width ? from[id] : nan, id + 1 < p.width ? from[id + 1] : nan, id + 2 < p.width ? from[id + 2] : nan,
            id + 3 < p.width ? from[id + 3] : nan};
  }
  __device__ __forceinline__ float4* Held(int at) const {
    return reinterpret_cast<float4*>(held + warp * p.span + 4 * lane + at);
  }
  __device__ __forceinline__ float4 Get(int at) const {
    if constexpr (kInSmem) return *Held(at);
    return Read(y, first + at);
  }
  // Calls body(id, y) for this thread's logits, by rising id.
  template <typename Body>
  __device__ __forceinline__ void ForEach(const Body& body) const {
#pragma unroll 2
    for (int at = 0; at < p.span; at += kStep) {
      const float4 v = Get(at);
      body(first + at, v.x);
      body(first + at + 1, v.y);
      body(first + at + 2, v.z);
      body(first + at + 3, v.w);
    }
  }

  // Sum of the weights of this thread's logits of at least y_min (kCut), or of all.
  template <bool kCut>
  __device__ __forceinline__ uint64_t SumOfWeights(float max, float scale, float y_min) const {
    static_assert(kMaxSampledWidth / (32 * kWarps) + 4 <= WeightSum::kMost);
    WeightSum sum;
    ForEach([&](int, float y) {
      const float t = sampling::ExponentOf(y, max, scale);
      sum.Add(!kCut || y >= y_min ? t : sampling::kMinExponent);
    });
    return sum.Total(static_cast<uint32_t>(p.span) / 32);
  }

  // kOp over the values of all threads of all blocks. Leaves the warps' results in warp_values, and those of the blocks
  // in Values().
  template <uint64_t (*kOp)(uint64_t, uint64_t)>
  __device__ __forceinline__ uint64_t Reduce(uint64_t of_thread) {
    const uint64_t of_warp = OverWarp<kOp>(of_thread);
    if (lane == 0) smem.warp_values[warp] = of_warp;
    __syncthreads();
    if (warp == 0) {
      const uint64_t of_block = OverWarp<kOp, kWarps / 2>(smem.warp_values[lane % kWarps]);
      if (lane < kBlocks) C::Store(&smem.values[phase & 1][rank], lane, of_block);
    }
    C::Sync();
    ++phase;
    uint64_t all = Values()[0];
#pragma unroll
    for (int b = 1; b < kBlocks; ++b) all = kOp(all, Values()[b]);
    return all;
  }
  __device__ __forceinline__ const uint64_t* Values() const { return smem.values[(phase - 1) & 1]; }
  // Sum of Values() of the blocks in front of this one.
  __device__ __forceinline__ uint64_t Before() const {
    uint64_t sum = 0;
    for (int b = 0; b < rank; ++b) sum += Values()[b];
    return sum;
  }

  // Most likely token. packed(): the key in the high half, ~id in the low one. Key 0: all are NaN.
  struct Best {
    uint32_t key = 0;
    int id = -1;
    __device__ __forceinline__ void Take(int other, float y) {
      const uint32_t of_y = sampling::OrderedKey(y);
      if (of_y > key) {
        key = of_y;
        id = other;
      }
    }
    __device__ __forceinline__ uint64_t packed() const {
      return static_cast<uint64_t>(key) << 32 | ~static_cast<uint32_t>(id);
    }
  };
  static __device__ __forceinline__ int IdOf(uint64_t best) {
    return best >> 32 == 0 ? 0 : static_cast<int>(~static_cast<uint32_t>(best));
  }

  // Reads the row and returns the best token of this thread. `keep`: later passes need the logits too. Numbers are
  // compared, four logits at a time; where none is above -inf, all are looked at again.
  __device__ __forceinline__ uint64_t Load(bool keep) {
    constexpr int kAhead = 4;
    float best = -INFINITY;
    int best_at = -1;
    for (int at = 0; at < p.span; at += kAhead * kStep) {
      float4 v[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (at + i * kStep < p.span) v[i] = Read(x, first + at + i * kStep);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (at + i * kStep >= p.span) continue;
        if (keep && kInSmem) *Held(at + i * kStep) = v[i];
        const float most = fmaxf(fmaxf(v[i].x, v[i].y), fmaxf(v[i].z, v[i].w));  // passes NaN over
        if (most > best) {
          best = most;
          best_at = at + i * kStep;
        }
      }
    }
    Best token;
    const int end = best_at < 0 ? p.span : best_at + kStep;
    for (int at = max(best_at, 0); at < end && first + at < p.width; at += kStep) {
      const float4 v = Read(x, first + at);
      token.Take(first + at, v.x);
      token.Take(first + at + 1, v.y);
      token.Take(first + at + 2, v.z);
      token.Take(first + at + 3, v.w);
    }
    return token.packed();
  }

  __device__ __forceinline__ void Count(int bin, uint64_t n) {
    const uint32_t low = static_cast<uint32_t>(n);
    const uint32_t sum = atomicAdd(&smem.low[histogram][bin], low) + low;
    const uint32_t high = static_cast<uint32_t>(n >> 32) + (sum < low ? 1 : 0);
    if (high != 0) atomicAdd(&smem.high[histogram][bin], high);
  }

  // The first bin with which the sum over all blocks reaches target(total). All threads have called Count.
  template <typename Target>
  __device__ __forceinline__ Found FindBin(Target target) {
    __syncthreads();
    if (warp < kGroups) {
      const int bin = 32 * warp + lane;
      const uint64_t sum =
          OverWarp<Plus>(static_cast<uint64_t>(smem.high[histogram][bin]) << 32 | smem.low[histogram][bin]);
      if (lane < kBlocks) C::Store(&smem.groups[phase & 1][rank][warp], lane, sum);
    }
    C::Sync();
    for (int i = threadIdx.x; i < kBins; i += kThreads) smem.low[histogram ^ 1][i] = smem.high[histogram ^ 1][i] = 0;
    if (warp == 0) {
      uint64_t x = 0;
      for (int b = 0; b < kBlocks && lane < kGroups; ++b) x += smem.groups[phase & 1][b][lane];
      uint64_t up_to = InclusiveSum(x);
      const uint64_t total = __shfl_sync(0xffffffffu, up_to, 31);
      uint64_t left = target(total);
      const int group = max(__ffs(static_cast<int>(__ballot_sync(0xffffffffu, up_to >= left))) - 1, 0);
      left -= __shfl_sync(0xffffffffu, up_to - x, group);
      const int bin = 32 * group + lane;
      x = 0;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
        x += (static_cast<uint64_t>(C::Load(&smem.high[histogram][bin], b)) << 32) +
             C::Load(&smem.low[histogram][bin], b);
      up_to = InclusiveSum(x);
      const int which = max(__ffs(static_cast<int>(__ballot_sync(0xffffffffu, up_to >= left))) - 1, 0);
      if (lane == which) smem.found = {left - (up_to - x), x, total, bin};
    }
    __syncthreads();
    histogram ^= 1;
    ++phase;
    return smem.found;
  }

  // A key such that value(y, exponent), summed over the logits of that key and larger ones, reaches target(total), and
  // no longer does without the least of those that have a value. 0 if `weighing` and that logit has no weight.
  template <typename Value, typename Target>
  __device__ __forceinline__ uint32_t Threshold(float max, float scale, bool weighing, const Value& value,
                                                const Target& target) {
    bool binned = sampling::IsFinite(max), first_search = true;
    uint32_t low = 1, high = ~0u;
    uint64_t left = 0;
#pragma unroll 1
    while (true) {
      int shift = 0;
      while (!binned && (high - low - 1) >> shift >= kBins) ++shift;
      ForEach([&](int, float y) {
        const uint32_t key = sampling::OrderedKey(y);
        if (!binned && key - low >= high - low) return;
        const float t = sampling::ExponentOf(y, max, scale);
        if (const uint64_t n = value(y, t); n != 0)
          Count(binned ? BinOf(t) : static_cast<int>((high - 1 - key) >> shift), n);
      });
      const Found found = FindBin([&](uint64_t total) { return first_search ? target(total) : left; });
      if (binned) {
        if (weighing && found.bin == kBins - 1) return 0;
        if (warp < 2) {
          const int bin = found.bin - warp;
          const uint32_t key = bin < 0 ? sampling::OrderedKey(max) + 1 : FirstKey(bin, max, scale);
          if (lane == 0) smem.bounds[warp] = key;
        }
        __syncthreads();
        low = smem.bounds[0];
        high = smem.bounds[1];
      } else {
        high -= static_cast<uint32_t>(found.bin) << shift;
        if (high - low > 1u << shift) low = high - (1u << shift);
      }
      left = found.left;
      if (left == found.in || high - low <= 1) return low;
      binned = first_search = false;
    }
  }
};

}  // namespace spl::kernels::cuda::sample
