#include "kernels/cuda/cuda_types.h"
#include "kernels/moe/moe_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kPerLane = kMoeExpertsMax / kWarp;
constexpr int kThreads = 256;

struct Candidate {
  float value;
  int32_t index;
  bool nan;
};

// True if a comes before b: the larger logit, then the lower index; NaN comes after every number.
__device__ __forceinline__ bool Before(const Candidate& a, const Candidate& b) {
  if (a.nan != b.nan) return b.nan;
  if (!a.nan && a.value != b.value) return a.value > b.value;
  return a.index < b.index;
}

__device__ __forceinline__ Candidate WarpBest(Candidate c) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    Candidate other;
    other.value = __shfl_xor_sync(0xffffffffu, c.value, offset);
    other.index = __shfl_xor_sync(0xffffffffu, c.index, offset);
    other.nan = __shfl_xor_sync(0xffffffffu, static_cast<int>(c.nan), offset) != 0;
    if (Before(other, c)) c = other;
  }
  return c;
}

// One warp per row: takes the best of the remaining experts, top_k times.
__global__ void ChooseKernel(RouteExpertsArgs a) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (row >= a.num_rows) return;
  const int lane = threadIdx.x % kWarp;
  const float* logits = a.logits + row * a.num_experts;
  uint32_t taken = 0;  // bit per expert of this lane: lane, lane + 32, …
  float largest = 0, sum = 0;
  for (int k = 0; k < a.top_k; ++k) {
    Candidate best{0, 0x7fffffff, true};
    for (int i = 0; i < kPerLane; ++i) {
      const int e = i * kWarp + lane;
      if (e >= a.num_experts) break;
      if (taken >> i & 1u) continue;
      const float x = logits[e];
      const Candidate c{x, e, isnan(x)};
      if (Before(c, best)) best = c;
    }
    best = WarpBest(best);
    if (best.index % kWarp == lane) taken |= 1u << (best.index / kWarp);
    if (k == 0) {
      largest = best.value;
      if (!a.renormalize) {
        float part = 0;
        for (int e = lane; e < a.num_experts; e += kWarp) part += expf(logits[e] - largest);
        sum = WarpSum(part);
      }
    }
    const float weight = expf(best.value - largest);
    if (a.renormalize) sum += weight;
    if (lane == 0) {
      a.expert_ids[row * a.top_k + k] = best.index;
      a.weights[row * a.top_k + k] = weight;
    }
  }
  __syncwarp();
  for (int k = lane; k < a.top_k; k += kWarp) a.weights[row * a.top_k + k] /= sum;
}

// One block an expert: where its places begin is how many pairs go to lower experts; then its pairs in order.
__global__ void PlaceKernel(RouteExpertsArgs a) {
  __shared__ int counts[kThreads / kWarp];
  const int expert = blockIdx.x, lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int num_pairs = static_cast<int>(a.num_rows) * a.top_k;
  int lower = 0;
  for (int pair = threadIdx.x; pair < num_pairs; pair += kThreads) lower += a.expert_ids[pair] < expert ? 1 : 0;
  lower = __reduce_add_sync(0xffffffffu, lower);
  if (lane == 0) counts[warp] = lower;
  __syncthreads();
  int place = 0;
  for (int w = 0; w < kThreads / kWarp; ++w) place += counts[w];
  if (threadIdx.x == 0) {
    a.offsets[expert] = place;
    if (expert == a.num_experts - 1) a.offsets[a.num_experts] = num_pairs;
  }
  for (int begin = 0; begin < num_pairs; begin += kThreads) {
    const int pair = begin + static_cast<int>(threadIdx.x);
    const bool mine = pair < num_pairs && a.expert_ids[pair] == expert;
    const unsigned ballot = __ballot_sync(0xffffffffu, mine);
    __syncthreads();
    if (lane == 0) counts[warp] = __popc(ballot);
    __syncthreads();
    int before = place;
    for (int w = 0; w < kThreads / kWarp; ++w) {
      if (w < warp) before += counts[w];
      place += counts[w];
    }
    if (mine) {
      const int at = before + __popc(ballot & ((1u << lane) - 1u));
      a.rows[at] = pair / a.top_k;
      a.places[pair] = at;
    }
  }
}

}  // namespace

cudaError_t RouteExperts(const RouteExpertsArgs& a, cudaStream_t stream) {
  if (a.num_rows > 0) {
    constexpr int kRowsPerBlock = kThreads / kWarp;
    ChooseKernel<<<static_cast<unsigned>((a.num_rows + kRowsPerBlock - 1) / kRowsPerBlock), kThreads, 0, stream>>>(a);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  PlaceKernel<<<static_cast<unsigned>(a.num_experts), kThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace spl::kernels::cuda
