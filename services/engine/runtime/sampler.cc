#include "services/engine/runtime/sampler.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>

#include "kernels/sampling/philox.h"
#include "services/base/status.h"

namespace spl::engine {
namespace {

// Names lists of edits for as long as the program runs; 0 is nobody's.
uint64_t NextEditsId() {
  static std::atomic<uint64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

absl::Status ValidateSampling(const SamplingParams& p, int32_t vocab_size) {
  const auto in = [](float x, float low, float high) { return std::isfinite(x) && x >= low && x <= high; };
  if (p.max_tokens < 0) return InvalidArgument("max_tokens is {}, must be at least 1", p.max_tokens);
  if (p.min_tokens < 0 || (p.max_tokens > 0 && p.min_tokens > p.max_tokens))
    return InvalidArgument("min_tokens is {}, must be between 0 and max_tokens ({})", p.min_tokens, p.max_tokens);
  if (!in(p.temperature, 0, 100)) return InvalidArgument("temperature is {}, must be in [0, 100]", p.temperature);
  if (p.top_k < 0) return InvalidArgument("top_k is {}, must be at least 0 (0 keeps all)", p.top_k);
  if (!in(p.top_p, 0, 1) || p.top_p == 0) return InvalidArgument("top_p is {}, must be in (0, 1]", p.top_p);
  if (!in(p.min_p, 0, 1)) return InvalidArgument("min_p is {}, must be in [0, 1]", p.min_p);
  if (!in(p.repetition_penalty, 0, 100) || p.repetition_penalty == 0)
    return InvalidArgument("repetition_penalty is {}, must be in (0, 100]", p.repetition_penalty);
  if (!in(p.presence_penalty, -2, 2))
    return InvalidArgument("presence_penalty is {}, must be in [-2, 2]", p.presence_penalty);
  if (!in(p.frequency_penalty, -2, 2))
    return InvalidArgument("frequency_penalty is {}, must be in [-2, 2]", p.frequency_penalty);
  if (p.num_forks < 1 || p.num_forks > 128) return InvalidArgument("n is {}, must be in [1, 128]", p.num_forks);
  if (p.num_logprobs && (*p.num_logprobs < 0 || *p.num_logprobs > 100))
    return InvalidArgument("logprobs is {}, must be in [0, 100]", *p.num_logprobs);
  for (const auto& [token, bias] : p.logit_bias) {
    if (token < 0 || token >= vocab_size)
      return InvalidArgument("logit_bias: token {} is outside the vocabulary of {}", token, vocab_size);
    if (!in(bias, -100, 100))
      return InvalidArgument("logit_bias of token {} is {}, must be in [-100, 100]", token, bias);
  }
  for (int32_t token : p.stop_token_ids) {
    if (token < 0 || token >= vocab_size)
      return InvalidArgument("stop_token_ids: token {} is outside the vocabulary of {}", token, vocab_size);
  }
  return absl::OkStatus();
}

Sampler::Sampler(const SamplingParams& params, std::vector<int32_t> eos_ids, int32_t fork,
                 std::span<const int32_t> prompt, std::span<const int32_t> prior_output, int64_t num_prompt_tokens,
                 int64_t max_context)
    : params_(params), fork_(fork), edits_id_(NextEditsId()) {
  end_ids_ = params.stop_token_ids;
  if (!params.ignore_eos) end_ids_.insert(end_ids_.end(), eos_ids.begin(), eos_ids.end());
  max_output_ = std::max<int64_t>(1, max_context - num_prompt_tokens);
  if (params.max_tokens > 0) max_output_ = std::min(max_output_, params.max_tokens);
  for (const auto& [token, bias] : params.logit_bias) EditOf(token).bias += bias;
  if (params.min_tokens > 0) {
    for (const int32_t token : end_ids_) EditOf(token).flags |= kernels::TokenEdit::kEnd;
  }
  if (params.needs_prompt()) {
    for (const int32_t token : prompt) EditOf(token).flags |= kernels::TokenEdit::kInPrompt;
  }
  if (params.grammar != nullptr) matcher_ = params.grammar->NewMatcher();
  for (const int32_t token : prior_output) Accept(token);
}

kernels::TokenEdit& Sampler::EditOf(int32_t token) {
  const auto [at, is_new] = edit_idx_.try_emplace(token, static_cast<int32_t>(edits_.size()));
  if (is_new) edits_.push_back({.token = token});
  return edits_[at->second];
}

bool Sampler::IsEnd(int32_t token) const {
  return std::find(end_ids_.begin(), end_ids_.end(), token) != end_ids_.end();
}

// Whether the mask has end tokens and nothing else: they cannot be banned.
bool Sampler::OnlyEndsFit() const {
  size_t num_ends = 0, num_tokens = 0;
  for (size_t word = 0; word < mask_.size(); ++word) num_tokens += static_cast<size_t>(std::popcount(mask_[word]));
  for (size_t i = 0; i < end_ids_.size(); ++i) {
    const auto id = static_cast<size_t>(end_ids_[i]);
    const bool first = std::find(end_ids_.begin(), end_ids_.begin() + static_cast<std::ptrdiff_t>(i), end_ids_[i]) ==
                       end_ids_.begin() + static_cast<std::ptrdiff_t>(i);
    if (first && id / 32 < mask_.size()) num_ends += (mask_[id / 32] >> (id % 32)) & 1;
  }
  return num_tokens == num_ends;
}

FinishReason Sampler::FinishOf(int32_t token) const {
  if (!fit_.ok()) return FinishReason::kError;
  if (matcher_ != nullptr && matcher_->ended()) return FinishReason::kStop;
  if (IsEnd(token) && num_output_ > params_.min_tokens) return FinishReason::kStop;
  return num_output_ >= max_output_ ? FinishReason::kLength : FinishReason::kNone;
}

void Sampler::Accept(int32_t token) {
  ++num_output_;
  if (matcher_ != nullptr && fit_.ok() && !matcher_->ended()) {
    fit_ = matcher_->Accept(token);
    mask_.clear();
  }
  if (!penalizes()) return;
  kernels::TokenEdit& edit = EditOf(token);
  ++edit.count;
  ++edits_version_;
  last_edit_ = static_cast<int32_t>(&edit - edits_.data());
}

void Sampler::FillMask() {
  mask_.resize(grammar::MaskWords(params_.grammar->width()));
  fit_ = matcher_->FillMask(mask_);
  if (!fit_.ok()) mask_.clear();  // the next token ends the continuation, whatever it is
}

kernels::SampleRow Sampler::Row(int32_t logits_row) {
  if (needs_mask()) FillMask();
  const bool bans_ends = num_output_ < params_.min_tokens && !end_ids_.empty() && (mask_.empty() || !OnlyEndsFit());
  const bool edits = bans_ends || penalizes() || !params_.logit_bias.empty();
  return {
      .logits_row = logits_row,
      .temperature = params_.temperature,
      .top_k = params_.top_k,
      .top_p = params_.top_p,
      .min_p = params_.min_p,
      .repetition_penalty = params_.repetition_penalty,
      .presence_penalty = params_.presence_penalty,
      .frequency_penalty = params_.frequency_penalty,
      .bans_ends = bans_ends,
      .num_top = params_.num_logprobs.value_or(-1),
      .random = kernels::SamplingRandom(params_.seed, static_cast<uint32_t>(fork_), static_cast<uint64_t>(num_output_)),
      .edits = edits ? std::span<const kernels::TokenEdit>(edits_) : std::span<const kernels::TokenEdit>(),
      .edits_id = edits_id_,
      .edits_version = edits_version_,
      .last_edit = last_edit_,
      .mask = mask_};
}

SampledToken Sampler::TakeArgmax(int32_t token) {
  Accept(token);
  return {.token = token, .finish = FinishOf(token)};
}

SampledToken Sampler::Take(const kernels::SampledRow& row, std::span<const kernels::TopToken> top) {
  SampledToken result = TakeArgmax(row.token);
  if (!params_.num_logprobs) return result;
  result.logprob = TokenLogprob{.logprob = kernels::LogprobOf(row.logit, row)};
  for (const kernels::TopToken& other : top.first(*params_.num_logprobs)) {
    if (other.token >= 0) result.logprob->top.emplace_back(other.token, kernels::LogprobOf(other.logit, row));
  }
  return result;
}

std::vector<Sampler> ForkSamplers(const SamplingParams& params, const std::vector<int32_t>& eos_ids,
                                  std::span<const int32_t> prompt, std::span<const int32_t> prior_output,
                                  int64_t max_context) {
  std::vector<Sampler> samplers;
  samplers.reserve(params.num_forks);
  for (int32_t fork = 0; fork < params.num_forks; ++fork)
    samplers.emplace_back(params, eos_ids, fork, prompt, prior_output, static_cast<int64_t>(prompt.size()),
                          max_context);
  return samplers;
}

}  // namespace spl::engine
