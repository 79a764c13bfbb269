// Chunks of a worker's pages on their way into the chunk store.
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

// Chunks keys[first_chunk, …) of a prompt's exact start, or of a segment; beside a segment's their quantized copies, if
// they are wanted, and behind it its summary, when the local query is known: the tile means are computed here.
struct ChunkRun {
  std::shared_ptr<const SequenceKv> kv;         // null for a segment
  std::shared_ptr<const SegmentSource> source;  // null for a prompt
  std::vector<chunk::ChunkKey> keys;
  chunk::Digest namespace_key{};
  size_t first_chunk = 0;
  bool quantized = false;  // of a segment: quantized copies, too
};

// Of KV: summaries and quantized copies are not counted.
struct PublishTally {
  uint64_t num_chunks = 0;
  uint64_t num_existing = 0;  // of these, stored before
  uint64_t num_bytes = 0;     // payloads of all
};

// Chunks that somebody waits for.
struct PublishOrder {
  std::vector<ChunkRun> runs;
  chunk::PutOptions put;
  std::chrono::steady_clock::time_point deadline;
  std::shared_ptr<const std::atomic<bool>> cancelled;
  // Once, on a thread of the publisher: OK when the store has acknowledged every chunk. Otherwise the tally says what
  // it had acknowledged by then.
  std::function<void(absl::Status, const PublishTally&)> on_done;
};

struct ChunkPublisherOptions {
  std::shared_ptr<chunk::ChunkStore> store;
  std::chrono::milliseconds offer_timeout{2000};   // of one put of a run that nobody waits for
  std::chrono::milliseconds order_timeout{30000};  // of one put of an order: a durable one waits for the store's disk
  size_t max_offers = 8;                           // runs that wait; more are not published
  size_t max_orders = 16;                          // orders that wait
  size_t order_threads = 2;  // orders at a time: one is packed while another one's puts are under way
  // What `count` tokens from position `first` on would take to compute again: the store keeps the dear ones longer.
  // Null: not said. Any thread.
  std::function<double(int64_t first, int32_t count)> recompute_seconds;
  std::function<void()> on_released;  // pages were given back; must not block
};

// One thread for what is offered, in the background, and some for orders, so that neither waits for the other. Holds
// the pages of what waits, and each thread packs at most one window of chunks at a time. Offer and Order may be called
// from any thread.
class ChunkPublisher {
 public:
  ChunkPublisher(std::shared_ptr<const Model> model, const ChunkPublisherOptions& options);
  ~ChunkPublisher();  // Stop() must have been called

  // Best effort. False: not taken, too many wait.
  bool Offer(ChunkRun run) { return Count(offers_.TryPush(std::move(run))); }
  // False: not taken, too many wait or stopping; on_done does not run.
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
  // The pages of an offer or an order were given back.
  void Released();
  void OfferLoop();
  void OrderLoop();
  absl::Status Fulfil(const PublishOrder& order, PublishTally& tally);
  absl::StatusOr<chunk::Chunk> Pack(const ChunkRun& run, size_t index) const;
  // Chunks [begin, end) of the run in one put.
  absl::Status PutWindow(const ChunkRun& run, size_t begin, size_t end, const chunk::PutOptions& put, Deadline deadline,
                         PublishTally& tally);
  // Fails when the store does not acknowledge all of them; the names are for the message.
  absl::StatusOr<chunk::PutReport> PutAll(std::span<const chunk::Chunk> chunks, const chunk::PutOptions& put,
                                          Deadline deadline, std::string_view what);
  absl::Status PutQuantized(const ChunkRun& run, std::span<const chunk::Chunk> chunks, const chunk::PutOptions& put,
                            Deadline deadline);
  absl::Status PutSummary(const ChunkRun& run, const chunk::PutOptions& put, Deadline deadline);
  size_t WindowEnd(const ChunkRun& run, size_t begin) const;

  const std::shared_ptr<const Model> model_;
  const ChunkPublisherOptions options_;
  BoundedQueue<ChunkRun> offers_;
  BoundedQueue<PublishOrder> orders_;
  std::atomic<int64_t> num_held_{0};
  std::vector<std::thread> threads_;  // last: they start when the rest is there
};

}  // namespace spl::engine
