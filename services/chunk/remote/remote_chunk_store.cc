#include "services/chunk/remote/remote_chunk_store.h"

#include <grpcpp/create_channel.h>

#include "services/base/address.h"
#include "services/base/grpc_status.h"
#include "services/base/status.h"
#include "services/chunk/chunk_header.h"
#include "services/chunk/remote/chunk_wire.h"
#include "spl/v1/kvstore.grpc.pb.h"

namespace spl::chunk {
namespace {

using Deadline = std::chrono::steady_clock::time_point;

class GrpcChunkStore final : public RemoteChunkStore {
 public:
  explicit GrpcChunkStore(const std::string& address)
      : address_(address),
        stub_(
            v1::KvStore::NewStub(grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), Arguments()))) {
  }

  absl::StatusOr<size_t> CountLeading(std::span<const ChunkKey> keys, Deadline deadline) override;
  absl::StatusOr<size_t> GetLeading(std::span<const ChunkKey> keys, Deadline deadline,
                                    const std::function<bool(Chunk&&)>& sink) override;
  absl::Status Put(std::span<const Chunk> chunks, Deadline deadline) override;

 private:
  static grpc::ChannelArguments Arguments() {
    grpc::ChannelArguments arguments;
    // A restarted store is found again within a second, not after gRPC's two minutes.
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
    return arguments;
  }
  absl::Status Explain(const grpc::Status& status) const {
    return Annotate(FromGrpcStatus(status), "chunk store " + address_);
  }

  const std::string address_;
  const std::unique_ptr<v1::KvStore::Stub> stub_;
};

template <typename Request>
Request RequestFor(std::span<const ChunkKey> keys) {
  Request request;
  for (const ChunkKey& key : keys) request.add_keys(key.bytes.data(), key.bytes.size());
  return request;
}

absl::StatusOr<size_t> GrpcChunkStore::CountLeading(std::span<const ChunkKey> keys, Deadline deadline) {
  if (keys.empty()) return 0;
  grpc::ClientContext context;
  context.set_deadline(ToGrpcDeadline(deadline));
  v1::ContainsResponse response;
  SPLICE_RETURN_IF_ERROR(Explain(stub_->Contains(&context, RequestFor<v1::ContainsRequest>(keys), &response)));
  if (response.num_leading() > keys.size()) {
    return Errorf(absl::StatusCode::kInternal, "chunk store {} counts {} of {} keys", address_, response.num_leading(),
                  keys.size());
  }
  return response.num_leading();
}

absl::StatusOr<size_t> GrpcChunkStore::GetLeading(std::span<const ChunkKey> keys, Deadline deadline,
                                                  const std::function<bool(Chunk&&)>& sink) {
  if (keys.empty()) return 0;
  grpc::ClientContext context;
  context.set_deadline(ToGrpcDeadline(deadline));
  const auto reader = stub_->Get(&context, RequestFor<v1::GetChunksRequest>(keys));
  ChunkAssembler assembler;
  v1::ChunkPart part;
  size_t accepted = 0;
  absl::Status problem;
  bool enough = false;
  while (!enough && reader->Read(&part)) {
    absl::StatusOr<std::optional<Chunk>> chunk = assembler.Add(part);
    if (!chunk.ok()) {
      problem = Errorf(absl::StatusCode::kDataLoss, "chunk store {}: {}", address_, MessageOf(chunk.status()));
      break;
    }
    if (!chunk->has_value()) continue;
    if (accepted >= keys.size() || (*chunk)->header.key != keys[accepted]) {
      problem = Errorf(absl::StatusCode::kDataLoss, "chunk store {} sent another chunk than asked for", address_);
      break;
    }
    enough = !sink(std::move(**chunk));
    if (!enough) ++accepted;
    // What stands in the receive buffers must not be delivered after the deadline.
    enough = enough || std::chrono::steady_clock::now() >= deadline;
  }
  if (enough || !problem.ok()) context.TryCancel();
  const grpc::Status status = reader->Finish();
  if (!problem.ok()) return problem;
  if (enough || status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) return accepted;
  SPLICE_RETURN_IF_ERROR(Explain(status));
  if (assembler.pending()) {
    return Errorf(absl::StatusCode::kDataLoss, "chunk store {} ended in the middle of a chunk", address_);
  }
  return accepted;
}

absl::Status GrpcChunkStore::Put(std::span<const Chunk> chunks, Deadline deadline) {
  if (chunks.empty()) return absl::OkStatus();
  for (const Chunk& chunk : chunks) SPLICE_RETURN_IF_ERROR(CheckHeaderFields(chunk.header));
  grpc::ClientContext context;
  context.set_deadline(ToGrpcDeadline(deadline));
  v1::PutChunksResponse response;
  const auto writer = stub_->Put(&context, &response);
  v1::ChunkPart part;
  bool open = true;  // false: the store has ended the call; its status says why
  for (size_t i = 0; i < chunks.size() && open; ++i) {
    ChunkCutter cutter(chunks[i]);
    while (open && cutter.Next(part)) open = writer->Write(part);
  }
  writer->WritesDone();
  return Explain(writer->Finish());
}

}  // namespace

absl::StatusOr<std::unique_ptr<RemoteChunkStore>> RemoteChunkStore::Connect(const std::string& address) {
  SPLICE_ASSIGN_OR_RETURN(const HostPort parsed, ParseHostPort(address));
  return std::make_unique<GrpcChunkStore>(parsed.ToString());
}

}  // namespace spl::chunk
