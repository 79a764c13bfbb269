// Samples tokens from rows of logits: greedy or drawn, with penalties, biases, bans and masks, and with
// log-probabilities. There is one definition, in integers from the weights on. Every variant therefore gives the same
// tokens bit for bit, in whatever order it adds, and a row's token does not depend on the rows beside it
// (docs/decisions/0007-sampling-in-integers.md).
//
// Definition for a row x of logits, in f32 with every operation rounded once (sampling_math.h):
//   1. y_i = x_i, changed where token i has an edit, in this order: the bias is added; an end token becomes -inf while
//      end tokens are banned; in the prompt or generated, it is divided (y > 0) or multiplied by repetition_penalty;
//      generated, presence_penalty + frequency_penalty · count is subtracted. A token whose bit in the mask is 0
//      becomes -inf.
//   2. M = max y. Greedy, or M not finite: the lowest i with y_i = M; NaN is never taken, a row of NaN alone gives 0.
//   3. w_i = floor(2^((y_i - M)·s) · 2^40), s = log2(e) / temperature: M weighs 2^40, and less than 2^-40 of that
//      weighs nothing. A sum over 2^20 tokens is below 2^61.
//   4. A token with w_i > 0 is kept if all of these keep it:
//        min_p: w_i >= ceil(min_p · 2^40);
//        top_k: y_i is at least the top_k-th largest y of all;
//        top_p: y_i is at least the largest y* for which the weights of those that min_p and top_k keep with y >= y*
//               add up to ceil(top_p · total), total the weight of all that they keep.
//      Tokens of one y are kept or left out together: a tie may make top_k keep more than k.
//   5. With r = floor(random · total / 2^64), total the weight of the kept ones, the token is the first, by id, with
//      which the sum of their weights exceeds r.
// Log-probabilities are those of x itself, before edits. The kernel returns their integers; LogprobOf takes the
// logarithm on the host.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "kernels/common/kernel_context.h"

namespace spl::kernels {

inline constexpr int kWeightBits = 40;
inline constexpr int32_t kMaxTopTokens = 100;           // log-probabilities of alternatives
inline constexpr int64_t kMaxSampledWidth = 1ll << 20;  // logits of a row

// How one token of a sequence is edited.
struct TokenEdit {
  static constexpr uint32_t kInPrompt = 1, kEnd = 2;
  int32_t token = 0;
  float bias = 0;
  int32_t count = 0;  // times it was generated
  uint32_t flags = 0;
};

// One token to be sampled. Borrowed for the call.
struct SampleRow {
  int32_t logits_row = 0;  // several rows may draw from one
  float temperature = 0;   // 0: greedy
  int32_t top_k = 0;       // 0: all
  float top_p = 1;         // (0, 1]
  float min_p = 0;         // [0, 1]
  float repetition_penalty = 1;
  float presence_penalty = 0;
  float frequency_penalty = 0;
  bool bans_ends = false;
  int32_t num_top = -1;  // log-probabilities: n > 0: of the token and n alternatives; 0: of the token; -1: none
  uint64_t random = 0;   // SamplingRandom (philox.h)
  // Each token at most once. Ids outside of the row are ignored. A device keeps lists by `edits_id` and sends what
  // changed: version v differs from v - 1 at most in entry `last_edit`, which may be new. edits_id 0: the list is not
  // kept.
  std::span<const TokenEdit> edits;
  uint64_t edits_id = 0;
  uint64_t edits_version = 0;
  int32_t last_edit = 0;
  std::span<const uint32_t> mask;  // [ceil(width / 32)], bit i % 32 of word i / 32: token i may be taken; empty: all

  bool has_edits() const { return !edits.empty(); }
  // True if Argmax (argmax.h) gives the same.
  bool is_argmax() const { return temperature == 0 && num_top < 0 && edits.empty() && mask.empty(); }
};

struct SampledRow {
  int32_t token = 0;
  float logit = 0;      // the token's, before edits
  float max_logit = 0;  // max, and (total) sum of weights at temperature 1, before edits; 0 without log-probabilities
  uint64_t total = 0;
};

struct TopToken {
  int32_t token = -1;  // -1: the row has no further logit that is a number
  float logit = 0;
};

// Log-probability of a logit of the row that gave max_logit and total.
inline float LogprobOf(float logit, const SampledRow& row) {
  return static_cast<float>(static_cast<double>(logit) - static_cast<double>(row.max_logit) -
                            std::log(std::ldexp(static_cast<double>(row.total), -kWeightBits)));
}

// Tensors are in the memory of the backend; rows, edits and masks are in host memory. Cost: logits are read from memory
// once. On a GPU one cluster of blocks takes some 10 to 20 us for a row of 128K logits. In steady state about 100 bytes
// a row travel to the device, and every mask.
struct SampleTokensArgs {
  const float* logits = nullptr;  // [num_logit_rows, width]; not changed
  int64_t num_logit_rows = 0;
  int64_t width = 0;
  std::span<const SampleRow> rows;
  int32_t* tokens = nullptr;  // [rows], memory of the backend, where the next step may read them; or null
  SampledRow* out = nullptr;  // [rows]
  TopToken* top = nullptr;    // [rows, top_stride]: first num_top of each row, most likely first, ties to the lower id
  int32_t top_stride = 0;     // at least every num_top
};

// InvalidArgument names the row and the field.
absl::Status ValidateSampleTokens(const SampleTokensArgs& args);

namespace ref {
absl::Status SampleTokens(const KernelContext& ctx, const SampleTokensArgs& args);
}
namespace cpu {
// The threads of the context share the rows.
absl::Status SampleTokens(const KernelContext& ctx, const SampleTokensArgs& args);
}  // namespace cpu

}  // namespace spl::kernels
