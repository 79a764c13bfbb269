// One cluster of blocks per row. The row's logits are read once, each block's share into its shared memory, where every
// pass runs on them. Weights and counts are integers, so that blocks and threads may add them up in any order.
//
// A threshold (top_k, top_p, alternatives) is found without a sort. The first histogram is over exponents of the
// weights, whose bins spread logits of any scale. The following ones are over the keys of the one bin that has the
// threshold, a few hundred times finer each time, until one key is left or the whole bin is taken. Each search over the
// histograms of all blocks costs one barrier of the cluster: blocks tell each other the sums of groups of 32 bins, and
// read one group from each other.
//
// A row that does not fit, and every row on sm_80, is read again for each pass, mostly from the L2 cache.
#include "kernels/cuda/cuda_launch.h"
#include "kernels/sampling/row_search_cuda.h"

namespace spl::kernels::cuda {
namespace {

using sample::kBins;
using sample::kStep;
using sample::kThreads;
using sample::kWarps;
using sample::Larger;
using sample::Params;
using sample::Plus;

constexpr int kClusterBlocks = 8;
// A multiprocessor's. With two, which may have more registers, 256 rows take a tenth longer.
constexpr int kBlocksOfSm = 3;

// Chooses tokens of one row.
template <int kBlocks, bool kInSmem>
struct RowOfBlocks : sample::RowSearch<kBlocks, kInSmem> {
  using C = Cluster<kBlocks>;
  using Search = sample::RowSearch<kBlocks, kInSmem>;
  using Search::Before;
  using Search::first;
  using Search::ForEach;
  using Search::Get;
  using Search::held;
  using Search::IdOf;
  using Search::lane;
  using Search::p;
  using Search::rank;
  using Search::row;
  using Search::smem;
  using Search::Threshold;
  using Search::Values;
  using Search::warp;
  using Search::x;
  using Search::y;
  using typename Search::Best;

  // Writes the tokens of `key` and above, most likely first, num_top of them.
  __device__ __forceinline__ void ListTop(uint32_t key, TopToken* top) {
    uint64_t mine = 0;  // number of tokens above the key, plus the number equal to it << 32
    const auto is_above = [&](float y) { return sampling::OrderedKey(y) > key; };
    const auto is_equal = [&](float y) { return key != 0 && sampling::OrderedKey(y) == key; };
    ForEach([&](int, float y) { mine += is_above(y) ? 1 : is_equal(y) ? 1ull << 32 : 0; });
    const uint64_t all = this->template Reduce<Plus>(mine);
    const int num_above = static_cast<int>(all & ~0u);
    const int num = min(row.num_top, num_above + static_cast<int>(all >> 32));
    uint64_t before = Before();
    for (int w = 0; w < warp; ++w) before += smem.warp_values[w];
    int above = static_cast<int>(before & ~0u), equal = static_cast<int>(before >> 32);
    for (int at = 0; at < p.span && smem.warp_values[warp] != 0; at += kStep) {
      const float4 v = Get(at);
      const float of_lane[4] = {v.x, v.y, v.z, v.w};
      uint32_t count = 0;  // like `mine`, but << 16
#pragma unroll
      for (const float y : of_lane) count += is_above(y) ? 1u : is_equal(y) ? 1u << 16 : 0;
      const uint32_t up_to = InclusiveSum(count);
      int own_above = above + static_cast<int>((up_to - count) & 0xffff);
      int own_equal = equal + static_cast<int>((up_to - count) >> 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool takes = is_above(of_lane[i]);
        const int place = takes ? own_above++ : is_equal(of_lane[i]) ? num_above + own_equal++ : num;
        if (place < num)
          C::Store(&smem.list[place], 0,
                   static_cast<uint64_t>(__float_as_uint(of_lane[i])) << 32 | static_cast<uint32_t>(first + at + i));
      }
      const uint32_t of_step = __shfl_sync(0xffffffffu, up_to, 31);
      above += static_cast<int>(of_step & 0xffff);
      equal += static_cast<int>(of_step >> 16);
    }
    C::Sync();
    if (rank != 0) return;
    for (int i = threadIdx.x; i < row.num_top; i += kThreads) {
      if (i >= num) {
        top[i] = {-1, 0.0f};
        continue;
      }
      const auto order = [&](int j) {
        const uint32_t of_j = sampling::OrderedKey(__uint_as_float(static_cast<uint32_t>(smem.list[j] >> 32)));
        return static_cast<uint64_t>(of_j) << 32 | ~static_cast<uint32_t>(smem.list[j]);
      };
      const uint64_t own = order(i);
      int place = 0;
      for (int j = 0; j < num; ++j) place += order(j) > own ? 1 : 0;
      top[place] = {static_cast<int32_t>(static_cast<uint32_t>(smem.list[i])),
                    __uint_as_float(static_cast<uint32_t>(smem.list[i] >> 32))};
    }
  }

  __device__ __forceinline__ void Logprobs(uint64_t best, TopToken* top, SampledRow& out) {
    const float max = x[IdOf(best)];
    out.max_logit = max;
    out.total = this->template Reduce<Plus>(this->template SumOfWeights<false>(max, sampling::kLog2E, 0));
    if (row.num_top == 0) return;
    const uint32_t key = Threshold(
        max, sampling::kLog2E, false, [](float y, float) -> uint64_t { return y == y ? 1 : 0; },
        [&](uint64_t total) -> uint64_t { return min(static_cast<uint64_t>(row.num_top), total); });
    ListTop(key, top);
  }

  // Applies edits and mask to the logits. Returns the best token of this thread.
  __device__ __forceinline__ uint64_t Adjust() {
    const int begin = rank * kWarps * p.span;
    float* const own = kInSmem ? held : p.launch.scratch + blockIdx.x / kBlocks * p.scratch_stride + begin;
    const int num = min(kWarps * p.span, p.width - begin);
    if constexpr (!kInSmem) {
      for (int i = threadIdx.x; i < num; i += kThreads) own[i] = x[begin + i];
      y = own - begin;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < row.num_edits; i += kThreads) {
      const bool is_new = row.edits_at >= 0 || i == row.changed;
      const TokenEdit edit = row.edits_at >= 0  ? p.launch.edits[row.edits_at + i]
                             : i == row.changed ? row.change
                                                : row.kept_edits[i];
      if (is_new && row.kept_edits != nullptr && rank == 0) row.kept_edits[i] = edit;
      const int at = edit.token - begin;
      if (edit.token < begin || at >= num) continue;
      own[at] = sampling::Edited(own[at], edit, row.repetition, row.presence, row.frequency, row.bans_ends != 0);
    }
    __syncthreads();
    if (row.mask_at >= 0) {
      for (int i = threadIdx.x; i < num; i += kThreads) {
        if ((p.launch.masks[row.mask_at + (begin + i) / 32] >> (begin + i) % 32 & 1) == 0)
          own[i] = __int_as_float(0xff800000);
      }
      __syncthreads();
    }
    Best best;
    ForEach([&](int id, float v) { best.Take(id, v); });
    return best.packed();
  }

  // Calls write(token) in one thread of the cluster.
  template <typename Write>
  __device__ __forceinline__ void Draw(float max, const Write& write) {
    const float scale = row.scale;
    float y_min = -INFINITY;
    if (row.top_k > 0 && row.top_k < p.width) {
      const uint32_t key = Threshold(
          max, scale, true, [](float y, float) -> uint64_t { return y == y ? 1 : 0; },
          [&](uint64_t total) -> uint64_t { return min(static_cast<uint64_t>(row.top_k), total); });
      if (key != 0) y_min = sampling::OfKey(key);
    }
    const uint64_t min_weight = row.min_weight;
    const auto weight = [&](float y, float t) -> uint64_t {
      if (!(y >= y_min)) return 0;
      const uint64_t w = sampling::WeightOfExponent(t);
      return w >= min_weight ? w : 0;
    };
    if (row.top_p != 0)
      y_min = sampling::OfKey(Threshold(max, scale, false, weight, [&](uint64_t total) -> uint64_t {
        return sampling::TopPTarget(row.top_p, total);
      }));
    uint64_t sum = 0;
    if (min_weight > 1) {
      ForEach([&](int, float y) { sum += weight(y, sampling::ExponentOf(y, max, scale)); });
    } else if (y_min != -INFINITY) {
      sum = this->template SumOfWeights<true>(max, scale, y_min);
    } else {
      sum = this->template SumOfWeights<false>(max, scale, 0);
    }
    uint64_t r = sampling::DrawBelow(row.random, this->template Reduce<Plus>(sum));
    const uint64_t before = Before();
    if (r < before || r - before >= Values()[rank]) return;  // another block's
    r -= before;
    int owner = 0;
    while (r >= smem.warp_values[owner]) r -= smem.warp_values[owner++];
    Pick(
        owner, r, [&](float y) { return weight(y, sampling::ExponentOf(y, max, scale)); }, write);
  }

  // The token of warp `owner` with which the sum of the weights exceeds r. All threads share the warp's logits, each
  // some that follow each other.
  template <typename Weight, typename Write>
  __device__ __forceinline__ void Pick(int owner, uint64_t r, const Weight& weight, const Write& write) {
    const int num = (p.span + kThreads - 1) / kThreads, begin = num * static_cast<int>(threadIdx.x);
    const int end = min(begin + num, p.span), of_warp = owner * p.span, id = rank * kWarps * p.span + of_warp;
    const auto at = [&](int i) {
      if constexpr (kInSmem) return held[of_warp + i];
      return id + i < p.width ? y[id + i] : __int_as_float(0x7fffffff);
    };
    uint64_t own = 0;
    for (int i = begin; i < end; ++i) own += weight(at(i));
    const uint64_t up_to = InclusiveSum(own);
    __syncthreads();  // all have read the sums of the warps
    if (lane == 31) smem.warp_values[warp] = up_to;
    __syncthreads();
    for (int w = 0; w < warp; ++w) {
      if (r < smem.warp_values[w]) return;
      r -= smem.warp_values[w];
    }
    if (r >= up_to || r < up_to - own) return;
    r -= up_to - own;
    for (int i = begin; i < end; ++i) {
      const uint64_t w = weight(at(i));
      if (r < w) return write(id + i);
      r -= w;
    }
  }
};

template <int kBlocks, bool kInSmem>
__global__ void __launch_bounds__(kThreads, kBlocksOfSm) SampleKernel(const Params p) {
  using C = Cluster<kBlocks>;
  extern __shared__ __align__(16) char raw[];
  auto& smem = *reinterpret_cast<sample::Smem<kBlocks>*>(raw);
  LetNextStart();
  for (int i = threadIdx.x; i < 2 * kBins; i += kThreads) (&smem.low[0][0])[i] = (&smem.high[0][0])[i] = 0;
  C::Arrive();  // waited for before the first word is written for another block, which must have started
  WaitForPrevious();
  const int index = static_cast<int>(blockIdx.x) / kBlocks;
  const DeviceSampleRow& row = p.launch.rows[index];
  const int rank = C::Rank(), lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const float* const x = p.logits + static_cast<int64_t>(row.logits_row) * p.width;
  RowOfBlocks<kBlocks, kInSmem> blocks{{p, row, smem, reinterpret_cast<float*>(raw + sizeof(smem)), x, x, rank, lane,
                                        warp, (rank * kWarps + warp) * p.span + 4 * lane}};
  const bool adjusts = row.num_edits > 0 || row.mask_at >= 0;
  const uint64_t of_thread = blocks.Load(adjusts || row.scale > 0 || row.num_top >= 0);
  C::Wait();
  uint64_t best = blocks.template Reduce<Larger>(of_thread);
  SampledRow out{};
  if (row.num_top >= 0) blocks.Logprobs(best, p.top + static_cast<int64_t>(index) * p.top_stride, out);
  if (adjusts) best = blocks.template Reduce<Larger>(blocks.Adjust());
  const auto write = [&](int token) {
    out.token = token;
    out.logit = x[token];
    p.out[index] = out;
    if (p.tokens != nullptr) p.tokens[index] = token;
  };
  const float max = sampling::OfKey(static_cast<uint32_t>(best >> 32));
  if (row.scale > 0 && sampling::IsFinite(max)) {
    blocks.Draw(max, write);
  } else if (rank == 0 && threadIdx.x == 0) {
    write(RowOfBlocks<kBlocks, kInSmem>::IdOf(best));
  }
}

struct Shape {
  int blocks;  // of a cluster
  bool in_smem;
  int span;
  size_t smem_bytes;
};

int SpanOf(int64_t width, int blocks) {
  const int64_t share = (width + blocks * kWarps - 1) / (blocks * kWarps);
  return static_cast<int>((share + kStep - 1) / kStep * kStep);
}

cudaError_t ShapeOf(const SampleTokensArgs& a, Shape* shape) {
  int device = 0, major = 0, most = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (e != cudaSuccess) return e;
  if (major < 9) {
    *shape = {1, false, SpanOf(a.width, 1), sizeof(sample::Smem<1>)};
    return cudaSuccess;
  }
  const int span = SpanOf(a.width, kClusterBlocks);
  const size_t bytes = sizeof(sample::Smem<kClusterBlocks>), held = sizeof(float) * kWarps * static_cast<size_t>(span);
  const bool fits = bytes + held <= static_cast<size_t>(most);
  *shape = {kClusterBlocks, fits, span, fits ? bytes + held : bytes};
  return cudaSuccess;
}

template <int kBlocks, bool kInSmem>
cudaError_t Launch(const Params& p, size_t num_rows, size_t smem_bytes, cudaStream_t stream) {
  const auto kernel = SampleKernel<kBlocks, kInSmem>;
  const cudaError_t e =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem_bytes));
  if (e != cudaSuccess) return e;
  return LaunchClustersEarly(kBlocks, kernel, static_cast<unsigned>(num_rows) * kBlocks, kThreads, smem_bytes, stream,
                             p);
}

}  // namespace

cudaError_t SampleTokensScratchBytes(const SampleTokensArgs& a, size_t* bytes) {
  Shape shape;
  const cudaError_t e = ShapeOf(a, &shape);
  *bytes = e != cudaSuccess || shape.in_smem ? 0 : sizeof(float) * a.rows.size() * ((a.width + 3) / 4 * 4);
  return e;
}

cudaError_t SampleTokens(const SampleTokensArgs& a, const SampleTokensLaunch& launch, cudaStream_t stream) {
  if (a.rows.empty()) return cudaSuccess;
  Shape shape;
  if (const cudaError_t e = ShapeOf(a, &shape); e != cudaSuccess) return e;
  const Params p{.launch = launch,
                 .logits = a.logits,
                 .tokens = a.tokens,
                 .out = a.out,
                 .top = a.top,
                 .scratch_stride = (a.width + 3) / 4 * 4,
                 .width = static_cast<int32_t>(a.width),
                 .top_stride = a.top_stride,
                 .span = shape.span};
  if (shape.blocks == 1) return Launch<1, false>(p, a.rows.size(), shape.smem_bytes, stream);
  return shape.in_smem ? Launch<kClusterBlocks, true>(p, a.rows.size(), shape.smem_bytes, stream)
                       : Launch<kClusterBlocks, false>(p, a.rows.size(), shape.smem_bytes, stream);
}

}  // namespace spl::kernels::cuda
