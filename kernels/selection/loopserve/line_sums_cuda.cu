// Computes the weights of sampled rows in two passes over the keys. The first gives log-sum-exps of chunks of keys,
// which a small kernel joins in ascending order; the second gives the weights, summed over the query heads of a KV head
// in registers.
//
// In the tensor-core passes a CTA keeps the queries of 64 samples and all heads of a group in shared memory and streams
// a chunk of keys past them. A warp has 16 samples as the left operand of mma m16n8k16 and half of the keys of a page;
// it runs the heads one after the other over the same keys, so that a lane holds the same (sample, key) of every head.
#include <cmath>

#include "kernels/attention/attention_cuda_common.h"
#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/cuda_ptx.h"
#include "kernels/cuda/cuda_types.h"
#include "kernels/selection/loopserve/select_lines_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kSamples = 64;  // samples per CTA
constexpr int kThreads = 256;
constexpr int kChunkPages = kLineChunkKeys / kPageTokens;

struct Params {
  LineJob job;
  int32_t group;
  float scale;  // sm_scale * log2(e)
};

__device__ __forceinline__ int32_t KeyPage(const Params& p, int kv_head, int page) {
  return p.job.batch.page_tables[p.job.batch.table_offset[p.job.sequence] + kv_head * p.job.batch.head_stride + page];
}

template <int kDim>
struct Memory {
  __nv_bfloat16 k[2][kPageTokens * kDim];
  // Behind it: the queries, [group][kSamples][kDim].
};

// kGroup query heads; kWeights: the second pass.
template <int kDim, int kGroup, bool kWeights>
__global__ void __launch_bounds__(kThreads, kDim* kGroup <= 512 ? 2 : 1)
    TensorKernel(const __grid_constant__ Params p) {
  LetNextStart();
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& memory = *reinterpret_cast<Memory<kDim>*>(raw);
  const uint32_t q_tile = SmemAddress(raw + sizeof(Memory<kDim>)), k_tile = SmemAddress(memory.k);
  constexpr int kSteps = kDim / 16, kRowBytes = 2 * kDim, kChunks = kRowBytes / 16;
  constexpr int kPageBytes = kPageTokens * kRowBytes;
  const LineSizes& sizes = p.job.plan.sizes;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int kv_head = p.job.head[blockIdx.y], first_sample = blockIdx.z * kSamples;
  const int num_samples = min(kSamples, sizes.num_samples - first_sample);
  const int first_page = blockIdx.x * kChunkPages;
  const int last_position = sizes.first_position + p.job.sample[first_sample + num_samples - 1];
  const int num_pages = min(kChunkPages, last_position / kPageTokens + 1 - first_page);
  WaitForPrevious();
  if (num_pages <= 0) {
    if constexpr (!kWeights) {
      // No key of the chunk is seen.
      for (int i = threadIdx.x; i < num_samples * kGroup; i += kThreads) {
        const int64_t pairs = int64_t{sizes.num_samples} * kGroup;
        p.job.scratch
            .chunk_lse[(int64_t{kv_head} * p.job.scratch.chunks + blockIdx.x) * pairs + first_sample * kGroup + i] =
            LineChunkLse{-INFINITY, 0};
      }
    }
    return;
  }

  for (int i = threadIdx.x; i < kGroup * kSamples * kChunks; i += kThreads) {
    const int chunk = i % kChunks, sample = i / kChunks % kSamples, head = i / kChunks / kSamples;
    const bool valid = sample < num_samples;
    const int64_t row = valid ? p.job.sample[first_sample + sample] : 0;
    const auto* from = static_cast<const __nv_bfloat16*>(p.job.q) + row * p.job.q_row_stride +
                       static_cast<int64_t>(kv_head * kGroup + head) * kDim + chunk * 8;
    CpAsync16(q_tile + Swizzled<kRowBytes>(head * kSamples + sample, chunk), from, valid);
  }
  const auto load = [&](int page) {
    if (page < num_pages) {
      const int32_t physical = KeyPage(p, kv_head, first_page + page);
      const char* from =
          reinterpret_cast<const char*>(p.job.batch.pool.base) + int64_t{max(physical, 0)} * (2 * kPageBytes);
      for (int i = threadIdx.x; i < kPageTokens * kChunks; i += kThreads) {
        CpAsync16(k_tile + page % 2 * kPageBytes + Swizzled<kRowBytes>(i / kChunks, i % kChunks), from + i * 16,
                  physical >= 0);
      }
    }
    CpAsyncCommit();
  };
  load(0);

  const int tile = warp % 4, half = warp / 4;  // 16 samples; 32 keys of a page
  int32_t position[2];
  int row[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row[r] = tile * 16 + g + 8 * r;
    position[r] = row[r] < num_samples ? sizes.first_position + p.job.sample[first_sample + row[r]] : -1;
  }
  const int tile_last = min(tile * 16 + 15, num_samples - 1);  // last sample of the tile, if it has any
  const int32_t tile_position =
      tile * 16 < num_samples ? sizes.first_position + p.job.sample[first_sample + tile_last] : -1;
  // Where the lane's operands of step 0 lie: those of a step are step * 32 bytes away, swizzled (rows are 256 or 128
  // bytes, so that this is an exclusive or).
  const int slot = half * 32;
  const uint32_t q_lane = q_tile + Swizzled<kRowBytes>(tile * 16 + (lane & 15), lane / 16);
  const uint32_t k_lane = k_tile + Swizzled<kRowBytes>(slot + lane / 16 * 8 + (lane & 7), lane >> 3 & 1);
  float max[kGroup][2], sum[kGroup][2];  // first pass; in the second, `max` is the log-sum-exp
#pragma unroll
  for (int h = 0; h < kGroup; ++h) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      max[h][r] = -INFINITY;
      sum[h][r] = 0;
      if (kWeights && row[r] < num_samples) {
        max[h][r] = p.job.scratch.lse[(int64_t{kv_head} * sizes.num_samples + first_sample + row[r]) * kGroup + h];
      }
    }
  }
  float* weights[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    weights[r] =
        p.job.plan.weights + (int64_t{kv_head} * sizes.num_samples + first_sample + row[r]) * sizes.weight_stride();
  }

  for (int page = 0; page < num_pages; ++page) {
    load(page + 1);
    CpAsyncWait<1>();
    __syncthreads();
    const int32_t page_begin = (first_page + page) * kPageTokens;
    if (page_begin <= tile_position) {
      const uint32_t keys = k_lane + page % 2 * kPageBytes;
      float total[4][4] = {};  // second pass: [8 keys][element of the accumulator]
#pragma unroll
      for (int h = 0; h < kGroup; ++h) {
        // One step ahead, so that no product waits for its operands.
        uint32_t a[2][4], b[2][2][4];
        const auto fetch = [&](int step) {
          LdMatrix4(a[step % 2], (q_lane ^ (step * 32)) + h * (kSamples * kRowBytes));
#pragma unroll
          for (int n = 0; n < 2; ++n) LdMatrix4(b[step % 2][n], (keys ^ (step * 32)) + n * (16 * kRowBytes));
        };
        float s[4][4] = {};
        fetch(0);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          if (step + 1 < kSteps) fetch(step + 1);
#pragma unroll
          for (int n = 0; n < 4; ++n)
            Mma16816(s[n], a[step % 2], b[step % 2][n / 2][n % 2 * 2], b[step % 2][n / 2][n % 2 * 2 + 1]);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if constexpr (kWeights) {
#pragma unroll
            for (int i = 0; i < 8; ++i)
              total[i / 2][2 * r + i % 2] += Exp2(__fmaf_rn(s[i / 2][2 * r + i % 2], p.scale, -max[h][r]));
          } else {
            float x[8];
            float top = max[h][r];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
              const int32_t j = page_begin + slot + i / 2 * 8 + 2 * t + i % 2;
              x[i] = j <= position[r] ? s[i / 2][2 * r + i % 2] * p.scale : -INFINITY;
              top = fmaxf(top, x[i]);
            }
            const float base = top == -INFINITY ? 0.0f : top;
            float part = 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) part += Exp2(x[i] - base);
            sum[h][r] = __fmaf_rn(sum[h][r], Exp2(max[h][r] - base), part);
            max[h][r] = top;
          }
        }
      }
      if constexpr (kWeights) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (row[r] >= num_samples) continue;
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            *reinterpret_cast<float2*>(weights[r] + page_begin + slot + n * 8 + 2 * t) =
                float2{total[n][2 * r], total[n][2 * r + 1]};
          }
        }
      }
    }
    __syncthreads();  // the page after the next overwrites this one
  }
  CpAsyncWait<0>();
  if constexpr (!kWeights) {
    // The lanes of a row, then the two halves of the pages, in a fixed order.
    auto* partial = reinterpret_cast<LineChunkLse*>(raw);  // [2][kSamples][kGroup]
#pragma unroll
    for (int h = 0; h < kGroup; ++h) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int d = 1; d < 4; d *= 2) {
          const float other_max = __shfl_xor_sync(0xffffffffu, max[h][r], d);
          const float other_sum = __shfl_xor_sync(0xffffffffu, sum[h][r], d);
          const float top = fmaxf(max[h][r], other_max), base = top == -INFINITY ? 0.0f : top;
          sum[h][r] = sum[h][r] * Exp2(max[h][r] - base) + other_sum * Exp2(other_max - base);
          max[h][r] = top;
        }
        if (t == 0) partial[(half * kSamples + row[r]) * kGroup + h] = {max[h][r], sum[h][r]};
      }
    }
    __syncthreads();
    const int64_t pairs = int64_t{sizes.num_samples} * kGroup;
    LineChunkLse* out = p.job.scratch.chunk_lse + (int64_t{kv_head} * p.job.scratch.chunks + blockIdx.x) * pairs +
                        first_sample * kGroup;
    for (int i = threadIdx.x; i < num_samples * kGroup; i += kThreads) {
      const LineChunkLse a = partial[i], b = partial[kSamples * kGroup + i];
      const float top = fmaxf(a.max, b.max), base = top == -INFINITY ? 0.0f : top;
      out[i] = {top, a.sum * Exp2(a.max - base) + b.sum * Exp2(b.max - base)};
    }
  }
}

// One warp for one (sample, head): a lane joins every 32nd chunk, a tree the lanes.
constexpr int kJoinWarps = 4;
__global__ void __launch_bounds__(32 * kJoinWarps) JoinKernel(const __grid_constant__ Params p) {
  LetNextStart();
  WaitForPrevious();
  const int pairs = p.job.plan.sizes.num_samples * p.group, chunks = p.job.scratch.chunks;
  const int i = blockIdx.x * kJoinWarps + threadIdx.x / 32, lane = threadIdx.x % 32, kv_head = p.job.head[blockIdx.y];
  if (i >= pairs) return;
  const LineChunkLse* from = p.job.scratch.chunk_lse + int64_t{kv_head} * chunks * pairs + i;
  float max = -INFINITY, sum = 0;
  for (int c = lane; c < chunks; c += 32) {
    const LineChunkLse part = from[int64_t{c} * pairs];
    const float top = fmaxf(max, part.max), base = top == -INFINITY ? 0.0f : top;
    sum = sum * Exp2(max - base) + part.sum * Exp2(part.max - base);
    max = top;
  }
  float top = max;
#pragma unroll
  for (int d = 16; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, d));
  sum = WarpSum(sum * Exp2(max - top));
  if (lane == 0) p.job.scratch.lse[int64_t{kv_head} * pairs + i] = top + log2f(sum);
}

// ---- any shape ------------------------------------------------------------------------------------------------------
template <typename Q, typename Kv>
__device__ float Score(const Params& p, int kv_head, int head, int sample, int32_t j) {
  const int dim = p.job.plan.sizes.shape.head_dim;
  const Q* q = static_cast<const Q*>(p.job.q) + p.job.sample[sample] * p.job.q_row_stride + int64_t{head} * dim;
  const int32_t physical = KeyPage(p, kv_head, j / kPageTokens);
  if (physical < 0) return -INFINITY;
  const Kv* k = reinterpret_cast<const Kv*>(p.job.batch.pool.base) + int64_t{physical} * 2 * kPageTokens * dim +
                int64_t{j % kPageTokens} * dim;
  float dot = 0;
  for (int c = 0; c < dim; ++c) dot = fmaf(ToF(q[c]), ToF(k[c]), dot);
  return dot * p.scale;
}

// One block for one (sample, query head).
template <typename Q, typename Kv>
__global__ void __launch_bounds__(kThreads) GenericLseKernel(const __grid_constant__ Params p) {
  LetNextStart();
  WaitForPrevious();
  __shared__ float maxima[kThreads], sums[kThreads];
  const LineSizes& sizes = p.job.plan.sizes;
  const int sample = blockIdx.x, kv_head = p.job.head[blockIdx.y / p.group], h = blockIdx.y % p.group;
  const int32_t position = sizes.first_position + p.job.sample[sample];
  float max = -INFINITY, sum = 0;
  for (int32_t j = threadIdx.x; j <= position; j += kThreads) {
    const float x = Score<Q, Kv>(p, kv_head, kv_head * p.group + h, sample, j);
    const float top = fmaxf(max, x), base = top == -INFINITY ? 0.0f : top;
    sum = sum * exp2f(max - base) + exp2f(x - base);
    max = top;
  }
  maxima[threadIdx.x] = max;
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kThreads; ++i) max = fmaxf(max, maxima[i]);
  sum = 0;
  for (int i = 0; i < kThreads; ++i) sum += sums[i] > 0 ? sums[i] * exp2f(maxima[i] - max) : 0.0f;
  p.job.scratch.lse[(int64_t{kv_head} * sizes.num_samples + sample) * p.group + h] = max + log2f(sum);
}

// One thread for one (sample, key).
template <typename Q, typename Kv>
__global__ void __launch_bounds__(kThreads) GenericWeightsKernel(const __grid_constant__ Params p) {
  LetNextStart();
  WaitForPrevious();
  const LineSizes& sizes = p.job.plan.sizes;
  const int32_t j = blockIdx.x * kThreads + threadIdx.x;
  const int sample = blockIdx.y, kv_head = p.job.head[blockIdx.z];
  if (j > sizes.first_position + p.job.sample[sample]) return;
  const int64_t at = int64_t{kv_head} * sizes.num_samples + sample;
  float sum = 0;
  for (int h = 0; h < p.group; ++h) {
    sum += exp2f(Score<Q, Kv>(p, kv_head, kv_head * p.group + h, sample, j) - p.job.scratch.lse[at * p.group + h]);
  }
  p.job.plan.weights[at * sizes.weight_stride() + j] = sum;
}

template <int kDim, int kGroup>
cudaError_t LaunchTensor(const Params& p, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Memory<kDim>) + kGroup * kSamples * kDim * 2;
  const auto first = TensorKernel<kDim, kGroup, false>, second = TensorKernel<kDim, kGroup, true>;
  cudaError_t e = cudaSuccess;
  for (const auto kernel : {first, second}) {
    if (e == cudaSuccess) e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    // Two blocks a multiprocessor.
    if (e == cudaSuccess)
      e = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  }
  if (e != cudaSuccess) return e;
  const LineSizes& sizes = p.job.plan.sizes;
  const dim3 grid(p.job.scratch.chunks, p.job.num_heads, (sizes.num_samples + kSamples - 1) / kSamples);
  e = LaunchEarly(first, grid, kThreads, kBytes, stream, p);
  const int pairs = sizes.num_samples * kGroup;
  if (e == cudaSuccess)
    e = LaunchEarly(JoinKernel, dim3((pairs + kJoinWarps - 1) / kJoinWarps, p.job.num_heads), 32 * kJoinWarps, 0,
                    stream, p);
  if (e == cudaSuccess) e = LaunchEarly(second, grid, kThreads, kBytes, stream, p);
  return e;
}

template <int kDim>
cudaError_t LaunchGroup(const Params& p, cudaStream_t stream) {
  switch (p.group) {
    case 1:
      return LaunchTensor<kDim, 1>(p, stream);
    case 2:
      return LaunchTensor<kDim, 2>(p, stream);
    case 4:
      return LaunchTensor<kDim, 4>(p, stream);
    case 8:
      return LaunchTensor<kDim, 8>(p, stream);
    default:
      return cudaErrorNotSupported;
  }
}

cudaError_t LaunchMma(const Params& p, cudaStream_t stream) {
  const LineSizes& sizes = p.job.plan.sizes;
  if (p.job.q_dtype != DType::kBF16 || sizes.page_dtype != DType::kBF16 || !Aligned16(p.job.q) ||
      p.job.q_row_stride % 8 != 0 || !Aligned16(p.job.batch.pool.base))
    return cudaErrorNotSupported;
  if (sizes.shape.head_dim == 128) return LaunchGroup<128>(p, stream);
  return sizes.shape.head_dim == 64 ? LaunchGroup<64>(p, stream) : cudaErrorNotSupported;
}

template <typename Q, typename Kv>
cudaError_t LaunchGeneric(const Params& p, cudaStream_t stream) {
  const LineSizes& sizes = p.job.plan.sizes;
  const cudaError_t e =
      LaunchEarly(GenericLseKernel<Q, Kv>, dim3(sizes.num_samples, p.job.num_heads * p.group), kThreads, 0, stream, p);
  if (e != cudaSuccess) return e;
  const dim3 grid((sizes.num_keys() + kThreads - 1) / kThreads, sizes.num_samples, p.job.num_heads);
  return LaunchEarly(GenericWeightsKernel<Q, Kv>, grid, kThreads, 0, stream, p);
}

}  // namespace

cudaError_t LineWeights(const LineJob& job, cudaStream_t stream, LineVariant variant) {
  const AttentionShape& shape = job.plan.sizes.shape;
  const Params p{job, shape.num_qo_heads / shape.num_kv_heads, shape.sm_scale * kLog2e};
  if (variant != LineVariant::kGeneric) {
    const cudaError_t e = LaunchMma(p, stream);
    if (e != cudaErrorNotSupported || variant == LineVariant::kMma) return e;
  }
  if (job.q_dtype == DType::kBF16) {
    return job.plan.sizes.page_dtype == DType::kBF16 ? LaunchGeneric<__nv_bfloat16, __nv_bfloat16>(p, stream)
                                                     : LaunchGeneric<__nv_bfloat16, float>(p, stream);
  }
  return job.plan.sizes.page_dtype == DType::kBF16 ? LaunchGeneric<float, __nv_bfloat16>(p, stream)
                                                   : LaunchGeneric<float, float>(p, stream);
}

}  // namespace spl::kernels::cuda
