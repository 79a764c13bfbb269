// For how many rows cuBLASLt is asked to choose an algorithm.
#pragma once

#include <cstdint>

namespace spl::kernels::cuda {

// Rows to ask for where a product has num_rows: at least as many, and at most an eighth or 15 more. Up to 64 rows are
// asked for as they are. Neighbours share an answer, because asking takes a millisecond; the answer must be the one for
// the largest of them. A tile as wide as 200 rows takes two for 256: a decode step of 256 sequences took 16.4 ms
// instead of 11.7 where one of 200 had come first (llama-3.1-8b's shape, H100).
constexpr int64_t RowsOfChoice(int64_t num_rows) {
  constexpr int64_t kAsTheyAre = 64, kSmallestStep = 16, kStepsOfOctave = 16;
  if (num_rows <= kAsTheyAre) return num_rows;
  int64_t step = kSmallestStep;
  while (step * kStepsOfOctave < num_rows) step *= 2;
  return (num_rows + step - 1) / step * step;
}

}  // namespace spl::kernels::cuda
