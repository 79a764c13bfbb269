// The prompts of conversations that a decode worker keeps for their next turns, so that only new rows are sent.
#pragma once

#include <chrono>
#include <cstdint>

#include "services/base/metrics.h"
#include "services/decode/conversation.h"
#include "services/engine/cache/page_pool.h"
#include "services/engine/cache/session_table.h"

namespace spl::decode {

struct KeptPromptsOptions {
  double share = 0.5;                        // most pages to keep, as a share of the pool; 0: none
  std::chrono::milliseconds lease{600'000};  // how long after a turn they are kept
};

// Kept pages are available (PagePool): they give way to reservations and to running sequences as soon as these need
// pages, in the order of PageBudget if the worker also caches prefixes. Any thread.
class KeptPrompts {
 public:
  // `pool` and `metrics` outlive it.
  KeptPrompts(const KeptPromptsOptions& options, engine::PagePool& pool, Metrics& metrics);

  // Finds the pages that hold the prompt's first tokens, never its last one, so that there is always a page to send.
  engine::SessionTable::Match Find(const Conversation& turn, int64_t prompt_tokens);
  // Keeps the pages of `kv` that hold the prompt's full blocks and are exact. Pages of the answer are not kept: it may
  // have been decoded over chosen tokens. A prompt without a full block lets go of what was kept. Does nothing if `kv`
  // lacks pages.
  void Keep(const Conversation& turn, const engine::SequenceKv& kv, int64_t exact_tokens);

  // Evicts one conversation. False: there is none.
  bool EvictOne() { return table_.EvictOne(); }
  // Evicts until `num_pages` are free. False: nothing is left to evict.
  bool MakeRoom(int64_t num_pages);

  // Counts tokens of a prompt that landed which were not sent.
  void CountHeld(int64_t tokens);
  // Also drops what is kept for longer than the lease.
  void UpdateGauges();

 private:
  engine::PagePool& pool_;
  engine::SessionTable table_;
  prometheus::Gauge& conversations_;
  prometheus::Gauge& pages_;
  prometheus::Counter& dropped_share_;
  prometheus::Counter& dropped_pages_;
  prometheus::Counter& dropped_lease_;
  prometheus::Counter& held_tokens_;
};

}  // namespace spl::decode
