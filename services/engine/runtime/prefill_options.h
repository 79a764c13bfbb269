// Settings of a prefill engine.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "services/chunk/chunk.h"
#include "services/engine/cache/prefix_index.h"
#include "services/engine/execution/executor.h"
#include "services/engine/runtime/device_lost.h"
#include "services/engine/runtime/on_pass.h"
#include "services/engine/runtime/shared_pool.h"

namespace spl::engine {

struct PrefillEngineOptions {
  // max_rows is the size of a slice (chunked prefill). A prompt waits for at most one slice of another prompt.
  // Cancelling takes effect after at most one layer of a slice.
  ExecutorOptions executor{.max_rows = 512};
  // Most rows of prompts in a pass, a multiple of 64. Less than executor.max_rows leaves room for the decode step that
  // shares the pass. 0: executor.max_rows.
  int32_t slice_tokens = 0;
  // Prompts that are queued or computed; more are refused, and fail. Decode workers have reserved room for each of them,
  // which is what bounds them.
  size_t max_queued = 4096;
  size_t max_concurrent = 16;  // prompts that hold pages at the same time
  bool prefix_cache = true;
  bool publish = true;  // puts new exact chunks into the store
  // Stores quantized copies beside the chunks, which adds a fifth of their bytes: for published contexts, and for
  // segments of prompts whose policy reads such copies.
  bool quantize_published = true;
  // Frozen sources are evicted last. If they hold more than this share of the pool's pages, they are evicted first.
  double frozen_share = 0.9;
  // Share of the pool's pages for KV of conversations between two turns, and how long it stays after the last turn.
  double session_share = 0.5;
  std::chrono::milliseconds session_lease{600'000};
  std::shared_ptr<chunk::ChunkStore> store;  // null: none
  std::chrono::milliseconds store_timeout{2000};
  // A prompt computes what would take longer to fetch, and is hardly held back for the store (fetch_cost.h). False: it
  // waits for all that the store has, so that what is fetched does not depend on the speed of anything.
  bool fetch_by_cost = false;
  int num_fetch_threads = 4;  // prompts fetched in parallel: a large one does not hold up small ones
  // Longest that new chunks wait for a moment without prompts before they are put into the store all the same.
  std::chrono::milliseconds publish_delay_max{10'000};
  // Prompts and segments that may wait to be published, and the share of the pool's pages that more than eight of them
  // may hold. More are not published.
  size_t max_publish_queued = 256;
  double publish_share = 0.125;
  size_t max_publish_calls = 64;                     // Publish calls under way; more are refused
  std::chrono::milliseconds publish_timeout{30000};  // for one put of a Publish call, including the store's disk
  // Computes segments without a source by themselves, for later requests, while nothing is queued or running.
  bool canonical_prefill = true;
  size_t max_canonical_queued = 64;  // segments that may wait for that
  // Evicts a little of what others cache in the pool; false: nothing is left. Called on any thread, after prefixes have
  // gone and before text that was meant to stay: others have a copy elsewhere, and what they lose costs a transfer, not
  // a computation. Null: nobody else caches.
  std::function<bool()> reclaim;
  // Called when a chunk of a prefix or of a segment enters or leaves the local cache, on any of the engine's threads.
  // The two kinds never share a key. May be null.
  PrefixIndex::Observer on_cache_change;
  OnPass on_pass;  // passes of prompts, with the decode steps that shared them; may be null
  std::shared_ptr<StepTurns> turns;  // if the device is shared with another engine; else null
  // Set if the pool, and the turns, are shared with a decode engine, which must be attached already; else null.
  std::shared_ptr<SharedPool> shared;
  OnDeviceLost on_device_lost = EndProcessOnDeviceLost;
};

}  // namespace spl::engine
