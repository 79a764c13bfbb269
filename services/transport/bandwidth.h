// A transport self-test: measures what a channel really moves.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>

#include "absl/status/statusor.h"
#include "services/transport/kv_transport.h"

namespace spl::transport {

// Cost of a path: the rate of large writes, and the additional cost of each write.
struct WriteCost {
  double bytes_per_s = 0;  // 0: not measured
  double write_s = 0;
};

inline constexpr size_t kCostPieces = 32;
inline constexpr size_t kMinScratchBytes = 2 * kCostPieces;

// Takes the best of several rounds. Each round times `write` of `bytes` in one piece, and of `bytes_in_pieces` in
// kCostPieces separate pieces (adjacent pieces may be joined into one write). Blocks. Returns the errors of `write`.
absl::StatusOr<WriteCost> MeasureWriteCost(size_t bytes, size_t bytes_in_pieces,
                                           const std::function<absl::Status(bool in_pieces)>& write);
// The same for a channel; overwrites `bytes` of its remote memory, at least kMinScratchBytes, at `offset`. `timeout`
// applies to each flush.
absl::StatusOr<WriteCost> MeasureWriteCost(KvChannel& channel, uint64_t offset, size_t bytes,
                                           std::chrono::nanoseconds timeout);

}  // namespace spl::transport
