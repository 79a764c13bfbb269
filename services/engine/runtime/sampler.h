// Chooses tokens from logits. Names and order of operations follow vLLM's SamplingParams.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace spl::engine {

struct SamplingParams {
  int64_t max_tokens = 0;    // output tokens at most, counting the first; 0: up to the model's context
  int64_t min_tokens = 0;    // no end or stop token before this many
  float temperature = 1.0f;  // 0: greedy, ties to the lower id
  int32_t top_k = 0;         // 0: all
  float top_p = 1.0f;
  float min_p = 0.0f;
  float repetition_penalty = 1.0f;  // over prompt and output
  float presence_penalty = 0.0f;    // over output
  float frequency_penalty = 0.0f;   // over output
  uint64_t seed = 0;
  std::vector<std::pair<int32_t, float>> logit_bias;
  std::vector<int32_t> stop_token_ids;
  bool ignore_eos = false;
  int32_t num_forks = 1;                // n
  std::optional<int32_t> num_logprobs;  // unset: none; 0: of the chosen token only

  bool needs_prompt() const { return repetition_penalty != 1.0f; }
};

// InvalidArgument names the field and its range.
absl::Status ValidateSampling(const SamplingParams& params, int32_t vocab_size);

enum class FinishReason : uint8_t { kNone, kStop, kLength };

struct TokenLogprob {
  float logprob = 0;
  std::vector<std::pair<int32_t, float>> top;  // most likely first
};

struct SampledToken {
  int32_t token = 0;
  FinishReason finish = FinishReason::kNone;  // set when this token ends the continuation
  std::optional<TokenLogprob> logprob;
};

// The state of one continuation. Random numbers are a pure function of (seed, fork, output index): a continuation
// resumed elsewhere draws the same numbers. One thread at a time.
class Sampler {
 public:
  // `prompt` is read only when params.needs_prompt(). `prior_output` are tokens generated before this sampler was made
  // (a resumed continuation). `max_context` bounds prompt + output.
  Sampler(const SamplingParams& params, std::vector<int32_t> eos_ids, int32_t fork, std::span<const int32_t> prompt,
          std::span<const int32_t> prior_output, int64_t num_prompt_tokens, int64_t max_context);

  // Draws the next token; `logits` [vocab] is overwritten. Ids outside of it (end tokens of the model, tokens taken)
  // have no logit, and nothing is done for them. Cost: O(vocab).
  SampledToken Sample(std::span<float> logits);

  // True when the next token is simply the most likely one of the model's own logits.
  bool takes_argmax() const;
  // Takes that token, ties to the lower id.
  SampledToken TakeArgmax(int32_t token);

  // Takes a token that was sampled elsewhere (the first token comes from the prefill worker).
  void Accept(int32_t token);

  int64_t num_output_tokens() const { return num_output_; }

 private:
  void ApplyPenalties(std::span<float> logits) const;
  int32_t Choose(std::span<float> logits);
  // Draws one of the candidates, in the order that they have; top_p keeps the first.
  int32_t Draw();
  // Draws what Draw does of the candidates in falling order, without sorting them: sums over ranges of weights, and
  // only the ranges in which a decision falls are sorted. Nothing: a decision is so close that the order of a sum could
  // turn it.
  std::optional<int32_t> DrawByRanges();
  double NextUniform() const;
  FinishReason FinishOf(int32_t token) const;
  bool IsEnd(int32_t token) const;

  SamplingParams params_;
  std::vector<int32_t> end_ids_;  // stop ids, and the model's own end tokens unless ignored
  uint64_t stream_;               // seed and fork, mixed
  int64_t num_output_ = 0;
  int64_t max_output_;
  std::unordered_map<int32_t, int32_t> output_counts_;
  std::vector<int32_t> prompt_tokens_;                 // distinct; only for the repetition penalty
  std::vector<std::pair<float, int32_t>> candidates_;  // scratch of Choose: weights above 0, and ids
  std::vector<double> range_sums_;                     // scratch of DrawByRanges
};

}  // namespace spl::engine
