// Chooses tokens from logits, and ends continuations. Names and the order of operations follow vLLM's SamplingParams.
// kernels/sampling/sample_tokens.h defines the choice for every device.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kernels/sampling/sample_tokens.h"
#include "services/grammar/token_grammar.h"

namespace spl::engine {

struct SamplingParams {
  int64_t max_tokens = 0;    // most output tokens, including the first; 0: up to the model's context
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
  std::optional<int32_t> num_logprobs;  // unset: none; 0: only of the chosen token
  // Output is what it allows, up to an end token. The output ends before min_tokens where nothing else is allowed.
  // Null: anything.
  std::shared_ptr<const grammar::TokenGrammar> grammar;

  bool needs_prompt() const { return repetition_penalty != 1.0f; }
};

// InvalidArgument names the field and its range.
absl::Status ValidateSampling(const SamplingParams& params, int32_t vocab_size);

enum class FinishReason : uint8_t {
  kNone,
  kStop,
  kLength,
  kError,  // the grammar could not be followed: it takes too long, or a token came that does not fit. Not in the
           // answer.
};

struct TokenLogprob {
  float logprob = 0;
  std::vector<std::pair<int32_t, float>> top;  // most likely first
};

struct SampledToken {
  int32_t token = 0;
  FinishReason finish = FinishReason::kNone;  // set if this token ends the continuation
  std::optional<TokenLogprob> logprob;
};

// State of one continuation: its sampling parameters, its penalties and its length. Random numbers are a pure function
// of (seed, fork, output index): a continuation that resumes elsewhere draws the same numbers. One thread at a time.
class Sampler {
 public:
  // `prompt` is read only if params.needs_prompt(). `prior_output`: tokens generated before this sampler was made (a
  // resumed continuation). `max_context` limits prompt + output.
  Sampler(const SamplingParams& params, std::vector<int32_t> eos_ids, int32_t fork, std::span<const int32_t> prompt,
          std::span<const int32_t> prior_output, int64_t num_prompt_tokens, int64_t max_context);
  Sampler(Sampler&&) = default;  // a copy would share the name of its edits

  // Whether Row has to fill a mask first: with a grammar, once for each token. Takes from some us to some ms, so that
  // it is better done while the pass runs.
  bool needs_mask() const { return matcher_ != nullptr && mask_.empty() && fit_.ok() && !matcher_->ended(); }
  void FillMask();
  // Describes how the next token is sampled from row `logits_row`. Borrows from the sampler until its next change.
  kernels::SampleRow Row(int32_t logits_row);
  // Takes the result of kernels::SampleTokens for Row(). `top`: the row's alternatives.
  SampledToken Take(const kernels::SampledRow& row, std::span<const kernels::TopToken> top);

  // Whether the continuation ends within the next `ahead` tokens, whatever they are.
  bool EndsWithin(int64_t ahead) const { return num_output_ + ahead >= max_output_; }
  // Tokens that it may still get.
  int64_t num_left() const { return max_output_ - num_output_; }

  // Whether the next token is simply the most likely one of the model's own logits.
  bool takes_argmax() { return Row(0).is_argmax(); }
  // Takes that token; ties go to the lower id.
  SampledToken TakeArgmax(int32_t token);

  // Takes a token that was sampled elsewhere (the prefill worker samples the first token).
  void Accept(int32_t token);

  int64_t num_output_tokens() const { return num_output_; }

 private:
  FinishReason FinishOf(int32_t token) const;
  bool IsEnd(int32_t token) const;
  bool OnlyEndsFit() const;
  bool penalizes() const {
    return params_.repetition_penalty != 1.0f || params_.presence_penalty != 0 || params_.frequency_penalty != 0;
  }
  kernels::TokenEdit& EditOf(int32_t token);

  SamplingParams params_;
  int32_t fork_;
  std::vector<int32_t> end_ids_;  // stop ids, and the model's end tokens unless ignored
  int64_t num_output_ = 0;
  int64_t max_output_;
  std::vector<kernels::TokenEdit> edits_;          // for tokens whose logits change: penalties, biases, minimum length
  std::unordered_map<int32_t, int32_t> edit_idx_;  // by token
  uint64_t edits_id_;
  uint64_t edits_version_ = 0;
  int32_t last_edit_ = 0;
  std::unique_ptr<grammar::TokenMatcher> matcher_;  // null: no grammar
  std::vector<uint32_t> mask_;                      // for the next token; empty: to be filled
  absl::Status fit_;                                // not ok: the grammar cannot be followed any further
};

// One sampler for each of the params.num_forks continuations of a prompt.
std::vector<Sampler> ForkSamplers(const SamplingParams& params, const std::vector<int32_t>& eos_ids,
                                  std::span<const int32_t> prompt, std::span<const int32_t> prior_output,
                                  int64_t max_context);

}  // namespace spl::engine
