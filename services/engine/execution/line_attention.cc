#include "services/engine/execution/line_attention.h"

#include <algorithm>
#include <bit>

#include "kernels/common/kv_rows.h"
#include "services/base/status.h"
#include "services/engine/cache/grow_buffer.h"

namespace spl::engine {

void LineReport::Add(const LineReport& other) {
  heads += other.heads;
  dense_heads += other.dense_heads;
  sampled += other.sampled;
  covered += other.covered;
  cells += other.cells;
  causal_cells += other.causal_cells;
  held_out_mass += other.held_out_mass;
  held_out_heads += other.held_out_heads;
  held_out_lowest = std::min(held_out_lowest, other.held_out_lowest);
}

absl::StatusOr<std::span<const int32_t>> LineAttention::Select(const Call& call) {
  heads_.clear();
  for (const int32_t head : call.task->kv_heads) {
    const int32_t own = head - call.first_kv_head;
    if (own >= 0 && own < call.shape.num_kv_heads) heads_.push_back(own);
  }
  if (heads_.empty()) return std::span<const int32_t>();
  const kernels::LineOptions& options = call.task->options;
  const kernels::LineSizes sizes{.shape = call.shape,
                                 .page_dtype = kernels::DerivedKeyType(call.pool.dtype),
                                 .num_samples = static_cast<int32_t>(call.task->samples.size()),
                                 .first_position = call.rows.positions.front(),
                                 .num_rows = call.rows.row_end - call.rows.row_begin,
                                 .max_columns = options.max_columns,
                                 .max_offsets = options.max_offsets};
  SPLICE_RETURN_IF_ERROR(GrowBuffer(backend_, session_, memory_, kernels::LinePlanBytes(sizes)));
  plan_ = kernels::PlaceLinePlan(memory_->data(), sizes);
  SPLICE_RETURN_IF_ERROR(backend_.SelectLines(session_.context(), {.shape = call.shape,
                                                                   .pool = call.pool,
                                                                   .q = call.q,
                                                                   .q_row_stride = call.q_row_stride,
                                                                   .rows = call.rows,
                                                                   .sequence = 0,
                                                                   .layer = call.layer,
                                                                   .samples = call.task->samples,
                                                                   .kv_heads = heads_,
                                                                   .options = options,
                                                                   .plan = plan_}));
  visibilities_.clear();
  for (int32_t head = 0; head < call.shape.num_kv_heads; ++head) visibilities_.push_back(plan_.Visibility(head));
  return std::span<const int32_t>(heads_);
}

absl::Status LineAttention::Report(bool cells, const LineFidelity& fidelity, LineReport& report) {
  const auto num_kv_heads = static_cast<size_t>(plan_.sizes.shape.num_kv_heads);
  SPLICE_ASSIGN_OR_RETURN(const void* host,
                          session_.ReadBack(plan_.results, sizeof(kernels::LineResult) * num_kv_heads));
  const auto* results = static_cast<const kernels::LineResult*>(host);
  for (const int32_t head : heads_) {
    const kernels::LineResult& result = results[head];
    ++report.heads;
    report.dense_heads += result.dense != 0;
    report.sampled += result.total;
    report.covered += result.dense != 0 ? result.total : std::max(0.0f, result.total - result.uncovered);
    if (fidelity.empty()) continue;
    const double mass = fidelity[head];
    report.held_out_mass += mass;
    report.held_out_lowest = std::min(report.held_out_lowest, mass);
    ++report.held_out_heads;
  }
  return cells ? CountCells(report) : absl::OkStatus();
}

// Tiles and masks lie behind one another in the plan: one copy to the host.
absl::Status LineAttention::CountCells(LineReport& report) {
  const kernels::LineSizes& sizes = plan_.sizes;
  const auto* begin = reinterpret_cast<const std::byte*>(plan_.tiles);
  const auto* masks = reinterpret_cast<const std::byte*>(plan_.column_masks);
  const int64_t mask_words = int64_t{sizes.num_row_tiles()} * sizes.column_words();
  const auto bytes = static_cast<size_t>(masks - begin) +
                     static_cast<size_t>(mask_words * sizes.shape.num_kv_heads) * sizeof(uint64_t);
  SPLICE_ASSIGN_OR_RETURN(const void* host, session_.ReadBack(begin, bytes));
  const auto* tiles = static_cast<const uint64_t*>(host);
  const auto* column_masks = reinterpret_cast<const uint64_t*>(static_cast<const std::byte*>(host) + (masks - begin));
  const double first = sizes.first_position, rows = sizes.num_rows;
  for (const int32_t head : heads_) {
    const kernels::LineVisibility& lines = visibilities_[head];
    report.cells += CountLineCells(lines, tiles + int64_t{head} * lines.num_row_tiles() * lines.tile_words,
                                   column_masks + head * mask_words);
    report.causal_cells += rows * first + rows * (rows + 1) / 2;
  }
  return absl::OkStatus();
}

double CountLineCells(const kernels::LineVisibility& lines, const uint64_t* tiles, const uint64_t* column_masks) {
  constexpr int32_t kTile = kernels::kPageTokens;
  double cells = 0;
  for (int32_t t = 0; t < lines.num_row_tiles(); ++t) {
    const int32_t first = lines.first_position + t * kTile, rows = std::min(kTile, lines.num_rows - t * kTile);
    // Row tiles begin where the span does, which need not be at a key tile's edge: the last two key tiles have cells
    // that a row does not see.
    const int32_t whole = (first + 1) / kTile;
    const uint64_t* words = tiles + int64_t{t} * lines.tile_words;
    for (int32_t word = 0; word < lines.tile_words; ++word) {
      const int32_t in_front = std::clamp(whole - 64 * word, 0, 64);
      const uint64_t below = in_front == 64 ? ~uint64_t{0} : (uint64_t{1} << in_front) - 1;
      cells += double(std::popcount(words[word] & below)) * kTile * rows;
    }
    for (int32_t tile = whole; tile <= (first + rows - 1) / kTile; ++tile) {
      if ((words[tile / 64] >> (tile % 64) & 1) == 0) continue;
      for (int32_t row = 0; row < rows; ++row) cells += std::clamp(first + row + 1 - tile * kTile, 0, kTile);
    }
    for (int32_t word = 0; word < lines.column_words; ++word) {
      const uint64_t columns = column_masks[int64_t{t} * lines.column_words + word];
      if (columns != 0) cells += double(std::popcount(columns)) * rows;  // most words are: there is room for many
    }
  }
  return cells;
}

}  // namespace spl::engine
