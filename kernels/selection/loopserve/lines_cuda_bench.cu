// lines_cuda_bench [tokens] [alpha] [tail]
//
// Line selection and attention over lines on one device, against dense attention of the same run: 32 query heads over 8
// KV heads of 128, bf16, one layer. Queries and keys are random (the time of the weights does not depend on them); the
// weights that the selection sees are planted: some columns, a few slashes, and a heavy-tailed rest that holds the
// share `tail` of the mass. Times are medians of event-timed launches with the L2 cache flushed before each.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/attention/attention_cuda.h"
#include "kernels/cuda/cuda_bench_util.h"
#include "kernels/selection/loopserve/select_lines_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kQoHeads = 32, kKvHeads = 8, kDim = 128, kPlantedSlashes = 5;

struct Planting {
  float column_share;  // share of the columns
  float tail;          // share of the mass
  int32_t slash[kKvHeads][kPlantedSlashes];
};

__device__ inline float Uniform(uint64_t x) {
  x = (x + 1) * 0x9e3779b97f4a7c15ull;
  x ^= x >> 32;
  x *= 0xd6e8feb86659fd93ull;
  x ^= x >> 32;
  x *= 0xd6e8feb86659fd93ull;
  x ^= x >> 32;
  return (x & 0xffffff) * (1.0f / 16777216);
}
__device__ inline float Normal(uint64_t x) {  // about
  return (Uniform(x) + Uniform(x ^ 0x5555) + Uniform(x ^ 0xaaaa) - 1.5f) * 2.0f;
}

// One block for a (sample, head).
__global__ void PlantWeights(LineJob job, Planting planting) {
  const LineSizes& sizes = job.plan.sizes;
  const int r = blockIdx.x, h = blockIdx.y, position = sizes.first_position + job.sample[r];
  float* a = job.plan.weights + (int64_t{h} * sizes.num_samples + r) * sizes.weight_stride();
  const float expected = planting.column_share * sizes.num_keys();  // about the mass of all columns
  for (int j = threadIdx.x; j <= position; j += blockDim.x) {
    const uint64_t column = uint64_t{static_cast<unsigned>(h)} << 40 | static_cast<unsigned>(j);
    const uint64_t cell = column ^ uint64_t { static_cast<unsigned>(r + 1) } << 48;
    float x = planting.tail * expected / sizes.num_keys() * expf(1.5f * Normal(cell));
    if (Uniform(column ^ 0x777) < planting.column_share) x += expf(Normal(column) + 0.5f * Normal(cell ^ 1));
    for (const int32_t o : planting.slash[h]) {
      if (position - j == o) x += 0.06f * expected * expf(0.5f * Normal(cell ^ 2));
    }
    if (position - j < 8) x += 0.02f * expected;
    a[j] = x;
  }
}

class Setup {
 public:
  Setup(int32_t tokens, const LineOptions& options) {
    const int pages = (tokens + kPageTokens - 1) / kPageTokens, num_pages = pages * kKvHeads;
    std::vector<int32_t> table(num_pages);
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), std::mt19937(1));
    const int64_t elements = int64_t{num_pages} * 2 * kPageTokens * kDim;
    auto* pool = Keep(Alloc<__nv_bfloat16>(elements));
    FillNormal<<<2048, 256>>>(pool, elements, 1);
    batch = {.page_tables = Keep(Upload(table)),
             .table_offset = Keep(Upload(std::vector<int64_t>{0})),
             .head_stride = pages,
             .kv_len = Keep(Upload(std::vector<int32_t>{tokens})),
             .pool = {reinterpret_cast<std::byte*>(pool), DType::kBF16, kDim, num_pages},
             .num_sequences = 1};
    const int64_t width = int64_t{kQoHeads} * kDim;
    auto* q = Keep(Alloc<__nv_bfloat16>(tokens * width));
    FillNormal<<<2048, 256>>>(q, tokens * width, 2);
    const float scale = 1.0f / std::sqrt(static_cast<float>(kDim));
    std::vector<int32_t> positions(tokens);
    std::iota(positions.begin(), positions.end(), 0);
    const std::vector<int32_t> samples = SampleRows(tokens, 1);
    const LineSizes sizes{.shape = {kQoHeads, kKvHeads, kDim, scale},
                          .num_samples = static_cast<int32_t>(samples.size()),
                          .num_rows = tokens,
                          .max_columns = options.max_columns,
                          .max_offsets = options.max_offsets};
    job.plan = PlaceLinePlan(Keep(Alloc<std::byte>(LinePlanBytes(sizes))), sizes);
    job.scratch = PlaceLineScratch(job.plan.scratch, sizes);
    job.options = options;
    job.batch = batch;
    job.q = q;
    job.q_row_stride = width;
    job.num_heads = kKvHeads;
    for (int h = 0; h < kKvHeads; ++h) job.head[h] = static_cast<uint8_t>(h);
    std::copy(samples.begin(), samples.end(), job.sample);
    args = {.heads = {kQoHeads, kKvHeads, kDim, scale},
            .batch = batch,
            .row_begin = Keep(Upload(std::vector<int32_t>{0, tokens})),
            .positions = Keep(Upload(positions)),
            .num_rows = tokens,
            .max_kv_len = tokens,
            .q = q,
            .q_row_stride = width,
            .out = Keep(Alloc<__nv_bfloat16>(tokens * width)),
            .workspace = Keep(Alloc<std::byte>(PrefillWorkspaceBytes()))};
    CHECK_CUDA(cudaMemset(args.workspace, 0, PrefillWorkspaceBytes()));
    args.lines = {job.plan.tiles,        job.plan.column_masks, job.plan.columns,    job.plan.column_pages,
                  sizes.num_row_tiles(), sizes.tile_words(),    sizes.column_words()};
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  ~Setup() {
    for (void* p : kept_) cudaFree(p);
  }
  void UseLines(bool on) {
    for (int h = 0; h < kKvHeads; ++h) args.rules.head[h].rule = on ? VisibilityRule::kLines : VisibilityRule::kFull;
  }

  PagedBatch batch;
  LineJob job;
  PrefillArgs args;

 private:
  template <typename T>
  T* Keep(T* p) {
    kept_.push_back(p);
    return p;
  }
  std::vector<void*> kept_;
};

Planting MakePlanting(int32_t tokens, float column_share, float tail) {
  Planting p{.column_share = column_share, .tail = tail, .slash = {}};
  std::mt19937 random(5);
  for (auto& head : p.slash) {
    for (int32_t& o : head) o = static_cast<int32_t>(random() % static_cast<uint32_t>(tokens / 2));
  }
  return p;
}

template <typename T>
std::vector<T> Download(const T* device, size_t count) {
  std::vector<T> v(count);
  CHECK_CUDA(cudaMemcpy(v.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost));
  return v;
}

// (row, key) cells per query head and layer: of the causal triangle, chosen (whole tiles up to the row, single
// columns), and what the tensor cores compute (64 x 64 tiles, gathered pages of 64 columns).
struct Cells {
  double causal = 0, chosen = 0, computed = 0;
};

Cells CountCells(const Setup& s) {
  const LineSizes& sizes = s.job.plan.sizes;
  const size_t tiles = static_cast<size_t>(kKvHeads) * sizes.num_row_tiles();
  const std::vector<uint64_t> whole = Download(s.job.plan.tiles, tiles * sizes.tile_words());
  const std::vector<uint64_t> masks = Download(s.job.plan.column_masks, tiles * sizes.column_words());
  Cells c;
  for (size_t i = 0; i < tiles; ++i) {
    const int t = static_cast<int>(i % sizes.num_row_tiles());
    const double rows = std::min(64, sizes.num_rows - 64 * t);
    for (int r = 0; r < rows; ++r) c.causal += sizes.first_position + 64 * t + r + 1;
    for (int page = 0; page < 64 * sizes.tile_words(); ++page) {
      if ((whole[i * sizes.tile_words() + page / 64] >> (page % 64) & 1) == 0) continue;
      c.computed += 64 * 64;
      c.chosen += page == t ? rows * (rows + 1) / 2 : rows * 64;  // rows start at position 0 here
    }
    for (int w = 0; w < sizes.column_words(); ++w) {
      const uint64_t mask = masks[i * sizes.column_words() + w];
      c.chosen += rows * std::popcount(mask);
      c.computed += mask != 0 ? 64 * 64 : 0;
    }
  }
  const double per_query_head = static_cast<double>(kQoHeads) / kKvHeads;
  return {c.causal * per_query_head, c.chosen * per_query_head, c.computed * per_query_head};
}

void Choose(Setup& s, const Planting& planting, bool again) {
  PlantWeights<<<dim3(s.job.plan.sizes.num_samples, kKvHeads), 256>>>(s.job, planting);
  CHECK_CUDA(LineChoiceAndTiles(s.job, nullptr));
  if (again) CHECK_CUDA(cudaDeviceSynchronize());
}

void PrintResults(const Setup& s) {
  int head = 0;
  for (const LineResult& r : Download(s.job.plan.results, kKvHeads)) {
    if (head++ % 3 != 0) continue;
    std::printf("  columns %5d offsets %5d rounds %d dense %d uncovered %.4f\n", r.num_columns, r.num_offsets, r.rounds,
                r.dense, r.uncovered / r.total);
  }
}

// Attention over a chosen plan, wgmma against SIMT.
void Check(float alpha, float tail) {
  Setup s(4096 + 40, {.alpha = alpha});
  Choose(s, MakePlanting(4096, 0.03f, tail), true);
  s.UseLines(true);
  const size_t outs = static_cast<size_t>(s.args.num_rows) * kQoHeads * kDim;
  std::vector<__nv_bfloat16> result[2];
  for (const Variant variant : {Variant::kSm90, Variant::kGeneric}) {
    CHECK_CUDA(cudaMemset(s.args.out, 0xff, outs * 2));
    CHECK_CUDA(PrefillAttention(s.args, nullptr, variant));
    CHECK_CUDA(cudaDeviceSynchronize());
    result[variant == Variant::kGeneric] = Download(static_cast<const __nv_bfloat16*>(s.args.out), outs);
  }
  double error = 0, norm = 0;
  for (size_t i = 0; i < outs; ++i) {
    const double a = __bfloat162float(result[0][i]), b = __bfloat162float(result[1][i]);
    error += (a - b) * (a - b);
    norm += b * b;
  }
  std::printf("check 4136 tokens: wgmma against SIMT over the same lines, rel-L2 %.2e %s\n", std::sqrt(error / norm),
              std::sqrt(error / norm) <= 4e-3 ? "ok" : "WRONG");
  PrintResults(s);
}

int Main(int argc, char** argv) {
  const int32_t tokens = argc > 1 ? std::atoi(argv[1]) : 32768;
  const float alpha = argc > 2 ? static_cast<float>(std::atof(argv[2])) : 0.995f;
  const float tail = argc > 3 ? static_cast<float>(std::atof(argv[3])) : 0.001f;
  AllocateFlushBuffer();
  Check(alpha, tail);

  Setup s(tokens, {.alpha = alpha});
  const Planting planting = MakePlanting(tokens, 1600.0f / static_cast<float>(tokens), tail);
  s.UseLines(false);
  const double dense_ms = MedianMs(7, [&] { CHECK_CUDA(PrefillAttention(s.args, nullptr)); });
  Choose(s, planting, true);
  const Cells cells = CountCells(s);
  const double flops = 4.0 * kDim;
  const double dense_rate = flops * cells.causal / dense_ms * 1e-9;
  std::printf("%d tokens, alpha %.3f, tail %.3f\n", tokens, alpha, tail);
  PrintResults(s);
  std::printf("dense attention              %8.4f ms %7.1f TF/s\n", dense_ms, dense_rate);
  const double weights_ms = MedianMs(15, [&] { CHECK_CUDA(LineWeights(s.job, nullptr)); });
  PlantWeights<<<dim3(s.job.plan.sizes.num_samples, kKvHeads), 256>>>(s.job, planting);
  const auto choice = [&](const LineOptions& options) {
    LineJob job = s.job;
    job.options = options;
    return MedianMs(15, [&] { CHECK_CUDA(LineChoiceAndTiles(job, nullptr)); });
  };
  LineOptions once = s.job.options, one_round = s.job.options;
  once.alpha = 1e-6f;
  one_round.max_rounds = 1;
  std::printf("choice when nothing is to do %8.4f ms, with one round (%.4f ms)\n", choice(once), choice(one_round));
  const double choice_ms = choice(s.job.options);
  LineJob fixed = s.job;
  fixed.options.top_columns = 1000;
  fixed.options.top_offsets = 6096;
  fixed.options.forced_offsets = 100;
  const double fixed_ms = MedianMs(15, [&] { CHECK_CUDA(LineChoiceAndTiles(fixed, nullptr)); });
  Choose(s, planting, true);
  s.UseLines(true);
  const double lines_ms = MedianMs(15, [&] { CHECK_CUDA(PrefillAttention(s.args, nullptr)); });
  std::printf("weights of %d samples        %8.4f ms %7.1f TF/s of two passes\n", s.job.plan.sizes.num_samples,
              weights_ms, 2 * 2.0 * s.job.plan.sizes.num_samples * tokens / 1.5 * kDim * kQoHeads / weights_ms * 1e-9);
  std::printf("choice, tiles, columns       %8.4f ms (fixed counts 1000 + 6096: %.4f ms)\n", choice_ms, fixed_ms);
  std::printf("index                        %8.4f ms, %.2f %% of dense attention (target 5)\n", weights_ms + choice_ms,
              100 * (weights_ms + choice_ms) / dense_ms);
  const double rate = flops * cells.computed / lines_ms * 1e-9;
  std::printf("attention over lines         %8.4f ms %7.1f TF/s computed, %.1f %% of the dense rate (target 80)\n",
              lines_ms, rate, 100 * rate / dense_rate);
  std::printf("cells                        %8.2f %% chosen, %.2f %% computed\n", 100 * cells.chosen / cells.causal,
              100 * cells.computed / cells.causal);
  std::printf("both                         %8.4f ms, %.2fx faster than dense (target 2)\n",
              weights_ms + choice_ms + lines_ms, dense_ms / (weights_ms + choice_ms + lines_ms));
  return 0;
}

}  // namespace
}  // namespace spl::kernels::cuda

int main(int argc, char** argv) { return spl::kernels::cuda::Main(argc, argv); }
