#include "tools/cli/simulate_worker.h"

#include <algorithm>

namespace spl::cli {

void SimCache::Put(const chunk::ChunkKey& key, uint32_t tokens) {
  const auto [it, added] = by_key_.try_emplace(key);
  if (!added) {
    by_age_.splice(by_age_.begin(), by_age_, it->second);
    return;
  }
  by_age_.emplace_front(key, tokens);
  it->second = by_age_.begin();
  tokens_ += tokens;
  while (tokens_ > max_tokens_ && !by_age_.empty()) {
    tokens_ -= by_age_.back().second;
    by_key_.erase(by_age_.back().first);
    by_age_.pop_back();
  }
}

SimReuse SimPrefill::Look(const router::PromptKeys& keys, uint32_t tokens, const SimCache* store) const {
  SimReuse reuse;
  size_t own = 0, leading = 0;
  while (own < keys.prefix.size() && cache_.Has(keys.prefix[own])) ++own;
  leading = own;
  if (store != nullptr) {
    while (leading < keys.prefix.size() && store->Has(keys.prefix[leading])) ++leading;
  }
  reuse.prefix = static_cast<uint32_t>(leading * chunk::kChunkTokens);
  reuse.fetched = static_cast<uint32_t>((leading - own) * chunk::kChunkTokens);
  for (const router::SegmentKey& s : keys.segments) {
    const uint32_t begin = std::max(s.begin, reuse.prefix);
    if (begin >= s.end) continue;
    const bool here = cache_.Has(s.key);
    if (!here && (store == nullptr || !store->Has(s.key))) continue;
    reuse.aligned += s.end - begin;
    if (!here) reuse.fetched += s.end - begin;
  }
  reuse.computed = std::max(1u, tokens - std::min(tokens, reuse.prefix + reuse.aligned));
  return reuse;
}

double SimPrefill::Seconds(const SimReuse& reuse, uint32_t tokens) const {
  const double n = tokens;
  const double computed = std::min(n, reuse.computed + model_.aligned_cost * reuse.aligned);
  const double fetch = reuse.fetched == 0
                           ? 0
                           : static_cast<double>(model_.kv_bytes_per_token) * reuse.fetched / model_.fetch_bytes_per_s;
  return model_.prompt_fixed_s + model_.prompt_token_s * computed +
         model_.prompt_square_s * (n * n - (n - computed) * (n - computed)) + fetch;
}

void SimPrefill::Keep(const router::PromptKeys& keys, uint32_t tokens, const SimReuse& reuse, SimCache* store) {
  uint32_t exact = tokens;
  if (reuse.aligned > 0) {
    for (const router::SegmentKey& s : keys.segments) {
      if (s.end <= reuse.prefix) continue;
      if (!cache_.Has(s.key) && (store == nullptr || !store->Has(s.key))) continue;
      exact = std::max(s.begin, reuse.prefix);
      break;
    }
  }
  // Like the engine: the deepest chunk is evicted first.
  for (size_t i = std::min<size_t>(keys.prefix.size(), exact / chunk::kChunkTokens); i-- > 0;) {
    cache_.Put(keys.prefix[i], chunk::kChunkTokens);
    if (store != nullptr) store->Put(keys.prefix[i], chunk::kChunkTokens);
  }
  for (const router::SegmentKey& s : keys.segments) {
    cache_.Put(s.key, s.end - s.begin);
    if (store != nullptr) store->Put(s.key, s.end - s.begin);
  }
}

void SimPrefill::Report(router::PrefillView* view) const {
  view->queued_tokens = queued_tokens;
  view->first_tokens_per_s = 1 / model_.prompt_token_s;
  view->pair_cost = 2 * model_.prompt_square_s / model_.prompt_token_s;
  view->tokens_per_s = tokens_per_s > 0 ? tokens_per_s : view->first_tokens_per_s;  // a self-test gives the first value
}

bool SimDecode::HasRoom(uint32_t tokens) const {
  return reserved_sequences < model_.max_sequences && reserved_tokens + tokens <= model_.decode_kv_tokens;
}

void SimDecode::Reserve(uint32_t tokens) {
  ++reserved_sequences;
  reserved_tokens += tokens;
}

void SimDecode::Release(uint32_t tokens) {
  --reserved_sequences;
  reserved_tokens -= tokens;
}

void SimDecode::Join(double now_s, uint64_t request, uint32_t prompt, uint32_t output) {
  Advance(now_s);
  const double kv = model_.wire_share * prompt + output / 2.0;
  by_end_.emplace(steps_ + output, Sequence{.request = request, .kv_tokens = kv});
  kv_tokens_ += kv;
  ++version;
}

std::optional<double> SimDecode::NextEnd() const {
  if (by_end_.empty()) return std::nullopt;
  return last_s_ + std::max(0.0, by_end_.begin()->first - steps_) * StepSeconds();
}

std::vector<uint64_t> SimDecode::Advance(double now_s) {
  std::vector<uint64_t> ended;
  // At every end the batch changes, and with it the duration of a step.
  while (!by_end_.empty() && *NextEnd() <= now_s + 1e-9) {
    last_s_ = *NextEnd();
    steps_ = by_end_.begin()->first;
    kv_tokens_ -= by_end_.begin()->second.kv_tokens;
    ended.push_back(by_end_.begin()->second.request);
    by_end_.erase(by_end_.begin());
    ++version;
  }
  if (!by_end_.empty()) steps_ += std::max(0.0, now_s - last_s_) / StepSeconds();
  last_s_ = std::max(last_s_, now_s);
  return ended;
}

}  // namespace spl::cli
