#include "services/router/policies/request_costs.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "services/methods/methods.h"
#include "services/methods/quality.h"

namespace spl::router {
namespace {

constexpr double kWeight = 1.0 / 8;
constexpr uint32_t kFewTokens = 256;  // below this, fixed costs hide the costs per token
constexpr uint64_t kFewBytes = 1ull << 20;

std::string KeyOf(const AskedMethod& asked, uint64_t prompt_tokens) {
  const v1::ReuseOptions& reuse = asked.reuse;
  std::string key(methods::ResolvePolicy(methods::PolicyOf(reuse.policy(), reuse.quality()), false, ""));
  const bool contract = methods::ParseQuality(reuse.quality()).value_or(methods::Quality()).agreement > 0;
  if (key != methods::kExact && (asked.chooses || contract)) {
    key += fmt::format("{} {} 2^{}", asked.chooses ? "+auto" : "", contract ? reuse.quality() : "",
                       std::bit_width(prompt_tokens));
  }
  if (reuse.lines().head_classes()) key += "+heads";
  if (reuse.heads().full_kv()) key += "+full";
  return key;
}

// Whether there were copies that the prompt did not use.
bool LeftCopies(const v1::Receipt& receipt) {
  return receipt.has_choice() && receipt.reuse_policy() == methods::kExact &&
         receipt.choice().why() != methods::kNothingToCopy;
}

void Learn(double seen, double* value) { *value += kWeight * (seen - *value); }

}  // namespace

RequestCost RequestCosts::Of(const AskedMethod& asked, uint64_t prompt_tokens) const {
  std::lock_guard lock(mutex_);
  const auto it = by_policy_.find(KeyOf(asked, prompt_tokens));
  RequestCost cost = it == by_policy_.end() ? RequestCost() : it->second;
  cost.fetch_bytes_per_s = fetch_bytes_per_s_;
  return cost;
}

void RequestCosts::Observe(const AskedMethod& asked, const v1::Receipt& receipt, const Worker& worker) {
  const uint32_t prompt = receipt.cached_tokens() + receipt.aligned_tokens() + receipt.computed_tokens();
  const uint32_t sent = prompt - std::min(prompt, receipt.held_tokens());  // the decode worker has the rest
  std::lock_guard lock(mutex_);
  // A prompt may be computed while it fetches: only the store's own time says how fast it is.
  const double seconds = receipt.has_store() ? receipt.store().seconds() : receipt.fetch_seconds();
  if (receipt.bytes_fetched() >= kFewBytes && seconds > 0) {
    const double rate = static_cast<double>(receipt.bytes_fetched()) / seconds;
    if (fetch_bytes_per_s_ == 0) fetch_bytes_per_s_ = rate;
    Learn(rate, &fetch_bytes_per_s_);
  }
  const std::string key = KeyOf(asked, prompt);
  if (!by_policy_.contains(key) && by_policy_.size() >= kMaxPolicies) return;
  RequestCost& cost = by_policy_[key];
  if (worker.kv_bytes_per_token > 0 && sent >= kFewTokens && receipt.bytes_moved() > 0) {
    const double dense = static_cast<double>(worker.kv_bytes_per_token) * sent;
    Learn(std::clamp(static_cast<double>(receipt.bytes_moved()) / dense, 0.0, 1.0), &cost.wire_share);
  }
  if (worker.tokens_per_s > 0 && receipt.aligned_tokens() >= kFewTokens && receipt.prefill_seconds() > 0) {
    const double equivalent = receipt.prefill_seconds() * worker.tokens_per_s;
    const double aligned = equivalent - receipt.computed_tokens();
    Learn(std::clamp(aligned / receipt.aligned_tokens(), 0.0, 1.0), &cost.aligned_cost);
  } else if (LeftCopies(receipt)) {
    Learn(1, &cost.aligned_cost);
  }
}

}  // namespace spl::router
