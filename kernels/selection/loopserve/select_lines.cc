#include "kernels/selection/loopserve/select_lines.h"

#include <algorithm>
#include <numeric>
#include <random>

#include "kernels/common/kv_rows.h"
#include "kernels/common/parallel.h"
#include "kernels/common/status.h"
#include "kernels/selection/loopserve/line_scratch.h"
#include "kernels/selection/loopserve/line_tiles.h"

namespace spl::kernels {
namespace {

constexpr size_t kAlign = 256;

size_t Place(std::byte* memory, const LineSizes& sizes, LinePlan& plan) {
  size_t bytes = 0;
  const auto take = [&]<typename T>(T*& to, size_t count) {
    to = memory == nullptr ? nullptr : reinterpret_cast<T*>(memory + bytes);
    bytes += (count * sizeof(T) + kAlign - 1) / kAlign * kAlign;
  };
  const auto heads = static_cast<size_t>(sizes.shape.num_kv_heads);
  const size_t tiles = heads * static_cast<size_t>(sizes.num_row_tiles());
  const auto column_words = static_cast<size_t>(sizes.column_words());
  take(plan.results, heads);
  take(plan.columns, heads * 64 * column_words);
  take(plan.offsets, heads * static_cast<size_t>(sizes.max_offsets));
  take(plan.tiles, tiles * static_cast<size_t>(sizes.tile_words()));
  take(plan.column_masks, tiles * column_words);
  take(plan.column_pages, heads * 64 * column_words * 2 * sizes.shape.head_dim * DTypeBytes(sizes.page_dtype));
  take(plan.weights, heads * static_cast<size_t>(sizes.num_samples) * static_cast<size_t>(sizes.weight_stride()));
  take(plan.scratch, PlaceLineScratch(nullptr, sizes).bytes);
  return bytes;
}

LineWeightsArgs WeightsArgs(const SelectLinesArgs& a) {
  return {.shape = a.shape,
          .pool = a.pool,
          .q = a.q,
          .q_row_stride = a.q_row_stride,
          .rows = a.rows,
          .samples = a.samples,
          .kv_heads = a.kv_heads,
          .weights = a.plan.weights,
          .stride = a.plan.sizes.weight_stride()};
}

LineRows Rows(const LineSizes& sizes) { return {sizes.first_position, sizes.num_rows}; }

void SelectHead(const SelectLinesArgs& a, std::span<const int32_t> positions, int32_t head) {
  const LinePlan& plan = a.plan;
  const LineSizes& sizes = plan.sizes;
  const int64_t stride = sizes.weight_stride();
  const LineChoice choice = SelectLines(a.options, Rows(sizes),
                                        {positions, plan.weights + int64_t{head} * sizes.num_samples * stride, stride});
  plan.results[head] = {static_cast<float>(choice.total),
                        static_cast<float>(choice.uncovered),
                        static_cast<int32_t>(choice.columns.size()),
                        static_cast<int32_t>(choice.offsets.size()),
                        choice.rounds,
                        choice.dense};
  int32_t* columns = plan.columns + int64_t{head} * 64 * sizes.column_words();
  std::fill_n(columns, 64 * sizes.column_words(), 0);
  std::copy(choice.columns.begin(), choice.columns.end(), columns);
  std::copy(choice.offsets.begin(), choice.offsets.end(), plan.offsets + int64_t{head} * sizes.max_offsets);
  const LineVisibility lines = plan.Visibility(head);
  LinesToTiles({.rows = Rows(sizes),
                .columns = choice.columns,
                .offsets = choice.offsets,
                .dense = choice.dense,
                .tile_words = lines.tile_words,
                .column_words = lines.column_words,
                .tiles = const_cast<uint64_t*>(lines.tiles),
                .column_masks = const_cast<uint64_t*>(lines.column_masks)});
}

absl::Status Select(const KernelContext& ctx, const SelectLinesArgs& a,
                    absl::Status (*weights)(const KernelContext&, const LineWeightsArgs&)) {
  if (absl::Status s = ValidateSelectLines(a); !s.ok()) return s;
  if (absl::Status s = weights(ctx, WeightsArgs(a)); !s.ok()) return s;
  std::vector<int32_t> heads(a.kv_heads.begin(), a.kv_heads.end()), positions;
  if (heads.empty()) {
    heads.resize(static_cast<size_t>(a.shape.num_kv_heads));
    std::iota(heads.begin(), heads.end(), 0);
  }
  for (const int32_t sample : a.samples) positions.push_back(a.rows.positions[static_cast<size_t>(sample)]);
  ParallelTasks(ctx, static_cast<int64_t>(heads.size()),
                [&](int64_t i) { SelectHead(a, positions, heads[static_cast<size_t>(i)]); });
  return absl::OkStatus();
}

}  // namespace

LineVisibility LinePlan::Visibility(int32_t h) const {
  const int64_t tile = int64_t{h} * sizes.num_row_tiles();
  const int64_t page_bytes =
      int64_t{2} * 64 * sizes.shape.head_dim * static_cast<int64_t>(DTypeBytes(sizes.page_dtype));
  return {.first_position = sizes.first_position,
          .num_rows = sizes.num_rows,
          .tile_words = sizes.tile_words(),
          .column_words = sizes.column_words(),
          .tiles = tiles + tile * sizes.tile_words(),
          .column_masks = column_masks + tile * sizes.column_words(),
          .columns = columns + int64_t{h} * 64 * sizes.column_words(),
          .column_pages = column_pages + int64_t{h} * sizes.column_words() * page_bytes};
}

size_t LinePlanBytes(const LineSizes& sizes) {
  LinePlan plan;
  return Place(nullptr, sizes, plan);
}

LinePlan PlaceLinePlan(void* memory, const LineSizes& sizes) {
  LinePlan plan{.sizes = sizes};
  Place(static_cast<std::byte*>(memory), sizes, plan);
  return plan;
}

absl::Status ValidateSelectLines(const SelectLinesArgs& a) {
  if (absl::Status s = ValidateLineOptions(a.options); !s.ok()) return s;
  if (absl::Status s = ValidateLineWeights(WeightsArgs(a)); !s.ok()) return s;
  const int32_t first = a.rows.positions.front(), num_rows = a.rows.row_end - a.rows.row_begin;
  for (int32_t i = 0; i < num_rows; ++i) {
    if (a.rows.positions[static_cast<size_t>(i)] != first + i)
      return InvalidCall("SelectLines: rows: position ", a.rows.positions[static_cast<size_t>(i)], " at row ", i,
                         " of rows that start at ", first, ": lines are of consecutive rows");
  }
  const LineSizes& sizes = a.plan.sizes;
  if (sizes.first_position != first || sizes.num_rows != num_rows ||
      sizes.num_samples != static_cast<int32_t>(a.samples.size()) || sizes.max_columns != a.options.max_columns ||
      sizes.max_offsets != a.options.max_offsets || sizes.shape.num_kv_heads != a.shape.num_kv_heads ||
      sizes.shape.num_qo_heads != a.shape.num_qo_heads || sizes.shape.head_dim != a.shape.head_dim ||
      sizes.page_dtype != DerivedKeyType(a.pool.dtype))
    return InvalidCall("SelectLines: plan placed for ", sizes.num_rows, " rows from ", sizes.first_position, ", ",
                       sizes.num_samples, " samples, ", sizes.max_columns, " columns, ", sizes.max_offsets,
                       " offsets; the call has ", num_rows, " from ", first, ", ", a.samples.size(), ", ",
                       a.options.max_columns, ", ", a.options.max_offsets);
  return absl::OkStatus();
}

namespace ref {
absl::Status SelectLines(const KernelContext& ctx, const SelectLinesArgs& a) { return Select(ctx, a, LineWeights); }
}  // namespace ref
namespace cpu {
absl::Status SelectLines(const KernelContext& ctx, const SelectLinesArgs& a) { return Select(ctx, a, LineWeights); }
}  // namespace cpu

std::vector<int32_t> SampleRows(int32_t num_rows, uint64_t seed, int32_t num_samples) {
  std::vector<int32_t> rows;
  if (num_rows <= num_samples) {
    rows.resize(static_cast<size_t>(std::max(num_rows, 0)));
    std::iota(rows.begin(), rows.end(), 0);
    return rows;
  }
  const int32_t last = num_samples / 4, strata = num_samples - last;
  const int64_t others = num_rows - last;
  std::mt19937_64 engine(seed);
  for (int64_t i = 0; i < strata; ++i) {
    const int64_t begin = others * i / strata, end = others * (i + 1) / strata;
    rows.push_back(static_cast<int32_t>(begin + static_cast<int64_t>(engine() % static_cast<uint64_t>(end - begin))));
  }
  for (int32_t i = num_rows - last; i < num_rows; ++i) rows.push_back(i);
  return rows;
}

}  // namespace spl::kernels
