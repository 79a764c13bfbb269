#include "services/engine/runtime/prefill_meter.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <numeric>
#include <vector>

#include "services/base/status.h"
#include "services/engine/recovery/exact.h"
#include "services/engine/runtime/local_generator.h"

namespace spl::engine {
namespace {

constexpr int32_t kWarmUpTokens = 192;
constexpr double kSmoothing = 0.2;
constexpr int kFullLength = 10;  // 512 tokens and more are as long as any

// The bits of a number of tokens: 1, 2 to 3, 4 to 7, ...
int LengthOf(double tokens) {
  return std::min<int>(std::bit_width(static_cast<uint64_t>(std::max(1.0, tokens))), kFullLength);
}

}  // namespace

absl::Status PrefillMeter::WarmUp(ParallelExecutor& executor, PagePool& pool) {
  const ModelConfig& config = executor.model().config();
  const int32_t length = std::min({kWarmUpTokens, config.max_positions - 1, executor.max_rows()});
  const std::vector<int32_t> tokens(length, 0);
  std::vector<int32_t> positions(length);
  std::iota(positions.begin(), positions.end(), 0);
  ExactPolicy policy(config);
  SequenceKv kv(pool, KvShapeOf(config));
  if (!kv.Reserve(length).ok())
    return InvalidArgument("prefill: a pool of {} pages is too small for {} tokens of this model", pool.num_pages(),
                           length);
  for (int pass = 0; pass < 2; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    const PrefillSlice slice{tokens, positions, &kv, &policy};
    SPLICE_RETURN_IF_ERROR(executor.Prefill({&slice, 1}));
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    const double seconds = std::max(1e-6, took.count());
    std::lock_guard lock(mutex_);
    length_ = LengthOf(length);
    tokens_per_s_ = length / seconds;
    cost_per_s_ = cost_.Of(0, length) / seconds;
  }
  return absl::OkStatus();
}

void PrefillMeter::SetQueued(int64_t& share, int64_t tokens) {
  std::lock_guard lock(mutex_);
  queued_tokens_ += tokens - share;
  share = tokens;
}

void PrefillMeter::Add(double tokens, double cost, double seconds) {
  if (tokens <= 0) return;
  seconds = std::max(seconds, 1e-6);
  std::lock_guard lock(mutex_);
  if (LengthOf(tokens) < length_) return;
  length_ = LengthOf(tokens);
  // The first pass of its length may have had caches to fill: it counts no more than another one.
  const double weight = tokens_per_s_ > 0 ? kSmoothing : 1;
  tokens_per_s_ += weight * (tokens / seconds - tokens_per_s_);
  cost_per_s_ += weight * (cost / seconds - cost_per_s_);
}

double PrefillMeter::RecomputeSeconds(int64_t first, int32_t count) const {
  const double cost = cost_.Of(first, count);
  std::lock_guard lock(mutex_);
  return cost / std::max(cost_per_s_, 1.0);
}

PrefillLoad PrefillMeter::load(size_t queued_requests) const {
  std::lock_guard lock(mutex_);
  return {.queued_requests = queued_requests,
          .queued_tokens = queued_tokens_,
          .tokens_per_s = tokens_per_s_,
          .first_tokens_per_s = cost_per_s_ / cost_.PerToken(),
          .pair_cost = cost_.PerPair() / cost_.PerToken()};
}

}  // namespace spl::engine
