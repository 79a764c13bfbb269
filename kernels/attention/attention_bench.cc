// Prefill attention as a share of the GEMM rate, decode attention as a share of the copy rate, both of the same run.
#include <benchmark/benchmark.h>

#include <bit>
#include <cmath>

#include "kernels/attention/attention.h"
#include "kernels/common/bench_util.h"
#include "kernels/common/kv_rows.h"
#include "kernels/selection/loopserve/line_tiles.h"
#include "kernels/selection/loopserve/select_lines.h"

namespace spl::kernels {
namespace {

// Streams of one length whose pages lie scattered over a pool.
struct Streams {
  Streams(int32_t num_streams, int32_t kv_len, int32_t head_dim, DType dtype) {
    const int32_t pages_each = (kv_len + kPageTokens - 1) / kPageTokens;
    pool.dtype = dtype;
    pool.head_dim = head_dim;
    pool.num_pages = num_streams * pages_each;
    memory = std::move(MakeCpuBackend()->Allocate(pool.page_bytes() * pool.num_pages)).value();
    pool.base = static_cast<std::byte*>(memory->data());
    const std::vector<float> values = bench::Normals(static_cast<size_t>(kPageTokens) * static_cast<size_t>(head_dim));
    std::vector<std::byte> half(pool.half_bytes());
    for (int32_t slot = 0; slot < kPageTokens; ++slot)
      StoreKvRow(dtype, head_dim, half.data(), slot, values.data() + int64_t{slot} * head_dim);
    std::vector<int32_t> order(pool.num_pages);
    for (int32_t i = 0; i < pool.num_pages; ++i) {
      order[i] = i;
      std::memcpy(pool.k(i), half.data(), pool.half_bytes());
      std::memcpy(pool.v(i), half.data(), pool.half_bytes());
    }
    std::shuffle(order.begin(), order.end(), std::mt19937_64(2));
    tables.resize(num_streams);
    for (int32_t s = 0; s < num_streams; ++s) {
      tables[s].assign(order.begin() + s * pages_each, order.begin() + (s + 1) * pages_each);
      views.push_back({tables[s], kv_len, {}});
    }
  }

  KvPoolView pool;
  std::unique_ptr<Buffer> memory;
  std::vector<std::vector<int32_t>> tables;
  std::vector<HeadStreamView> views;
};

// By an argument of a benchmark.
DType PageType(int64_t argument) { return argument == 0 ? DType::kF32 : argument == 1 ? DType::kBF16 : DType::kE4M3; }

// The last `rows` rows of a prompt of `context` tokens: query heads, KV heads, head_dim; window 0 is full attention;
// page type.
void PrefillAttention(benchmark::State& state) {
  const auto rows = static_cast<int32_t>(state.range(0)), context = static_cast<int32_t>(state.range(1));
  const auto qo_heads = static_cast<int32_t>(state.range(2)), kv_heads = static_cast<int32_t>(state.range(3));
  const auto dim = static_cast<int32_t>(state.range(4)), window = static_cast<int32_t>(state.range(5));
  Streams streams(kv_heads, context, dim, PageType(state.range(6)));
  double seen = 0;
  std::vector<int32_t> positions;
  for (int32_t i = context - rows; i < context; ++i) {
    positions.push_back(i);
    seen += window == 0 ? i + 1 : std::min(i + 1, window + 64);
  }
  if (window > 0) {
    for (HeadStreamView& v : streams.views) v.visibility = {VisibilityRule::kBand, 64, window, {}};
  }
  const PrefillSequence sequence{0, rows, positions, streams.views};
  const std::vector<float> q = bench::Normals(static_cast<size_t>(rows) * qo_heads * dim);
  std::vector<float> out(q.size());
  PrefillAttentionArgs args;
  args.shape = {qo_heads, kv_heads, dim, 1.0f / std::sqrt(static_cast<float>(dim))};
  args.pool = streams.pool;
  args.q = q.data();
  args.q_row_stride = qo_heads * dim;
  args.out = out.data();
  args.sequences = std::span<const PrefillSequence>(&sequence, 1);
  const double best = bench::BestSeconds([&] { (void)cpu::PrefillAttention(bench::Context(), args); });
  for (auto _ : state) {
    if (absl::Status s = cpu::PrefillAttention(bench::Context(), args); !s.ok())
      state.SkipWithError(s.ToString().c_str());
  }
  const double rate = 4.0 * dim * qo_heads * seen / best;
  state.counters["GFLOPS"] = rate * 1e-9;
  state.counters["GEMM_GFLOPS"] = bench::GemmFlopsPerSecond() * 1e-9;
  state.counters["of_GEMM"] = rate / bench::GemmFlopsPerSecond();
}
BENCHMARK(PrefillAttention)
    ->ArgNames({"rows", "context", "qo_heads", "kv_heads", "head_dim", "window", "type"})
    ->Args({4096, 4096, 8, 4, 64, 0, 1})
    ->Args({512, 4096, 8, 4, 64, 0, 1})
    ->Args({512, 16384, 8, 4, 64, 0, 1})
    ->Args({4096, 4096, 8, 4, 64, 256, 1})
    ->Args({512, 4096, 32, 8, 128, 0, 1})
    ->Args({512, 4096, 32, 8, 128, 0, 2})
    ->Args({64, 4096, 8, 4, 64, 0, 1})
    ->Args({64, 4096, 8, 4, 64, 0, 2})
    ->UseRealTime()
    ->MinTime(0.1);

// A whole prompt over lines that leave about a tenth of the causal cells, the selection of lines (fixed counts: with
// random keys there are none worth choosing), and dense attention of the same run.
void LineAttention(benchmark::State& state) {
  const auto rows = static_cast<int32_t>(state.range(0)), qo_heads = static_cast<int32_t>(state.range(1));
  const auto kv_heads = static_cast<int32_t>(state.range(2)), dim = static_cast<int32_t>(state.range(3));
  const auto num_columns = static_cast<int32_t>(state.range(4)), num_slashes = static_cast<int32_t>(state.range(5));
  Streams streams(kv_heads, rows, dim, DType::kBF16);
  std::vector<int32_t> positions(static_cast<size_t>(rows)), columns, offsets;
  for (int32_t i = 0; i < rows; ++i) positions[static_cast<size_t>(i)] = i;
  for (int32_t i = 0; i < num_columns; ++i) columns.push_back(static_cast<int32_t>(int64_t{i} * rows / num_columns));
  for (int32_t i = 0; i < 64; ++i) offsets.push_back(i);
  for (int32_t i = 1; i <= num_slashes; ++i) offsets.push_back(64 + i * rows / (2 * num_slashes + 1));
  const AttentionShape shape{qo_heads, kv_heads, dim, 1.0f / std::sqrt(static_cast<float>(dim))};
  const std::vector<int32_t> samples = SampleRows(rows, 1);
  const LineOptions options{.top_columns = 500, .top_offsets = 200};
  const LineSizes sizes{.shape = shape, .num_samples = static_cast<int32_t>(samples.size()), .num_rows = rows};
  const auto memory = MakeCpuBackend()->Allocate(LinePlanBytes(sizes)).value();
  const LinePlan plan = PlaceLinePlan(memory->data(), sizes);
  const std::vector<float> q = bench::Normals(static_cast<size_t>(rows) * qo_heads * dim);
  std::vector<float> out(q.size());
  PrefillSequence sequence{0, rows, positions, streams.views};
  const SelectLinesArgs select{.shape = shape,
                               .pool = streams.pool,
                               .q = q.data(),
                               .q_row_stride = qo_heads * dim,
                               .rows = sequence,
                               .samples = samples,
                               .options = options,
                               .plan = plan};
  const double select_seconds = bench::BestSeconds([&] { (void)cpu::SelectLines(bench::Context(), select); });
  PrefillAttentionArgs args{.shape = shape,
                            .pool = streams.pool,
                            .q = q.data(),
                            .q_row_stride = qo_heads * dim,
                            .out = out.data(),
                            .sequences = std::span<const PrefillSequence>(&sequence, 1)};
  const double dense = bench::BestSeconds([&] { (void)cpu::PrefillAttention(bench::Context(), args); });
  std::vector<LineVisibility> lines;
  std::vector<HeadStreamView> views = streams.views;
  for (int32_t h = 0; h < kv_heads; ++h) {
    lines.push_back(plan.Visibility(h));
    std::copy(columns.begin(), columns.end(), const_cast<int32_t*>(lines.back().columns));
    LinesToTiles({.rows = {0, rows},
                  .columns = columns,
                  .offsets = offsets,
                  .tile_words = lines.back().tile_words,
                  .column_words = lines.back().column_words,
                  .tiles = const_cast<uint64_t*>(lines.back().tiles),
                  .column_masks = const_cast<uint64_t*>(lines.back().column_masks)});
  }
  for (int32_t h = 0; h < kv_heads; ++h) {
    views[static_cast<size_t>(h)].visibility = {.rule = VisibilityRule::kLines,
                                                .lines = &lines[static_cast<size_t>(h)]};
  }
  double cells = 0;
  for (int32_t t = 0; t < lines[0].num_row_tiles(); ++t) {
    for (int32_t w = 0; w < lines[0].tile_words; ++w)
      cells += 64.0 * 64 * std::popcount(lines[0].tiles[t * lines[0].tile_words + w]);
    for (int32_t w = 0; w < lines[0].column_words; ++w)
      cells += 64.0 * std::popcount(lines[0].column_masks[t * lines[0].column_words + w]);
  }
  sequence.heads = views;
  const double best = bench::BestSeconds([&] { (void)cpu::PrefillAttention(bench::Context(), args); });
  for (auto _ : state) {
    if (absl::Status s = cpu::PrefillAttention(bench::Context(), args); !s.ok())
      state.SkipWithError(s.ToString().c_str());
  }
  state.counters["cells"] = cells / (0.5 * rows * (rows + 1.0));
  state.counters["dense_ms"] = dense * 1e3;
  state.counters["select_ms"] = select_seconds * 1e3;
  state.counters["times_dense"] = dense / best;
  state.counters["times_dense_with_select"] = dense / (best + select_seconds);
  state.counters["of_dense_rate"] = dense / best * cells / (0.5 * rows * (rows + 1.0));
}
BENCHMARK(LineAttention)
    ->ArgNames({"rows", "qo_heads", "kv_heads", "head_dim", "columns", "slashes"})
    ->Args({8192, 8, 4, 64, 250, 1})
    ->Args({8192, 32, 8, 128, 250, 1})
    ->UseRealTime()
    ->MinTime(0.1);

// sequences, context, query heads, KV heads, head_dim, page type (0 f32, 1 bf16, 2 e4m3)
void DecodeAttention(benchmark::State& state) {
  const auto sequences = static_cast<int32_t>(state.range(0)), context = static_cast<int32_t>(state.range(1));
  const auto qo_heads = static_cast<int32_t>(state.range(2)), kv_heads = static_cast<int32_t>(state.range(3));
  const auto dim = static_cast<int32_t>(state.range(4));
  const DType dtype = PageType(state.range(5));
  const Streams streams(sequences * kv_heads, context, dim, dtype);
  const std::vector<float> q = bench::Normals(static_cast<size_t>(sequences) * qo_heads * dim);
  std::vector<float> out(q.size());
  DecodeAttentionArgs args;
  args.shape = {qo_heads, kv_heads, dim, 1.0f / std::sqrt(static_cast<float>(dim))};
  args.pool = streams.pool;
  args.q = q.data();
  args.q_row_stride = qo_heads * dim;
  args.out = out.data();
  args.streams = streams.views;
  const double best = bench::BestSeconds([&] { (void)cpu::DecodeAttention(bench::Context(), args); });
  for (auto _ : state) {
    if (absl::Status s = cpu::DecodeAttention(bench::Context(), args); !s.ok())
      state.SkipWithError(s.ToString().c_str());
  }
  const double bytes = 2.0 * sequences * kv_heads * context * dim * static_cast<double>(DTypeBytes(dtype));
  state.counters["GBps"] = bytes / best * 1e-9;
  state.counters["copy_GBps"] = bench::CopyBytesPerSecond() * 1e-9;
  state.counters["of_copy"] = bytes / best / bench::CopyBytesPerSecond();
}
BENCHMARK(DecodeAttention)
    ->ArgNames({"sequences", "context", "qo_heads", "kv_heads", "head_dim", "type"})
    ->Args({16, 8192, 8, 4, 64, 1})
    ->Args({1, 65536, 8, 4, 64, 1})
    ->Args({4, 8192, 32, 8, 128, 1})
    ->Args({4, 8192, 28, 4, 128, 1})
    ->Args({8, 8192, 8, 4, 64, 0})
    ->Args({1, 1024, 8, 4, 64, 1})
    ->Args({16, 8192, 8, 4, 64, 2})
    ->Args({1, 65536, 8, 4, 64, 2})
    ->Args({4, 8192, 32, 8, 128, 2})
    ->Args({4, 8192, 28, 4, 128, 2})
    ->Args({1, 1024, 8, 4, 64, 2})
    ->UseRealTime()
    ->MinTime(0.1);

}  // namespace
}  // namespace spl::kernels
