// The chunk store behind a splice-kvstore.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "services/base/tls.h"
#include "services/chunk/chunk.h"
#include "services/transport/kv_transport.h"

namespace spl::chunk {

struct RemoteStoreOptions {
  // Payloads travel by RMA where the store has registered memory that this transport reaches, else as gRPC streams.
  // Borrowed; null: streams only.
  transport::KvTransport* transport = nullptr;
  std::shared_ptr<const PeerTls> tls;  // of the gRPC channel; null: without
  // Chunks of another model or page layout end a call with FailedPrecondition, which names both.
  struct Model {
    Digest fingerprint{};
    Digest layout_digest{};
  };
  std::optional<Model> model;
};

// Blocking calls over one gRPC channel, which connects when first used and again after a loss. Any thread may call.
// A key that is not stored is an answer; Unavailable, DeadlineExceeded (CountLeading and Put), ResourceExhausted,
// FailedPrecondition and DataLoss (bytes that are not what their header says, or not the chunk asked for) are failures.
class RemoteChunkStore : public ChunkStore {
 public:
  // `address` is HOST:PORT. Does not wait for the connection. InvalidArgument: malformed address.
  static absl::StatusOr<std::unique_ptr<RemoteChunkStore>> Connect(const std::string& address,
                                                                   const RemoteStoreOptions& options = {});

  // How payloads travelled last: "shm", "tcp", "rdma", or "grpc".
  virtual std::string data_path() const = 0;
};

}  // namespace spl::chunk
