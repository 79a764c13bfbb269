// The page pool (KV cache) of a decode engine, and of the prefill engine of the same process if there is one: then
// prompts change hands without a copy.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>

#include "services/base/ids.h"
#include "services/engine/cache/sequence_kv.h"
#include "services/engine/runtime/step_turns.h"

namespace spl::engine {

// Running sequences, reservations and cached KV compete for the same pages (blocks). Cached KV is evicted first, and a
// prompt is admitted only if the decoding sequences keep room to grow. No reservation takes pages while prompts wait
// for some: they came before.
//
// Both engines attach themselves, and detach before they end. Any thread may call; no engine's lock may be held.
class SharedPool {
 public:
  // `pool` outlives it. `turns`: those of the device; null: both engines run at the same time.
  SharedPool(PagePool& pool, std::shared_ptr<StepTurns> turns) : pool_(pool), turns_(std::move(turns)) {}

  PagePool& pool() const { return pool_; }
  const std::shared_ptr<StepTurns>& turns() const { return turns_; }

  // Who decides which cached KV is evicted: the prefill engine (PageBudget), which others attach their caches to
  // (PrefillEngineOptions::reclaim). Without one, the only cache.
  struct Cache {
    std::function<bool(int64_t num_pages)> make_room;  // evicts until that many pages are free; false: it cannot
    // Null unless it is a prefill engine: called when the other engine freed pages; whether a prompt waits for pages.
    std::function<void()> on_pages_freed = nullptr;
    std::function<bool()> prompts_wait = nullptr;
  };
  void AttachCache(Cache cache);  // instead of the one before
  void DetachCache();             // returns when none of its functions is running
  // The engine that decodes.
  struct Decoder {
    std::function<int64_t()> growth_pages;  // that its sequences will need soon; -1: some wait for pages
    int32_t max_rows = 0;                   // rows of a step
  };
  void AttachDecoder(Decoder decoder);
  void DetachDecoder();  // likewise; sequences that were given but not taken go back

  // Evicts cached KV until `num_pages` are free. False: not enough is left to evict.
  bool MakeRoom(int64_t num_pages);
  // Evicts cached KV until counts[r] pages of each rank r are free. False: it cannot, and unless another thread was
  // faster nothing was evicted.
  bool MakeRoom(std::span<const int64_t> counts);
  bool PromptsWait();  // whether a prompt waits for pages: new reservations would keep it waiting
  void PagesFreed();   // called when a sequence has ended or a reservation was given up: prompts may begin
  // Pages that a new prompt must leave free for the decoding sequences. Nullopt: no prompt may begin, because preempted
  // sequences come first.
  std::optional<int64_t> GrowthPages() const;
  int32_t max_decode_rows() const;  // rows of a decode step that shares a pass with prompts

  // Epoch of the prefill worker in this process that hands prompts over; 0: none yet. Reservations for other workers
  // get pages to write to.
  void set_writer_epoch(uint64_t epoch) { writer_epoch_ = epoch; }
  uint64_t writer_epoch() const { return writer_epoch_; }

  // Hands over a finished prompt, by its ticket. The sequence must not be written to any more.
  void Give(const RandomId& ticket, std::shared_ptr<const SequenceKv> kv);
  std::shared_ptr<const SequenceKv> Take(const RandomId& ticket);  // null: none was given, or it was taken before

 private:
  PagePool& pool_;
  const std::shared_ptr<StepTurns> turns_;
  std::atomic<uint64_t> writer_epoch_{0};
  std::mutex cache_mutex_;  // guards cache_; held while its functions run
  Cache cache_;
  mutable std::mutex decoder_mutex_;  // guards decoder_; held while its functions run
  Decoder decoder_;
  std::mutex mutex_;  // guards given_
  std::unordered_map<RandomId, std::shared_ptr<const SequenceKv>, RandomIdHash> given_;
};

}  // namespace spl::engine
