// Fills a tensor in place on the device with reproducible pseudo-random numbers: weights for measuring models whose
// checkpoints are not at hand.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/common/dtype.h"
#include "kernels/common/kernel_context.h"

namespace spl::kernels {

// Element i of tensor number `stream` is the same on every device, for any number of threads and any order: the bits of
// SplitMix64(stream, i) are taken as four 16-bit uniforms u, and
//   value = 2^step_exponent · Σ_4 (floor(71 · u / 2^16) - 35).
// The sum is an integer in [-140, 140], about normal (Irwin-Hall) with mean 0 and standard deviation
// sqrt(4 · (71² - 1) / 12) = 41.0; the multiplication is exact in every dtype, so that all variants agree bitwise.
// The default step gives a standard deviation of 0.0200.
struct FillRandomArgs {
  void* out = nullptr;  // [count]
  DType dtype = DType::kBF16;
  int64_t count = 0;
  uint64_t stream = 0;
  int64_t first_index = 0;  // index of out[0] in its tensor; a tensor may be filled in parts
  int32_t step_exponent = -11;
  // For a part of a matrix's columns: out is [count / row_length, row_length], and its rows are row_stride elements
  // apart in the tensor. 0: out is one run of the tensor.
  int64_t row_length = 0;
  int64_t row_stride = 0;

  // Index of out[i] in its tensor.
  constexpr int64_t index(int64_t i) const {
    return first_index + (row_length == 0 ? i : i / row_length * row_stride + i % row_length);
  }
};

// The integer of element `index`: the definition, shared by host and device code.
constexpr int32_t RandomStep(uint64_t stream, uint64_t index) {
  // SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014), state jumped to `index`.
  uint64_t z = stream + (index + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  z ^= z >> 31;
  int32_t sum = -140;
  for (int shift = 0; shift < 64; shift += 16)
    sum += static_cast<int32_t>((static_cast<uint32_t>(z >> shift & 0xffffu) * 71u) >> 16);
  return sum;
}

// InvalidArgument: a null tensor, a negative count or index, rows that overlap, a step that f16 or bf16 cannot hold
// ([-16, 0]).
absl::Status ValidateFillRandom(const FillRandomArgs& args);

namespace ref {
absl::Status FillRandom(const KernelContext& ctx, const FillRandomArgs& args);
}
namespace cpu {
absl::Status FillRandom(const KernelContext& ctx, const FillRandomArgs& args);
}

}  // namespace spl::kernels
