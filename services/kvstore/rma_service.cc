#include "services/kvstore/rma_service.h"

#include <atomic>
#include <mutex>

#include "services/base/fault_point.h"
#include "services/base/grpc_status.h"
#include "services/base/grpc_trace.h"
#include "services/base/status.h"
#include "services/chunk/remote/chunk_wire.h"
#include "services/kvstore/read_leading.h"

namespace spl::kvstore {
namespace {

FaultPoint lease_fault("kvstore.rma.lease");      // corrupt: one payload changes under its lease
FaultPoint release_fault("kvstore.rma.release");  // delays the look at a reader's suspects
FaultPoint commit_fault("kvstore.rma.commit");    // drop: the answer is lost; the chunks are stored

constexpr int kMaxChunksPerPut = 1 << 14;

// State of one commit, held by the chunks that wait for the disk and by the loop that publishes them; the last one
// answers.
struct CommitState {
  v1::PutChunksResponse* response;
  grpc::ServerUnaryReactor* reactor;
  bool durable = false;
  std::mutex mutex;  // guards all below
  absl::Status status;
  size_t outstanding = 1;
  uint32_t num_durable = 0;

  void Release(const absl::Status& cause) {
    {
      std::lock_guard lock(mutex);
      status.Update(cause);
      if (--outstanding > 0) return;
    }
    response->set_num_durable(num_durable);
    reactor->Finish(ToGrpcStatus(status));
  }
};

}  // namespace

absl::Status RmaService::CheckTransport() const {
  if (transport_ != nullptr && store_.memory().registered() != nullptr) return absl::OkStatus();
  return Errorf(absl::StatusCode::kUnimplemented,
                "this store has no memory registered for RMA; start it with --kv-transport auto, or use streams");
}

grpc::ServerUnaryReactor* RmaService::OnPool(grpc::CallbackServerContext* context, std::function<absl::Status()> work) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  absl::Status status = CheckTransport();
  if (status.ok()) {
    if (pool_.Submit([work = std::move(work), reactor] { reactor->Finish(ToGrpcStatus(work())); })) return reactor;
    status = Errorf(absl::StatusCode::kResourceExhausted, "too many calls are waiting");
  }
  reactor->Finish(ToGrpcStatus(status));
  return reactor;
}

grpc::ServerUnaryReactor* RmaService::GetDataEndpoint(grpc::CallbackServerContext* context,
                                                      const v1::GetDataEndpointRequest*, v1::DataEndpoint* response) {
  const absl::Status status = CheckTransport();
  if (status.ok()) {
    const transport::RegisteredMemory& memory = *store_.memory().registered();
    response->set_address(transport_->listen_address());
    response->set_rkey(memory.packed_rkey());
    response->set_base(reinterpret_cast<uint64_t>(memory.data()));
    response->set_size(store_.memory().size());
    response->set_host_id(transport::HostId());
    response->set_instance_id(instance_id_);
  }
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  reactor->Finish(ToGrpcStatus(status));
  return reactor;
}

grpc::ServerUnaryReactor* RmaService::Lease(grpc::CallbackServerContext* context, const v1::LeaseRequest* request,
                                            v1::LeaseResponse* response) {
  const auto span = std::make_shared<Span>(tracer_, "store.lease", AcceptTrace(tracer_, *context), SpanKind::kServer);
  span->Set("splice.keys", int64_t{request->keys_size()});
  return OnPool(context, [=, this] {
    const absl::Status status = DoLease(*request, *response);
    span->Set("splice.chunks", int64_t{response->chunks_size()});
    span->SetStatus(status);
    span->End();
    return status;
  });
}

absl::Status RmaService::DoLease(const v1::LeaseRequest& request, v1::LeaseResponse& response) {
  SPLICE_ASSIGN_OR_RETURN(const std::vector<chunk::ChunkKey> keys, chunk::KeysFromWire(request.keys()));
  response.set_instance_id(instance_id_);
  auto [chunks, stopped, limited] = ReadLeading(store_, keys, request.max_bytes());
  if (!stopped.ok() && chunks.empty()) return stopped;
  const bool all = chunks.size() == keys.size();
  response.set_end(all                        ? v1::LeaseResponse::END_OF_KEYS
                   : limited || !stopped.ok() ? v1::LeaseResponse::END_LIMIT
                                              : v1::LeaseResponse::END_MISSING);
  if (chunks.empty()) return absl::OkStatus();
  if (lease_fault.armed() && lease_fault.Hit().corrupt) chunks.back()->payload()[0] ^= std::byte(1);
  for (const StoredChunkRef& chunk : chunks) {
    v1::LeasedChunk& leased = *response.add_chunks();
    *leased.mutable_meta() = chunk::MetaFromHeader(chunk->header);
    leased.set_offset(chunk->slot.region_offset() + chunk::kEncodedHeaderBytes);
  }
  SPLICE_ASSIGN_OR_RETURN(const LeaseTable::Grant grant,
                          leases_.Take(std::move(chunks), std::chrono::milliseconds(request.ttl_ms())));
  response.set_lease_id(grant.id.ToBytes());
  response.set_ttl_ms(static_cast<uint32_t>(grant.ttl.count()));
  return absl::OkStatus();
}

grpc::ServerUnaryReactor* RmaService::RenewLease(grpc::CallbackServerContext* context,
                                                 const v1::RenewLeaseRequest* request,
                                                 v1::RenewLeaseResponse* response) {
  const auto renew = [&]() -> absl::Status {
    SPLICE_ASSIGN_OR_RETURN(const RandomId id, RandomId::FromBytes(request->lease_id()));
    SPLICE_ASSIGN_OR_RETURN(const auto ttl, leases_.Renew(id, std::chrono::milliseconds(request->ttl_ms())));
    response->set_ttl_ms(static_cast<uint32_t>(ttl.count()));
    return absl::OkStatus();
  };
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  reactor->Finish(ToGrpcStatus(renew()));
  return reactor;
}

grpc::ServerUnaryReactor* RmaService::ReleaseLease(grpc::CallbackServerContext* context,
                                                   const v1::ReleaseLeaseRequest* request, v1::ReleaseLeaseResponse*) {
  const auto release = [this, request]() -> absl::Status {
    SPLICE_ASSIGN_OR_RETURN(const RandomId id, RandomId::FromBytes(request->lease_id()));
    SPLICE_ASSIGN_OR_RETURN(const auto suspects, chunk::KeysFromWire(request->suspect_keys()));
    if (release_fault.armed() && !suspects.empty()) (void)release_fault.Hit();
    // Only chunks that this reader could have read, because verifying each checksum takes time.
    for (const chunk::ChunkKey& key : leases_.HeldOf(id, suspects)) store_.DropIfDamaged(key);
    leases_.Release(id);
    return absl::OkStatus();
  };
  if (request->suspect_keys_size() > 0) return OnPool(context, release);
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  reactor->Finish(ToGrpcStatus(release()));
  return reactor;
}

grpc::ServerUnaryReactor* RmaService::ReservePut(grpc::CallbackServerContext* context,
                                                 const v1::ReservePutRequest* request,
                                                 v1::ReservePutResponse* response) {
  return OnPool(context, [=, this] { return DoReserve(*request, *response); });
}

absl::Status RmaService::DoReserve(const v1::ReservePutRequest& request, v1::ReservePutResponse& response) {
  if (request.chunks_size() > kMaxChunksPerPut) {
    return InvalidArgument("chunks: {} are more than {}", request.chunks_size(), kMaxChunksPerPut);
  }
  if (request.chunks().empty()) return absl::InvalidArgumentError("chunks: a put reserves at least one");
  SPLICE_ASSIGN_OR_RETURN(const chunk::PutOptions options, chunk::PutOptionsFromWire(request.options()));
  response.set_instance_id(instance_id_);
  std::vector<PreparedPut> puts;
  for (const v1::ChunkMeta& meta : request.chunks()) {
    SPLICE_ASSIGN_OR_RETURN(const chunk::ChunkHeader header, chunk::HeaderFromMeta(meta));
    SPLICE_ASSIGN_OR_RETURN(PreparedPut put, store_.Prepare(header, options, true));
    const bool existing = !put.slot.has_value();
    response.add_existing(existing);
    response.add_offsets(existing ? 0 : put.slot->region_offset() + chunk::kEncodedHeaderBytes);
    puts.push_back(std::move(put));
  }
  SPLICE_ASSIGN_OR_RETURN(const PutTable::Grant grant,
                          puts_.Add(std::move(puts), std::chrono::milliseconds(request.ttl_ms())));
  response.set_reservation_id(grant.id.ToBytes());
  response.set_ttl_ms(static_cast<uint32_t>(grant.ttl.count()));
  return absl::OkStatus();
}

grpc::ServerUnaryReactor* RmaService::CommitPut(grpc::CallbackServerContext* context,
                                                const v1::CommitPutRequest* request, v1::PutChunksResponse* response) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  if (!pool_.Submit([=, this] { DoCommit(*request, *response, reactor); })) {
    reactor->Finish(ToGrpcStatus(Errorf(absl::StatusCode::kResourceExhausted, "too many calls are waiting")));
  }
  return reactor;
}

void RmaService::DoCommit(const v1::CommitPutRequest& request, v1::PutChunksResponse& response,
                          grpc::ServerUnaryReactor* reactor) {
  const auto take = [&]() -> absl::StatusOr<std::vector<PreparedPut>> {
    SPLICE_ASSIGN_OR_RETURN(const RandomId id, RandomId::FromBytes(request.reservation_id()));
    SPLICE_ASSIGN_OR_RETURN(std::vector<PreparedPut> puts, puts_.Take(id));
    for (const PreparedPut& put : puts) SPLICE_RETURN_IF_ERROR(put.Verify());  // all before the first is published
    return puts;
  };
  absl::StatusOr<std::vector<PreparedPut>> puts = take();
  const auto state = std::make_shared<CommitState>();
  state->response = &response;
  state->reactor = reactor;
  absl::Status status = puts.status();
  for (size_t i = 0; status.ok() && i < puts->size(); ++i) {
    PreparedPut& put = (*puts)[i];
    const bool durable = put.options.durable;
    {
      std::lock_guard lock(state->mutex);
      ++state->outstanding;
    }
    const auto result = store_.Publish(std::move(put), [state, durable](const absl::Status& on_disk) {
      {
        std::lock_guard lock(state->mutex);
        if (on_disk.ok()) ++state->num_durable;
      }
      state->Release(durable ? on_disk : absl::OkStatus());
    });
    if (!result.ok()) {
      state->Release(result.status());  // for this chunk, whose callback does not run
      status = result.status();
    } else if (*result == TieredStore::PutResult::kStored) {
      response.set_num_stored(response.num_stored() + 1);
    } else {
      response.set_num_existing(response.num_existing() + 1);
    }
  }
  if (commit_fault.armed() && commit_fault.Hit().drop) status = absl::UnavailableError("the answer was lost");
  state->Release(status);
}

grpc::ServerUnaryReactor* RmaService::AbortPut(grpc::CallbackServerContext* context, const v1::AbortPutRequest* request,
                                               v1::AbortPutResponse*) {
  const absl::StatusOr<RandomId> id = RandomId::FromBytes(request->reservation_id());
  if (id.ok()) puts_.Abort(*id, request->writer_quiet());
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  reactor->Finish(ToGrpcStatus(id.status()));
  return reactor;
}

}  // namespace spl::kvstore
