// A chunk store whose reads are measured.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <utility>

#include "services/chunk/chunk.h"
#include "services/engine/runtime/link_meter.h"

namespace spl::engine {

// Passes every call on. Any thread.
class MeteredStore final : public chunk::ChunkStore {
 public:
  // `meter` outlives it.
  MeteredStore(std::shared_ptr<chunk::ChunkStore> store, LinkMeter& meter) : store_(std::move(store)), meter_(meter) {}

  absl::StatusOr<size_t> CountLeading(std::span<const chunk::ChunkKey> keys, SteadyTime deadline) override {
    return store_->CountLeading(keys, deadline);
  }
  absl::StatusOr<size_t> GetLeading(std::span<const chunk::ChunkKey> keys, SteadyTime deadline,
                                    const std::function<bool(chunk::Chunk&&)>& sink) override;
  absl::StatusOr<size_t> FetchLeading(std::span<const chunk::ChunkKey> keys, SteadyTime deadline, const PlaceFn& place,
                                      const FetchedFn& sink) override;
  absl::Status Put(std::span<const chunk::Chunk> chunks, SteadyTime deadline) override {
    return store_->Put(chunks, deadline);
  }
  absl::StatusOr<chunk::PutReport> PutWith(std::span<const chunk::Chunk* const> chunks,
                                           const chunk::PutOptions& options, SteadyTime deadline) override {
    return store_->PutWith(chunks, options, deadline);
  }

 private:
  const std::shared_ptr<chunk::ChunkStore> store_;
  LinkMeter& meter_;
};

}  // namespace spl::engine
