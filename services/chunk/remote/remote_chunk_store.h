// The chunk store behind a splice-kvstore.
#pragma once

#include <memory>
#include <string>

#include "services/chunk/chunk.h"

namespace spl::chunk {

// Blocking calls over one gRPC channel, which connects when first used and again after a loss. Any thread may call.
// A key that is not stored is an answer; Unavailable, DeadlineExceeded (CountLeading and Put), ResourceExhausted and
// DataLoss (bytes that are not what their header says, or not the chunk asked for) are failures.
class RemoteChunkStore : public ChunkStore {
 public:
  // `address` is HOST:PORT. Does not wait for the connection. InvalidArgument: malformed address.
  static absl::StatusOr<std::unique_ptr<RemoteChunkStore>> Connect(const std::string& address);
};

}  // namespace spl::chunk
