#include "services/chunk/remote/remote_chunk_store.h"

#include <deque>

#include "services/base/address.h"
#include "services/base/grpc_status.h"
#include "services/base/grpc_trace.h"
#include "services/base/log.h"
#include "services/base/status.h"
#include "services/chunk/chunk_header.h"
#include "services/chunk/remote/chunk_wire.h"
#include "services/chunk/remote/rma_client.h"
#include "services/chunk/remote/store_call.h"
#include "spl/v1/kvstore.grpc.pb.h"

namespace spl::chunk {
namespace {

using Deadline = std::chrono::steady_clock::time_point;

class GrpcChunkStore final : public RemoteChunkStore {
 public:
  GrpcChunkStore(const std::string& address, const RemoteStoreOptions& options)
      : address_(address),
        options_(options),
        channel_(MakePeerChannel(address, options.tls.get(), Arguments())),
        stub_(v1::KvStore::NewStub(channel_)) {
    if (options.transport != nullptr) rma_.emplace(channel_, *options.transport, address);
  }

  absl::StatusOr<size_t> CountLeading(std::span<const ChunkKey> keys, Deadline deadline) override;
  absl::StatusOr<size_t> GetLeading(std::span<const ChunkKey> keys, Deadline deadline,
                                    const std::function<bool(Chunk&&)>& sink) override;
  absl::Status Put(std::span<const Chunk> chunks, Deadline deadline) override {
    return PutWith(PointersTo(chunks), {}, deadline).status();
  }
  absl::StatusOr<size_t> FetchLeading(std::span<const ChunkKey> keys, Deadline deadline, const PlaceFn& place,
                                      const FetchedFn& sink) override;
  absl::StatusOr<PutReport> PutWith(std::span<const Chunk* const> chunks, const PutOptions& options,
                                    Deadline deadline) override;
  std::string data_path() const override {
    const std::string carrier = rma_.has_value() ? rma_->carrier() : "";
    return carrier.empty() ? "grpc" : carrier;
  }

 private:
  absl::StatusOr<size_t> StreamLeading(std::span<const ChunkKey> keys, Deadline deadline,
                                       const std::function<bool(Chunk&&)>& sink);
  absl::StatusOr<PutReport> StreamPut(std::span<const Chunk* const> chunks, const PutOptions& options,
                                      Deadline deadline);
  absl::Status CheckModel(const ChunkHeader& header) const {
    if (!options_.model.has_value()) return absl::OkStatus();
    return Annotate(CheckSameModel(header, options_.model->fingerprint, options_.model->layout_digest),
                    "chunk store " + address_);
  }
  static grpc::ChannelArguments Arguments() {
    grpc::ChannelArguments arguments;
    // A restarted store is found again within a second, not after gRPC's two minutes.
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
    return arguments;
  }
  absl::Status Explain(const grpc::Status& status) const {
    return Annotate(FromStoreStatus(status), "chunk store " + address_);
  }

  const std::string address_;
  const RemoteStoreOptions options_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::KvStore::Stub> stub_;
  std::optional<RmaClient> rma_;
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
  AddTrace(context, CurrentTrace());
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
  if (!rma_.has_value()) return StreamLeading(keys, deadline, sink);
  std::deque<Chunk> placed;  // not yet verified, in order
  const auto place = [&](size_t, const ChunkHeader& header) -> Pieces {
    placed.push_back({header, std::vector<std::byte>(header.payload_bytes)});
    return {placed.back().payload};
  };
  return FetchLeading(keys, deadline, place, [&](size_t, const ChunkHeader&) {
    Chunk chunk = std::move(placed.front());
    placed.pop_front();
    return sink(std::move(chunk));
  });
}

absl::StatusOr<size_t> GrpcChunkStore::FetchLeading(std::span<const ChunkKey> keys, Deadline deadline,
                                                    const PlaceFn& place, const FetchedFn& sink) {
  absl::Status foreign;
  std::deque<Pieces> unused;  // pieces of chunks that were placed by a path that did not deliver them
  size_t accepted = 0;
  const auto checked_place = [&](size_t index, const ChunkHeader& header) -> Pieces {
    foreign = CheckModel(header);
    if (!foreign.ok()) return {};
    unused.push_back(place(index, header));
    return unused.back();
  };
  const auto checked_sink = [&](size_t index, const ChunkHeader& header) {
    unused.pop_front();
    return sink(index, header);
  };
  if (rma_.has_value() && !keys.empty()) {
    const RmaClient::Fetched fetched = rma_->Fetch(keys, deadline, checked_place, checked_sink);
    SPLICE_RETURN_IF_ERROR(foreign);
    accepted = fetched.accepted;
    if (fetched.finished) {
      SPLICE_RETURN_IF_ERROR(Annotate(fetched.status, "chunk store " + address_));
      return accepted;
    }
  }
  // Fetches by stream, into pieces that were placed for the other path.
  absl::Status problem;
  size_t index = accepted;
  const auto copy = [&](Chunk&& chunk) {
    if (unused.empty()) checked_place(index, chunk.header);
    if (unused.empty() || unused.front().empty()) return false;
    problem = CheckPieces(chunk.header, unused.front());
    if (!problem.ok()) return false;
    CopyToPieces(chunk.payload, unused.front());
    return checked_sink(index++, chunk.header);
  };
  SPLICE_ASSIGN_OR_RETURN(const size_t streamed, StreamLeading(keys.subspan(accepted), deadline, copy));
  SPLICE_RETURN_IF_ERROR(foreign);
  SPLICE_RETURN_IF_ERROR(problem);
  return accepted + streamed;
}

absl::StatusOr<size_t> GrpcChunkStore::StreamLeading(std::span<const ChunkKey> keys, Deadline deadline,
                                                     const std::function<bool(Chunk&&)>& sink) {
  if (keys.empty()) return 0;
  grpc::ClientContext context;
  context.set_deadline(ToGrpcDeadline(deadline));
  AddTrace(context, CurrentTrace());
  const auto reader = stub_->Get(&context, RequestFor<v1::GetChunksRequest>(keys));
  ChunkAssembler assembler;
  v1::ChunkPart part;
  size_t accepted = 0;
  absl::Status problem;
  bool enough = false;
  while (!enough && reader->Read(&part)) {
    absl::StatusOr<std::optional<Chunk>> chunk = assembler.Add(part);
    if (chunk.status().code() == absl::StatusCode::kDataLoss) {
      // The store looks at its bytes before it sends them: these changed on the way. A miss, as a corrupt chunk is.
      log::Warning("chunk_store.damaged_stream", log::F("store", address_), log::F("cause", chunk.status()));
      enough = true;
      break;
    }
    if (!chunk.ok()) {
      problem = Errorf(absl::StatusCode::kDataLoss, "chunk store {}: {}", address_, MessageOf(chunk.status()));
      break;
    }
    if (!chunk->has_value()) continue;
    if (accepted >= keys.size() || (*chunk)->header.key != keys[accepted]) {
      problem = Errorf(absl::StatusCode::kDataLoss, "chunk store {} sent another chunk than asked for", address_);
      break;
    }
    problem = CheckModel((*chunk)->header);
    if (!problem.ok()) break;
    enough = !sink(std::move(**chunk));
    if (!enough) ++accepted;
    // Data left in the receive buffers must not be delivered after the deadline.
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

absl::StatusOr<PutReport> GrpcChunkStore::PutWith(std::span<const Chunk* const> chunks, const PutOptions& options,
                                                  Deadline deadline) {
  if (chunks.empty()) return PutReport{};
  for (const Chunk* const chunk : chunks) SPLICE_RETURN_IF_ERROR(CheckHeaderFields(chunk->header));
  PutReport report;
  if (rma_.has_value()) {
    const RmaClient::Stored stored = rma_->Put(chunks, options, deadline);
    if (stored.finished) {
      SPLICE_RETURN_IF_ERROR(Annotate(stored.status, "chunk store " + address_));
      return stored.report;
    }
    report = stored.report;
    chunks = chunks.subspan(stored.num_done);
  }
  SPLICE_ASSIGN_OR_RETURN(const PutReport streamed, StreamPut(chunks, options, deadline));
  report.num_stored += streamed.num_stored;
  report.num_existing += streamed.num_existing;
  report.num_durable += streamed.num_durable;
  return report;
}

absl::StatusOr<PutReport> GrpcChunkStore::StreamPut(std::span<const Chunk* const> chunks, const PutOptions& options,
                                                    Deadline deadline) {
  grpc::ClientContext context;
  context.set_deadline(ToGrpcDeadline(deadline));
  v1::PutChunksResponse response;
  const auto writer = stub_->Put(&context, &response);
  v1::ChunkPart part;
  bool open = true;  // false: the store has ended the call; its status says why
  for (size_t i = 0; i < chunks.size() && open; ++i) {
    ChunkCutter cutter(*chunks[i]);
    for (bool first = i == 0; open && cutter.Next(part); first = false) {
      if (first) *part.mutable_options() = PutOptionsToWire(options);
      open = writer->Write(part);
    }
  }
  writer->WritesDone();
  SPLICE_RETURN_IF_ERROR(Explain(writer->Finish()));
  return PutReport{response.num_stored(), response.num_existing(), response.num_durable()};
}

}  // namespace

absl::StatusOr<std::unique_ptr<RemoteChunkStore>> RemoteChunkStore::Connect(const std::string& address,
                                                                            const RemoteStoreOptions& options) {
  SPLICE_ASSIGN_OR_RETURN(const HostPort parsed, ParseHostPort(address));
  return std::make_unique<GrpcChunkStore>(parsed.ToString(), options);
}

}  // namespace spl::chunk
