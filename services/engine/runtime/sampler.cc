#include "services/engine/runtime/sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "services/base/status.h"

namespace spl::engine {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();
constexpr size_t kSortedCandidates = 512;  // as many are sorted as fast as they are put into ranges
constexpr int kRangeShift = 16;            // bits of a weight that a range leaves open: 128 ranges an octave

// SplitMix64: a full-period mixer whose single step is good enough to turn a counter into a random word.
uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

TokenLogprob LogprobOf(std::span<const float> logits, int32_t token, int32_t num_top) {
  float max = kNegativeInfinity;
  for (float x : logits) max = std::max(max, x);
  double sum = 0;
  for (float x : logits) sum += std::exp(static_cast<double>(x) - max);
  const double log_sum = max + std::log(sum);
  TokenLogprob result{.logprob = static_cast<float>(logits[token] - log_sum)};
  if (num_top == 0) return result;
  std::vector<int32_t> ids(logits.size());
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i);
  const size_t count = std::min<size_t>(num_top, ids.size());
  std::partial_sort(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(count), ids.end(),
                    [&](int32_t a, int32_t b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; });
  for (size_t i = 0; i < count; ++i) result.top.emplace_back(ids[i], static_cast<float>(logits[ids[i]] - log_sum));
  return result;
}

// Weights are positive: their bits are in the order of the numbers.
size_t RangeOf(float weight) { return std::bit_cast<uint32_t>(weight) >> kRangeShift; }

bool MoreLikely(const std::pair<float, int32_t>& a, const std::pair<float, int32_t>& b) {
  return a.first != b.first ? a.first > b.first : a.second < b.second;
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
    : params_(params), stream_(Mix(Mix(params.seed) ^ static_cast<uint64_t>(fork))) {
  end_ids_ = params.stop_token_ids;
  if (!params.ignore_eos) end_ids_.insert(end_ids_.end(), eos_ids.begin(), eos_ids.end());
  max_output_ = std::max<int64_t>(1, max_context - num_prompt_tokens);
  if (params.max_tokens > 0) max_output_ = std::min(max_output_, params.max_tokens);
  for (int32_t token : prior_output) Accept(token);
  if (params.needs_prompt()) {
    prompt_tokens_.assign(prompt.begin(), prompt.end());
    std::sort(prompt_tokens_.begin(), prompt_tokens_.end());
    prompt_tokens_.erase(std::unique(prompt_tokens_.begin(), prompt_tokens_.end()), prompt_tokens_.end());
  }
}

bool Sampler::IsEnd(int32_t token) const {
  return std::find(end_ids_.begin(), end_ids_.end(), token) != end_ids_.end();
}

FinishReason Sampler::FinishOf(int32_t token) const {
  if (IsEnd(token) && num_output_ > params_.min_tokens) return FinishReason::kStop;
  return num_output_ >= max_output_ ? FinishReason::kLength : FinishReason::kNone;
}

void Sampler::Accept(int32_t token) {
  ++num_output_;
  ++output_counts_[token];
}

bool Sampler::takes_argmax() const {
  return params_.temperature == 0 && !params_.num_logprobs && params_.logit_bias.empty() &&
         num_output_ >= params_.min_tokens && params_.repetition_penalty == 1.0f && params_.presence_penalty == 0 &&
         params_.frequency_penalty == 0;
}

SampledToken Sampler::TakeArgmax(int32_t token) {
  Accept(token);
  return {.token = token, .finish = FinishOf(token)};
}

SampledToken Sampler::Sample(std::span<float> logits) {
  SampledToken result;
  std::vector<float> raw;
  if (params_.num_logprobs) raw.assign(logits.begin(), logits.end());
  ApplyPenalties(logits);
  result.token = Choose(logits);
  if (params_.num_logprobs) result.logprob = LogprobOf(raw, result.token, *params_.num_logprobs);
  Accept(result.token);
  result.finish = FinishOf(result.token);
  return result;
}

void Sampler::ApplyPenalties(std::span<float> logits) const {
  const auto has = [&](int32_t token) { return token >= 0 && static_cast<size_t>(token) < logits.size(); };
  for (const auto& [token, bias] : params_.logit_bias) {
    if (has(token)) logits[token] += bias;
  }
  if (num_output_ < params_.min_tokens) {
    for (int32_t token : end_ids_) {
      if (has(token)) logits[token] = kNegativeInfinity;
    }
  }
  if (params_.repetition_penalty != 1.0f) {
    const auto penalize = [&](int32_t token) {
      if (!has(token)) return;
      float& x = logits[token];
      x = x > 0 ? x / params_.repetition_penalty : x * params_.repetition_penalty;
    };
    for (int32_t token : prompt_tokens_) penalize(token);
    for (const auto& [token, count] : output_counts_) {
      if (!std::binary_search(prompt_tokens_.begin(), prompt_tokens_.end(), token)) penalize(token);
    }
  }
  for (const auto& [token, count] : output_counts_) {
    if (has(token)) logits[token] -= params_.presence_penalty + params_.frequency_penalty * static_cast<float>(count);
  }
}

// A number in [0, 1) with 53 random bits.
double Sampler::NextUniform() const {
  return static_cast<double>(Mix(stream_ + static_cast<uint64_t>(num_output_)) >> 11) * 0x1.0p-53;
}

int32_t Sampler::Choose(std::span<float> logits) {
  const auto best = std::max_element(logits.begin(), logits.end());  // the first of equals: the lower id
  if (params_.temperature == 0) return static_cast<int32_t>(best - logits.begin());

  // Softmax at the temperature over the tokens that min_p keeps, most likely first.
  const double max = *best, inverse_t = 1.0 / params_.temperature;
  const double keep_above = params_.min_p > 0 ? std::log(params_.min_p) : -1e30;
  candidates_.clear();
  for (size_t i = 0; i < logits.size(); ++i) {
    const double x = (logits[i] - max) * inverse_t;
    if (x >= keep_above && x > -80) candidates_.emplace_back(static_cast<float>(std::exp(x)), static_cast<int32_t>(i));
  }
  if (candidates_.empty()) return static_cast<int32_t>(best - logits.begin());  // no finite logit is the largest
  const bool cuts = params_.top_k > 0 && static_cast<size_t>(params_.top_k) < candidates_.size();
  if (cuts) {
    const auto middle = candidates_.begin() + params_.top_k;
    if (static_cast<size_t>(params_.top_k) <= kSortedCandidates) {  // a heap of few: faster than parting all
      std::partial_sort(candidates_.begin(), middle, candidates_.end(), MoreLikely);
      candidates_.erase(middle, candidates_.end());
      return Draw();
    }
    std::nth_element(candidates_.begin(), middle, candidates_.end(), MoreLikely);
    candidates_.erase(middle, candidates_.end());
  }
  if (!cuts && params_.top_p >= 1.0f) return Draw();
  if (candidates_.size() > kSortedCandidates) {
    if (const std::optional<int32_t> drawn = DrawByRanges()) return *drawn;
  }
  std::sort(candidates_.begin(), candidates_.end(), MoreLikely);
  return Draw();
}

int32_t Sampler::Draw() {
  double total = 0;
  for (const auto& [weight, token] : candidates_) total += weight;
  if (params_.top_p < 1.0f) {
    // The smallest set whose share reaches top_p, the crossing token included.
    double share = 0;
    size_t n = 0;
    while (n < candidates_.size() && share < params_.top_p * total) share += candidates_[n++].first;
    candidates_.resize(std::max<size_t>(n, 1));
    total = share;
  }
  double target = NextUniform() * total;
  for (const auto& [weight, token] : candidates_) {
    target -= weight;
    if (target < 0) return token;
  }
  return candidates_.back().second;
}

std::optional<int32_t> Sampler::DrawByRanges() {
  range_sums_.assign(RangeOf(1.0f) + 1, 0.0);
  double total = 0;
  for (const auto& [weight, token] : candidates_) {
    range_sums_[RangeOf(weight)] += weight;
    total += weight;
  }
  // More than the sums of Draw may differ from these by: a sum of n numbers is off by n roundings at most.
  const double close = 4 * static_cast<double>(candidates_.size()) * std::numeric_limits<double>::epsilon() * total;
  struct Crossing {
    int32_t token;
    double sum;  // of the candidates up to it
  };
  // The first candidate, in falling order, with which their sum is more than `goal`. Nothing: too close to tell.
  std::vector<std::pair<float, int32_t>> of_range;
  const auto cross = [&](double goal) -> std::optional<Crossing> {
    double sum = 0;
    for (size_t range = range_sums_.size(); range-- > 0;) {
      if (range_sums_[range] == 0 || sum + range_sums_[range] < goal - close) {
        sum += range_sums_[range];
        continue;
      }
      of_range.clear();
      std::copy_if(candidates_.begin(), candidates_.end(), std::back_inserter(of_range),
                   [&](const auto& candidate) { return RangeOf(candidate.first) == range; });
      std::sort(of_range.begin(), of_range.end(), MoreLikely);
      for (const auto& [weight, token] : of_range) {
        sum += weight;
        if (std::abs(sum - goal) <= close) return std::nullopt;
        if (sum > goal) return Crossing{token, sum};
      }
    }
    return std::nullopt;
  };
  double share = total;
  if (params_.top_p < 1.0f) {
    const std::optional<Crossing> last = cross(params_.top_p * total);
    if (!last) return std::nullopt;
    share = last->sum;
  }
  const std::optional<Crossing> drawn = cross(NextUniform() * share);
  if (!drawn) return std::nullopt;
  return drawn->token;
}

}  // namespace spl::engine
