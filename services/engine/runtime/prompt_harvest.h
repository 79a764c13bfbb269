// Keeps the KV of finished prompts: makes it available to later prompts, in this worker and in the store.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "services/engine/runtime/canonical_prefill.h"
#include "services/engine/runtime/chunk_publisher.h"
#include "services/engine/runtime/local_kv.h"
#include "services/engine/runtime/prefill_job.h"
#include "services/engine/runtime/prefill_options.h"

namespace spl::engine {

// Only exact KV is offered to others (docs/methods/provenance.md). KV after the first copy stays with its request and
// its conversation. Engine thread.
class PromptHarvest {
 public:
  // All references outlive it.
  PromptHarvest(std::shared_ptr<const Model> model, PagePool& pool, LocalKv& local, CanonicalPrefill& canonical,
                const PrefillEngineOptions& options)
      : model_(std::move(model)), pool_(pool), local_(local), canonical_(canonical), options_(options) {}

  // Starts the publisher, if there is a store. The functions are those of ChunkPublisherOptions.
  void Start(std::function<double(int64_t first, int32_t count)> recompute_seconds, std::function<void()> on_released,
             std::function<bool(SteadyTime)> wait_for_idle);
  void Stop();
  // Whether the publisher holds pages that it will give back.
  bool busy() const { return publisher_ != nullptr && publisher_->busy(); }

  // Called for a prompt whose run is done: indexes its exact start and its segments, keeps the conversation's KV,
  // queues missing segments to be computed in the background, and offers new chunks to the store.
  void Keep(const PrefillJob& job);
  // Offers a segment to the store, which takes the chunks that it does not have.
  void Offer(std::shared_ptr<const SegmentSource> source, std::vector<chunk::ChunkKey> keys,
             const chunk::Digest& namespace_key, bool quantized);
  // Hands the segments of a published context, with the job's pages, to the publisher, which calls `on_done` from a
  // thread of its own. Unavailable: it is stopping, and on_done does not run.
  absl::Status Publish(PrefillJob& job, std::function<void(absl::Status, const PublishTally&)> on_done);

 private:
  void IndexPrefix(const PrefillJob& job);
  void IndexSegments(const PrefillJob& job);
  void KeepSession(const PrefillJob& job);
  void NoteMissingSegments(const PrefillJob& job);
  void OfferSummaries(const PrefillJob& job);
  void OfferQuantized(const PrefillJob& job);
  bool publishes() const { return publisher_ != nullptr && options_.publish; }

  const std::shared_ptr<const Model> model_;
  PagePool& pool_;
  LocalKv& local_;
  CanonicalPrefill& canonical_;
  const PrefillEngineOptions& options_;
  std::unique_ptr<ChunkPublisher> publisher_;  // null without a store
};

}  // namespace spl::engine
