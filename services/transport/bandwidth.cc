#include "services/transport/bandwidth.h"

#include <algorithm>
#include <vector>

#include "services/base/status.h"

namespace spl::transport {

absl::StatusOr<WriteCost> MeasureWriteCost(size_t bytes, size_t bytes_in_pieces,
                                           const std::function<absl::Status(bool in_pieces)>& write) {
  using Clock = std::chrono::steady_clock;
  constexpr int kRounds = 8;
  double best[2] = {};
  for (int round = 0; round < kRounds; ++round) {
    for (const bool in_pieces : {false, true}) {
      const auto start = Clock::now();
      SPLICE_RETURN_IF_ERROR(write(in_pieces));
      const double took = std::max(1e-9, std::chrono::duration<double>(Clock::now() - start).count());
      best[in_pieces] = round == 0 ? took : std::min(best[in_pieces], took);
    }
  }
  // As many bytes in one piece would have taken part of the time of the whole; both wait for one flush.
  const double in_one = best[0] * static_cast<double>(bytes_in_pieces) / static_cast<double>(bytes);
  return WriteCost{static_cast<double>(bytes) / best[0],
                   std::max(0.0, best[1] - in_one) / static_cast<double>(kCostPieces - 1)};
}

absl::StatusOr<WriteCost> MeasureWriteCost(KvChannel& channel, uint64_t offset, size_t bytes,
                                           std::chrono::nanoseconds timeout) {
  if (bytes < kMinScratchBytes)
    return InvalidArgument("the cost of writes needs {} bytes of scratch memory, not {}", kMinScratchBytes, bytes);
  const std::vector<std::byte> data(bytes, std::byte{0x5a});
  const size_t piece = bytes / (2 * kCostPieces);
  std::vector<PutOp> pieces;
  for (size_t i = 0; i < kCostPieces; ++i)
    pieces.push_back({data.data() + 2 * i * piece, offset + 2 * i * piece, piece});
  const std::vector<PutOp> whole = {{data.data(), offset, bytes}};
  return MeasureWriteCost(bytes, kCostPieces * piece, [&](bool in_pieces) -> absl::Status {
    SPLICE_RETURN_IF_ERROR(channel.Put(in_pieces ? pieces : whole, [](const absl::Status&) {}));
    return channel.FlushAndWait(timeout);
  });
}

}  // namespace spl::transport
