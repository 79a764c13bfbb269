// Settings of a prefill engine.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "services/chunk/chunk.h"
#include "services/engine/cache/prefix_index.h"
#include "services/engine/execution/executor.h"
#include "services/engine/runtime/device_lost.h"
#include "services/engine/runtime/shared_pool.h"

namespace spl::engine {

struct PrefillEngineOptions {
  ExecutorOptions executor{.max_rows = 512};  // a slice: other prompts wait at most one; cancelling one layer of it
  size_t max_queued = 256;
  size_t max_concurrent = 16;  // prompts that hold pages at one time
  bool prefix_cache = true;
  bool publish = true;  // new exact chunks to the store
  // Stores quantized copies beside the chunks, a fifth of their bytes more: of published contexts, and of the segments
  // of prompts whose policy reads such.
  bool quantize_published = true;
  // Frozen sources go last, unless they hold more than this share of the pool's pages: then they go first.
  double frozen_share = 0.9;
  // Share of the pool's pages that conversations may keep between their turns, and for how long after the last one.
  double session_share = 0.5;
  std::chrono::milliseconds session_lease{600'000};
  std::shared_ptr<chunk::ChunkStore> store;  // null: none
  std::chrono::milliseconds store_timeout{2000};
  int num_fetch_threads = 4;      // prompts that are fetched at one time: a large one does not keep small ones waiting
  size_t max_publish_queued = 8;  // prompts waiting to be published; more are not published
  size_t max_publish_calls = 64;  // Publish calls under way; more are refused
  std::chrono::milliseconds publish_timeout{30000};  // of one put of a Publish call, the store's disk included
  // While nothing is queued or running: compute segments without a source by themselves, for later requests.
  bool canonical_prefill = true;
  size_t max_canonical_queued = 64;  // segments that wait for that
  // Gives back pages that somebody else keeps and can do without; false: none are left. Asked on any of the engine's
  // threads, before text that was meant to stay is evicted. Null: nobody keeps any.
  std::function<bool()> reclaim;
  // Called when a chunk of a prefix or of a segment enters or leaves the local cache, on any of the engine's threads.
  // The two kinds never share a key. May be null.
  PrefixIndex::Observer on_cache_change;
  std::shared_ptr<StepTurns> turns;  // of a device that is shared with another engine; null: it is not
  // The pool is shared with a decode engine, which is attached already, and so are the turns; null: it is not.
  std::shared_ptr<SharedPool> shared;
  OnDeviceLost on_device_lost = EndProcessOnDeviceLost;
};

}  // namespace spl::engine
