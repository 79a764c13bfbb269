// A chunk store in a splice-kvstore process.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "services/base/tls.h"
#include "services/chunk/chunk.h"
#include "services/transport/kv_transport.h"

namespace spl::chunk {

struct RemoteStoreOptions {
  // Payloads travel by RMA if the store has registered memory that this transport reaches, otherwise as gRPC streams.
  // Borrowed. Null: streams only.
  transport::KvTransport* transport = nullptr;
  std::shared_ptr<const PeerTls> tls;  // for the gRPC channel; null: no TLS
  // The reader's model: chunks of another model or page layout end a call with FailedPrecondition, which names both.
  struct Model {
    Digest fingerprint{};
    Digest layout_digest{};
  };
  std::optional<Model> model;
};

// Blocking calls over one gRPC channel, which connects at first use and reconnects after a loss. Any thread may call. A
// missing key is an answer, not a failure. Failures: Unavailable, DeadlineExceeded (CountLeading and Put),
// ResourceExhausted, FailedPrecondition, and DataLoss (bytes that do not match their header, or not the requested
// chunk).
class RemoteChunkStore : public ChunkStore {
 public:
  // `address` is HOST:PORT. Does not wait for the connection. InvalidArgument: malformed address.
  static absl::StatusOr<std::unique_ptr<RemoteChunkStore>> Connect(const std::string& address,
                                                                   const RemoteStoreOptions& options = {});

  // How payloads last travelled: "shm", "tcp", "rdma", or "grpc".
  virtual std::string data_path() const = 0;
};

}  // namespace spl::chunk
