// A transport self-test: what a channel really moves.
#pragma once

#include <chrono>
#include <span>

#include "absl/status/statusor.h"
#include "services/transport/kv_transport.h"

namespace spl::transport {

// Writes `scratch` to the start of the channel's remote memory `repeats` times, each followed by a flush, and returns
// the best rate in bytes per second. Overwrites that memory: use it before pages are handed out. Blocks; errors are
// those of Put and Flush, DeadlineExceeded after `timeout` in all.
absl::StatusOr<double> MeasureBandwidth(KvChannel& channel, std::span<const std::byte> scratch, int repeats,
                                        std::chrono::nanoseconds timeout);

}  // namespace spl::transport
