// Layout of LinePlan::scratch: the data that the CUDA line selection keeps between its kernels.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/selection/loopserve/select_lines.h"

namespace spl::kernels {

inline constexpr int32_t kLineChunkKeys = 512;  // keys per partial log-sum-exp
inline constexpr int32_t kLinesPerSumBlock = 256;

struct LineChunkLse {
  float max = 0, sum = 0;  // base 2: the chunk contributes sum · 2^max
};

struct alignas(16) LineEntry {
  float weight = 0, largest = 0;
  int32_t cells = 0;  // number of its cells in the computed rows
  int32_t line = 0;
};

struct LineScratch {
  LineChunkLse* chunk_lse = nullptr;  // [num_kv_heads, chunks, samples · group]
  float* lse = nullptr;               // [num_kv_heads, samples · group], in log2
  float* line = nullptr;              // [num_kv_heads, 2, num_keys]: remaining w_v, then remaining w_s
  float* line_max = nullptr;          // same shape: the largest cell
  float* block_sums = nullptr;        // [num_kv_heads, sum_blocks]: sums of w_v
  float* block_totals = nullptr;      // same shape, before any line was taken
  LineEntry* sorted = nullptr;        // [num_kv_heads, 2, kMaxLines]: the heaviest lines, descending
  int32_t* num_sorted = nullptr;      // [num_kv_heads, 2]; -1 - n: n entries, and there are more lines
  uint32_t* chosen = nullptr;         // [num_kv_heads, 2, chosen_words]: bits of columns, then of offsets
  int32_t* done = nullptr;            // [num_kv_heads]: LineDone
  int32_t chunks = 0, sum_blocks = 0, chosen_words = 0;
  size_t bytes = 0;
};

inline LineScratch PlaceLineScratch(std::byte* memory, const LineSizes& sizes) {
  LineScratch s;
  const auto heads = static_cast<size_t>(sizes.shape.num_kv_heads), keys = static_cast<size_t>(sizes.num_keys());
  const size_t pairs = static_cast<size_t>(sizes.num_samples) * sizes.shape.num_qo_heads / heads;
  s.chunks = (sizes.num_keys() + kLineChunkKeys - 1) / kLineChunkKeys;
  s.sum_blocks = (sizes.num_keys() + kLinesPerSumBlock - 1) / kLinesPerSumBlock;
  s.chosen_words = (sizes.num_keys() + 63) / 64 * 2;
  const auto take = [&]<typename T>(T*& to, size_t count) {
    to = memory == nullptr ? nullptr : reinterpret_cast<T*>(memory + s.bytes);
    s.bytes += (count * sizeof(T) + 255) / 256 * 256;
  };
  take(s.chunk_lse, heads * s.chunks * pairs);
  take(s.lse, heads * pairs);
  take(s.line, heads * 2 * keys);
  take(s.line_max, heads * 2 * keys);
  take(s.block_sums, heads * s.sum_blocks);
  take(s.block_totals, heads * s.sum_blocks);
  take(s.sorted, heads * 2 * kMaxLines);
  take(s.num_sorted, heads * 2);
  take(s.chosen, heads * 2 * s.chosen_words);
  take(s.done, heads);
  return s;
}

}  // namespace spl::kernels
