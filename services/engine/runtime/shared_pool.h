// One page pool (KV cache) for the prefill engine and the decode engine of a process. Prompts change hands without a
// copy.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "services/base/ids.h"
#include "services/engine/cache/sequence_kv.h"
#include "services/engine/runtime/step_turns.h"

namespace spl::engine {

// Running sequences and cached KV compete for the same pages (blocks). Running sequences win: each engine may evict
// cached KV, and a prompt is admitted only if the decoding sequences keep room to grow.
//
// Both engines attach themselves, and detach before they end. Any thread may call; no engine's lock may be held.
class SharedPool {
 public:
  // `pool` outlives it. `turns`: those of the device; null: both engines run at the same time.
  SharedPool(PagePool& pool, std::shared_ptr<StepTurns> turns) : pool_(pool), turns_(std::move(turns)) {}

  PagePool& pool() const { return pool_; }
  const std::shared_ptr<StepTurns>& turns() const { return turns_; }

  // The engine that caches KV.
  struct Cache {
    std::function<bool(int64_t num_pages)> make_room;  // evicts until that many pages are free; false: it cannot
    std::function<void()> on_pages_freed;              // called when the other engine freed pages
  };
  void AttachCache(Cache cache);
  void DetachCache();  // returns when none of its functions is running
  // The engine that decodes.
  struct Decoder {
    std::function<int64_t()> growth_pages;  // that its sequences will need soon; -1: some wait for pages
    int32_t max_rows = 0;                   // rows of a step
  };
  void AttachDecoder(Decoder decoder);
  void DetachDecoder();  // likewise; sequences that were given but not taken go back

  // Evicts cached KV until `num_pages` are free. False: not enough is left to evict.
  bool MakeRoom(int64_t num_pages);
  void PagesFreed();  // called when a sequence has ended: prompts may begin
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
