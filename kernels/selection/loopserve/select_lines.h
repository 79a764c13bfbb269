// From sampled rows to the visibility that PrefillAttention uses, for every KV head of a layer, without the host: the
// weights of the sample (line_sums.h), the lines (line_select.h), their tiles and columns (line_tiles.h). Call it
// between RopeWriteKv and PrefillAttention of the layer, and pass Visibility(h) of the plan to the attention call.
//
// Tri-shape (docs/methods/baselines.md) needs no lines: PrefillAttention with kBand for all rows, then with kFull and
// last_rows = 100, which writes those rows again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "kernels/selection/loopserve/line_select.h"

namespace spl::kernels {

struct LineSizes {
  AttentionShape shape;
  DType page_dtype = DType::kBF16;  // column pages: DerivedKeyType of the pool
  int32_t num_samples = 0;
  int32_t first_position = 0;  // position of the first computed row
  int32_t num_rows = 0;
  int32_t max_columns = kMaxLines;  // as in LineOptions
  int32_t max_offsets = kMaxLines;

  constexpr int32_t num_keys() const { return first_position + num_rows; }
  constexpr int32_t num_row_tiles() const { return (num_rows + 63) / 64; }
  constexpr int32_t tile_words() const { return (num_keys() + 64 * 64 - 1) / (64 * 64); }
  constexpr int32_t column_words() const { return (max_columns + 63) / 64; }
  constexpr int64_t weight_stride() const { return (int64_t{num_keys()} + 63) / 64 * 64; }
};

// The outcome for a KV head, as the device keeps it.
struct LineResult {
  float total = 0;      // Σ A of the sample
  float uncovered = 0;  // see LineChoice
  int32_t num_columns = 0;
  int32_t num_offsets = 0;
  int32_t rounds = 0;
  int32_t dense = 0;
};

// Views into one piece of device memory that the caller owns: 256-byte aligned, LinePlanBytes(sizes) long. It may serve
// all layers, one after the other on one session; each call overwrites the last. Needs no initialisation.
struct LinePlan {
  LineSizes sizes;
  LineResult* results = nullptr;      // [num_kv_heads]
  int32_t* columns = nullptr;         // [num_kv_heads, 64 column_words], ascending, then zeros
  int32_t* offsets = nullptr;         // [num_kv_heads, max_offsets], ascending; the rest of a row is undefined
  uint64_t* tiles = nullptr;          // [num_kv_heads, num_row_tiles, tile_words]
  uint64_t* column_masks = nullptr;   // [num_kv_heads, num_row_tiles, column_words]
  std::byte* column_pages = nullptr;  // [num_kv_heads, column_words] pages; CUDA only
  float* weights = nullptr;           // [num_kv_heads, num_samples, weight_stride]; consumed by the selection
  std::byte* scratch = nullptr;       // CUDA only

  LineVisibility Visibility(int32_t kv_head) const;
};
size_t LinePlanBytes(const LineSizes& sizes);
LinePlan PlaceLinePlan(void* memory, const LineSizes& sizes);

struct SelectLinesArgs {
  AttentionShape shape;
  KvPoolView pool;
  ConstActivations q;        // as PrefillAttention's
  int64_t q_row_stride = 0;  // elements
  // All rows of one sequence, at consecutive positions; rule kFull. CUDA takes positions and page tables from the
  // staged batch, where `sequence` is the number.
  PrefillSequence rows;
  int32_t sequence = 0;
  int32_t layer = 0;
  std::span<const int32_t> samples;   // relative to rows.row_begin; ascending; 1..kMaxLineSamples
  std::span<const int32_t> kv_heads;  // ascending; the plan of other heads is not written; empty: all
  LineOptions options;
  LinePlan plan;
};

// InvalidArgument: what ValidateLineWeights and ValidateLineOptions refuse; rows that are not consecutive; a plan that
// was placed for other sizes.
absl::Status ValidateSelectLines(const SelectLinesArgs& args);

// Threads  one call at a time on a plan. CUDA: asynchronous on the session's stream; allocates nothing after the first
//          call.
// Cost     about 4 · samples · keys · head_dim FLOPs per query head and, per round, twice the weights' bytes
//          (4 · samples · keys per KV head), whatever the number of rows: worth it for many rows at once, not for
//          slices of 512. On an H200 (32 query heads over 8, rows from position 0) it breaks even at 8192 rows. On CUDA
//          the weights take a slow path for group sizes other than 1, 2, 4, 8, and for pages or queries that are not
//          bf16 with heads of 64 or 128.
namespace ref {
absl::Status SelectLines(const KernelContext& ctx, const SelectLinesArgs& args);
}
namespace cpu {
absl::Status SelectLines(const KernelContext& ctx, const SelectLinesArgs& args);
}

// Chooses the rows to sample out of num_rows computed ones (docs/methods/loopserve.md, which has 64 samples). The last
// quarter of the samples are the last rows. The others are one random row from each of as many equal parts of the rest,
// drawn from `seed`. Returns all rows if there are no more than num_samples. Ascending.
std::vector<int32_t> SampleRows(int32_t num_rows, uint64_t seed, int32_t num_samples = 64);

}  // namespace spl::kernels
