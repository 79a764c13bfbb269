// Puts chunks of a worker's pages into the chunk store.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "services/base/bounded_queue.h"
#include "services/chunk/chunk.h"
#include "services/engine/cache/segment_source.h"
#include "services/engine/model/model.h"

namespace spl::engine {

// Chunks keys[first_chunk, …) of a prompt's exact start, or of a segment. A segment may have quantized copies beside
// them. A segment whose local query is known also has a summary after them; its tile means are computed here.
struct ChunkRun {
  std::shared_ptr<const SequenceKv> kv;         // null for a segment
  std::shared_ptr<const SegmentSource> source;  // null for a prompt
  std::vector<chunk::ChunkKey> keys;
  chunk::Digest namespace_key{};
  size_t first_chunk = 0;
  bool quantized = false;                           // only for a segment: quantized copies, too
  std::chrono::steady_clock::time_point offered{};  // set by Offer
};

// Counts of KV chunks; summaries and quantized copies are not counted.
struct PublishTally {
  uint64_t num_chunks = 0;
  uint64_t num_existing = 0;  // those of them that were stored before
  uint64_t num_bytes = 0;     // payloads of all chunks
};

// Chunks whose caller waits for the store's answer.
struct PublishOrder {
  std::vector<ChunkRun> runs;
  chunk::PutOptions put;
  std::chrono::steady_clock::time_point deadline;
  std::shared_ptr<const std::atomic<bool>> cancelled;
  // Called once, on a thread of the publisher. OK: the store has acknowledged every chunk. With an error, the tally
  // says what had been acknowledged by then.
  std::function<void(absl::Status, const PublishTally&)> on_done;
};

struct ChunkPublisherOptions {
  std::shared_ptr<chunk::ChunkStore> store;
  std::chrono::milliseconds offer_timeout{2000};   // for one put of an offered run
  std::chrono::milliseconds order_timeout{30000};  // for one put of an order; a durable put waits for the store's disk
  // Offered runs and chunks that may wait: they hold pages. A run that exceeds one of them is not published. few_offers
  // runs may wait whatever their length: chunks of a prompt and of its segments share pages, and are counted twice.
  size_t max_offers = 256;
  size_t few_offers = 8;
  size_t max_offered_chunks = 1024;
  // Waits until no client waits for the worker, at most until the time given, and returns whether that is so. An offer
  // is packed and sent only then; but when it has waited for max_delay, or another one was not taken, it goes on all
  // the same, at low priority. Null: at once. Any thread.
  std::function<bool(std::chrono::steady_clock::time_point)> wait_for_idle;
  std::chrono::milliseconds max_delay{10'000};
  size_t max_orders = 16;    // orders that may wait
  size_t order_threads = 2;  // orders in parallel: one is packed while another one is put
  // Time to compute `count` tokens from position `first` on again: the store keeps expensive chunks longer. Any thread.
  // Null: the store is not told.
  std::function<double(int64_t first, int32_t count)> recompute_seconds;
  std::function<void()> on_released;  // pages were given back; must not block
};

// Owns one background thread for offers and some threads for orders, so that neither waits for the other. Holds the
// pages of everything that waits. Each thread packs at most one window of chunks at a time. Offer and Order may be
// called from any thread.
class ChunkPublisher {
 public:
  ChunkPublisher(std::shared_ptr<const Model> model, const ChunkPublisherOptions& options);
  ~ChunkPublisher();  // Stop() must have been called

  // Publishes with best effort. False: not taken, because too many wait.
  bool Offer(ChunkRun run);
  // False: not taken, because too many wait or it is stopping. on_done does not run then.
  [[nodiscard]] bool Order(PublishOrder order) { return Count(orders_.TryPush(std::move(order))); }
  // Whether it holds pages that it will give back.
  bool busy() const { return num_held_.load() > 0; }

  // Ends waiting orders with Unavailable and joins. Idempotent.
  void Stop();

 private:
  using Deadline = std::chrono::steady_clock::time_point;
  bool Count(bool taken) {
    num_held_.fetch_add(taken ? 1 : 0);
    return taken;
  }
  // Called when the pages of an offer or an order were given back.
  void Released();
  void OfferLoop();
  void PutOffer(ChunkRun& run);
  void AwaitTurn(const ChunkRun& run) const;
  void OrderLoop();
  absl::Status Fulfil(const PublishOrder& order, PublishTally& tally);
  absl::StatusOr<chunk::Chunk> Pack(const ChunkRun& run, size_t index) const;
  // Puts chunks [begin, end) of the run in one call.
  absl::Status PutWindow(const ChunkRun& run, size_t begin, size_t end, const chunk::PutOptions& put, Deadline deadline,
                         PublishTally& tally);
  // Fails unless the store acknowledges all of them. `what` is for the message.
  absl::StatusOr<chunk::PutReport> PutAll(std::span<const chunk::Chunk> chunks, const chunk::PutOptions& put,
                                          Deadline deadline, std::string_view what);
  absl::Status PutQuantized(const ChunkRun& run, std::span<const chunk::Chunk> chunks, const chunk::PutOptions& put,
                            Deadline deadline);
  absl::Status PutSummary(const ChunkRun& run, const chunk::PutOptions& put, Deadline deadline);
  // Chunks from `begin` on that are packed for one put of `most_bytes`; at least one.
  size_t WindowEnd(const ChunkRun& run, size_t begin, size_t most_bytes) const;

  const std::shared_ptr<const Model> model_;
  const ChunkPublisherOptions options_;
  BoundedQueue<ChunkRun> offers_;
  BoundedQueue<PublishOrder> orders_;
  std::atomic<int64_t> num_held_{0};
  std::atomic<size_t> offered_chunks_{0};  // chunks of offers that wait or are being put
  std::atomic<bool> crowded_{false};       // an offer was not taken since the last one was put
  size_t offer_window_bytes_ = 0;          // the offer thread's
  std::vector<std::thread> threads_;       // last: they start when all other members exist
};

}  // namespace spl::engine
