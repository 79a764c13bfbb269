#include "services/transport/bandwidth.h"

#include <algorithm>

#include "services/base/status.h"

namespace spl::transport {

absl::StatusOr<double> MeasureBandwidth(KvChannel& channel, std::span<const std::byte> scratch, int repeats,
                                        std::chrono::nanoseconds timeout) {
  using Clock = std::chrono::steady_clock;
  if (scratch.empty() || repeats < 1) return InvalidArgument("a bandwidth measurement needs bytes and repeats");
  const Clock::time_point deadline = Clock::now() + timeout;
  double best = 0;
  for (int i = 0; i < repeats; ++i) {
    const Clock::time_point start = Clock::now();
    SPLICE_RETURN_IF_ERROR(channel.Put({{scratch.data(), 0, scratch.size()}}, [](absl::Status) {}));
    SPLICE_RETURN_IF_ERROR(channel.FlushAndWait(deadline - start));
    const std::chrono::duration<double> taken = Clock::now() - start;
    best = std::max(best, static_cast<double>(scratch.size()) / taken.count());
  }
  return best;
}

}  // namespace spl::transport
