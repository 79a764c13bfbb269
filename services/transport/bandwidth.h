// A transport self-test: what a channel really moves.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>

#include "absl/status/statusor.h"
#include "services/transport/kv_transport.h"

namespace spl::transport {

// What a way costs: the rate of large writes, and what each write adds to that.
struct WriteCost {
  double bytes_per_s = 0;  // 0: not measured
  double write_s = 0;
};

inline constexpr size_t kCostPieces = 32;
inline constexpr size_t kMinScratchBytes = 2 * kCostPieces;

// From the best of some rounds of `write` in one piece of `bytes`, and in kCostPieces of `bytes_in_pieces` together,
// which are apart from each other (neighbours may be joined to one write). Blocks; errors are those of `write`.
absl::StatusOr<WriteCost> MeasureWriteCost(size_t bytes, size_t bytes_in_pieces,
                                           const std::function<absl::Status(bool in_pieces)>& write);
// The same of a channel; overwrites `bytes` of its remote memory, at least kMinScratchBytes, at `offset`. `timeout` is
// of each flush.
absl::StatusOr<WriteCost> MeasureWriteCost(KvChannel& channel, uint64_t offset, size_t bytes,
                                           std::chrono::nanoseconds timeout);

}  // namespace spl::transport
