#include "services/engine/runtime/metered_store.h"

namespace spl::engine {
namespace {

LinkMeter::Call::End EndOf(bool refused, SteadyTime deadline) {
  if (std::chrono::steady_clock::now() >= deadline) return LinkMeter::Call::End::kTimeOver;
  return refused ? LinkMeter::Call::End::kUnwanted : LinkMeter::Call::End::kComplete;
}

}  // namespace

absl::StatusOr<size_t> MeteredStore::GetLeading(std::span<const chunk::ChunkKey> keys, SteadyTime deadline,
                                                const std::function<bool(chunk::Chunk&&)>& sink) {
  LinkMeter::Call call(meter_);
  bool refused = false;
  auto count = store_->GetLeading(keys, deadline, [&](chunk::Chunk&& chunk) {
    call.Arrived(static_cast<int64_t>(chunk.payload.size()));
    refused = !sink(std::move(chunk));
    return !refused;
  });
  call.Ended(EndOf(refused, deadline));
  return count;
}

absl::StatusOr<size_t> MeteredStore::FetchLeading(std::span<const chunk::ChunkKey> keys, SteadyTime deadline,
                                                  const PlaceFn& place, const FetchedFn& sink) {
  LinkMeter::Call call(meter_);
  bool refused = false;
  auto count = store_->FetchLeading(keys, deadline, place, [&](size_t index, const chunk::ChunkHeader& header) {
    call.Arrived(static_cast<int64_t>(header.payload_bytes));
    refused = !sink(index, header);
    return !refused;
  });
  call.Ended(EndOf(refused, deadline));
  return count;
}

}  // namespace spl::engine
