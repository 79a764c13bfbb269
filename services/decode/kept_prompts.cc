#include "services/decode/kept_prompts.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "services/methods/methods.h"

namespace spl::decode {
namespace {

using Clock = std::chrono::steady_clock;

prometheus::Counter& DroppedCounter(Metrics& metrics, const char* reason) {
  return metrics.Counter("splice_decode_sessions_dropped_total",
                         "Conversations whose KV the decode worker no longer keeps.", {{"reason", reason}});
}

}  // namespace

KeptPrompts::KeptPrompts(const KeptPromptsOptions& options, engine::PagePool& pool, Metrics& metrics)
    : pool_(pool),
      table_(static_cast<int64_t>(options.share * static_cast<double>(pool.num_pages())), options.lease),
      conversations_(metrics.Gauge("splice_decode_sessions",
                                   "Conversations whose KV the decode worker keeps for their next turn.")),
      pages_(metrics.Gauge("splice_decode_session_pages", "KV pages that they keep.")),
      dropped_share_(DroppedCounter(metrics, "evicted")),
      dropped_pages_(DroppedCounter(metrics, "pages")),
      dropped_lease_(DroppedCounter(metrics, "expired")),
      held_tokens_(metrics.Counter("splice_decode_session_tokens_total",
                                   "Prompt tokens that were not sent, because the decode worker had kept their KV.")) {}

engine::SessionTable::Match KeptPrompts::Find(const Conversation& turn, int64_t prompt_tokens) {
  const auto most = static_cast<size_t>((prompt_tokens - 1) / kernels::kPageTokens);
  const auto blocks = std::span(turn.blocks).first(std::min(turn.blocks.size(), most));
  return table_.Find(turn.id(), blocks, methods::kExact, Clock::now());
}

void KeptPrompts::Keep(const Conversation& turn, const engine::SequenceKv& kv, int64_t exact_tokens) {
  const int64_t tokens = std::min(exact_tokens, kv.exact_tokens());
  const auto pages = std::min<int64_t>(static_cast<int64_t>(turn.blocks.size()), tokens / kernels::kPageTokens);
  // A prompt without a full block takes the place of the last one, too. One that was not exact leaves it: what both
  // begin with is still good.
  if (!kv.is_whole() || (pages <= 0 && !turn.blocks.empty())) return;
  auto kept = std::make_shared<engine::SequenceKv>(kv.pool(), kv.shape());
  kept->AppendLeading(kv, static_cast<int32_t>(pages));
  const auto blocks = std::span(turn.blocks).first(static_cast<size_t>(pages));
  table_.Keep(turn.id(), blocks, methods::kExact, std::move(kept), Clock::now());
}

bool KeptPrompts::MakeRoom(int64_t num_pages) {
  while (pool_.num_free() < num_pages) {
    if (!table_.EvictOne()) return false;
  }
  return true;
}

void KeptPrompts::CountHeld(int64_t tokens) { held_tokens_.Increment(static_cast<double>(tokens)); }

void KeptPrompts::UpdateGauges() {
  table_.Expire(Clock::now());
  const engine::SessionTable::Stats stats = table_.stats();
  conversations_.Set(static_cast<double>(stats.num_sessions));
  pages_.Set(static_cast<double>(stats.num_pages));
  RaiseTo(dropped_share_, stats.num_evicted);
  RaiseTo(dropped_pages_, stats.num_gave_way);
  RaiseTo(dropped_lease_, stats.num_expired);
}

}  // namespace spl::decode
