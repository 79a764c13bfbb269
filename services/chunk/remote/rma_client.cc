#include "services/chunk/remote/rma_client.h"

#include <condition_variable>
#include <deque>

#include "services/base/grpc_trace.h"
#include "services/base/log.h"
#include "services/base/status.h"
#include "services/chunk/chunk_header.h"
#include "services/chunk/remote/chunk_wire.h"
#include "services/chunk/remote/store_call.h"

namespace spl::chunk {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kConnectTimeout{2};
constexpr std::chrono::seconds kRetryAfterFailure{5};
// Limit per lease: a few milliseconds of copying, so that the next lease arrives in time and little is held at once.
constexpr uint64_t kLeaseBytes = 32 << 20;
constexpr int kLeaseKeys = 1024;
// Copies that are posted and not yet verified: the copying goes on while a chunk is verified, also when the verifying
// thread gets no core for a while (8 MiB were up to a fifth slower on a busy machine). At least two, however large.
constexpr uint64_t kInFlightBytes = 32 << 20;
constexpr size_t kInFlightChunksMin = 2;
constexpr size_t kInFlightChunks = 1024;
constexpr uint64_t kPutBytes = 32 << 20;
constexpr size_t kPutChunks = 1024;
constexpr std::chrono::seconds kQuietMargin{1};  // the store uses expired room again one ttl later (decision 0002)
constexpr std::chrono::seconds kCloseTimeout{10};
constexpr std::chrono::seconds kDetachedTimeout{5};

// A flag with a status, set by the transport's thread.
class Completion {
 public:
  void Set(absl::Status status) {
    std::lock_guard lock(mutex_);
    status_ = std::move(status);
    done_ = true;
    changed_.notify_all();
  }
  bool Wait(Clock::time_point deadline) {
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, deadline, [&] { return done_; });
  }
  void Wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_; });
  }
  const absl::Status& status() const { return status_; }  // after a Wait

 private:
  std::mutex mutex_;  // guards the next two
  std::condition_variable changed_;
  bool done_ = false;
  absl::Status status_;
};

}  // namespace

// One fetch: leases ahead of copies ahead of verification.
class RmaClient::FetchRun {
 public:
  FetchRun(RmaClient& client, std::shared_ptr<Connection> connection, std::span<const ChunkKey> keys, Deadline deadline)
      : client_(client), connection_(std::move(connection)), keys_(keys), deadline_(deadline) {}

  ~FetchRun() {
    if (pending_ != nullptr) {
      pending_->context.TryCancel();
      pending_->done.Wait();
    }
  }

  Fetched Run(const ChunkStore::PlaceFn& place, const ChunkStore::FetchedFn& sink) {
    StartLease();
    while (!ended_) {
      Fill(place);
      if (copies_.empty()) break;
      TakeFirst(sink);
    }
    Quiesce();
    return std::move(result_);
  }

 private:
  // A lease in use; released when its last chunk is verified.
  struct Lease {
    RmaClient& client;
    v1::LeaseResponse response;
    std::vector<std::string> suspects;

    Lease(RmaClient& c, v1::LeaseResponse r) : client(c), response(std::move(r)) {}
    ~Lease() {
      if (response.lease_id().empty()) return;
      client.calls_.Run<v1::ReleaseLeaseRequest, v1::ReleaseLeaseResponse>(
          [this](grpc::ClientContext& context, v1::ReleaseLeaseRequest& request) {
            context.set_deadline(std::chrono::system_clock::now() + kDetachedTimeout);
            request.set_lease_id(response.lease_id());
            for (const std::string& key : suspects) request.add_suspect_keys(key);
          },
          [this](auto... call) { client.stub_->async()->ReleaseLease(call...); });
    }
  };
  struct PendingLease {
    grpc::ClientContext context;
    v1::LeaseRequest request;
    v1::LeaseResponse response;
    Completion done;
  };
  struct Copy {
    std::shared_ptr<Lease> lease;
    ChunkHeader header;
    Pieces pieces;
    std::shared_ptr<Completion> done;
  };

  void StartLease() {
    pending_ = std::make_unique<PendingLease>();
    const size_t end = std::min(keys_.size(), next_key_ + kLeaseKeys);
    for (size_t i = next_key_; i < end; ++i) {
      pending_->request.add_keys(keys_[i].bytes.data(), keys_[i].bytes.size());
    }
    pending_->request.set_max_bytes(kLeaseBytes);
    AddTrace(pending_->context, CurrentTrace());
    pending_->context.set_deadline(ToGrpcDeadline(deadline_));
    client_.stub_->async()->Lease(&pending_->context, &pending_->request, &pending_->response,
                                  [p = pending_.get()](grpc::Status status) { p->done.Set(FromStoreStatus(status)); });
  }

  // Posts copies until enough are in flight. Waits for a lease only when there is nothing else to do.
  void Fill(const ChunkStore::PlaceFn& place) {
    while (!no_more_ && copies_.size() < kInFlightChunks &&
           (in_flight_bytes_ < kInFlightBytes || copies_.size() < kInFlightChunksMin)) {
      if (lease_ == nullptr || next_in_lease_ == lease_->response.chunks_size()) {
        if (pending_ == nullptr || !(copies_.empty() || pending_->done.Wait(Clock::now())) || !TakeLease()) return;
        continue;
      }
      if (!Post(place)) return;
    }
  }

  bool TakeLease() {
    pending_->done.Wait();  // bounded by the deadline of the call
    const std::unique_ptr<PendingLease> answered = std::move(pending_);
    const absl::Status status = answered->done.status();
    if (status.code() == absl::StatusCode::kResourceExhausted && !copies_.empty()) {
      // Perhaps it is our own leases that fill the store's memory: once more when they are released.
      lease_.reset();
      StartLease();
      return false;
    }
    if (status.code() == absl::StatusCode::kDeadlineExceeded) {
      result_.finished = true;  // there is nothing beyond the chunks that came in time
      return false;
    }
    if (!status.ok()) return Stop(status);
    v1::LeaseResponse& response = answered->response;
    const auto end = response.end();
    const std::string instance_id = response.instance_id();
    const int num_chunks = response.chunks_size();
    lease_ = std::make_shared<Lease>(client_, std::move(response));
    next_in_lease_ = 0;
    if (instance_id != connection_->instance_id) {
      client_.Drop(connection_);
      return Stop(Errorf(absl::StatusCode::kUnavailable, "the store was restarted"));
    }
    next_key_ += static_cast<size_t>(num_chunks);
    if (next_key_ > keys_.size()) {
      return Stop(Errorf(absl::StatusCode::kInternal, "more chunks were leased than asked for"));
    }
    const bool more = end == v1::LeaseResponse::END_LIMIT || end == v1::LeaseResponse::END_OF_KEYS;
    if (more && next_key_ < keys_.size()) {
      if (num_chunks == 0) return Stop(Errorf(absl::StatusCode::kResourceExhausted, "nothing was leased"));
      StartLease();
    }
    if (pending_ == nullptr) result_.finished = true;  // no further lease: the running copies are the last
    return num_chunks > 0;
  }

  bool Post(const ChunkStore::PlaceFn& place) {
    const v1::LeasedChunk& leased = lease_->response.chunks(next_in_lease_);
    const absl::StatusOr<ChunkHeader> header = HeaderFromMeta(leased.meta());
    if (!header.ok() || header->key != keys_[num_placed_]) {
      return Stop(Errorf(absl::StatusCode::kInternal, "the store leased another chunk than asked for"));
    }
    Copy copy{lease_, *header, place(num_placed_, *header), std::make_shared<Completion>()};
    if (copy.pieces.empty()) {  // the caller has enough
      result_.finished = true;
      no_more_ = true;
      return false;
    }
    if (const absl::Status status = CheckPieces(*header, copy.pieces); !status.ok()) {
      result_.finished = true;
      return Stop(status);
    }
    std::vector<transport::GetOp> ops;
    uint64_t offset = leased.offset();
    for (const std::span<std::byte> piece : copy.pieces) {
      ops.push_back({piece.data(), offset, piece.size()});
      offset += piece.size();
    }
    const absl::Status status =
        connection_->channel->Get(std::move(ops), [done = copy.done](absl::Status s) { done->Set(std::move(s)); });
    if (status.code() == absl::StatusCode::kResourceExhausted && !copies_.empty()) return false;  // later
    if (!status.ok()) {
      client_.Drop(connection_);
      return Stop(status);
    }
    ++next_in_lease_;
    ++num_placed_;
    in_flight_bytes_ += header->payload_bytes;
    copies_.push_back(std::move(copy));
    return true;
  }

  void TakeFirst(const ChunkStore::FetchedFn& sink) {
    Copy& copy = copies_.front();
    if (!copy.done->Wait(deadline_)) {
      result_.finished = true;
      ended_ = true;
      return;
    }
    absl::Status status = copy.done->status();
    if (!status.ok()) {
      client_.Drop(connection_);
      Stop(status);
      return;
    }
    status = VerifyPieces(copy.header, copy.pieces);
    if (!status.ok()) {
      // The lease ran out, or the store's memory is damaged: the store looks itself; streams carry on.
      copy.lease->suspects.emplace_back(reinterpret_cast<const char*>(copy.header.key.bytes.data()), 32);
      Stop(status);
      return;
    }
    const bool wanted = sink(result_.accepted, copy.header);
    if (wanted) ++result_.accepted;
    in_flight_bytes_ -= copy.header.payload_bytes;
    copies_.pop_front();
    if (wanted && Clock::now() < deadline_) return;
    result_.finished = true;
    ended_ = true;
  }

  bool Stop(absl::Status status) {
    result_.status = std::move(status);
    result_.finished = false;
    ended_ = true;
    return false;
  }

  // Ends the copies that no call waits for any more: they still write into the caller's memory.
  void Quiesce() {
    if (copies_.empty()) return;
    if (Clock::now() >= deadline_) {
      client_.Drop(connection_);
      (void)connection_->channel->Close(kCloseTimeout);
    }
    for (const Copy& copy : copies_) copy.done->Wait();
  }

  RmaClient& client_;
  const std::shared_ptr<Connection> connection_;
  const std::span<const ChunkKey> keys_;
  const Deadline deadline_;
  size_t next_key_ = 0;  // the first that no lease has asked for, or that none was given for
  size_t num_placed_ = 0;
  std::unique_ptr<PendingLease> pending_;
  std::shared_ptr<Lease> lease_;
  int next_in_lease_ = 0;
  std::deque<Copy> copies_;  // posted, in order
  uint64_t in_flight_bytes_ = 0;
  bool no_more_ = false;
  bool ended_ = false;
  Fetched result_;
};

RmaClient::RmaClient(const std::shared_ptr<grpc::ChannelInterface>& channel, transport::KvTransport& transport,
                     std::string address)
    : stub_(v1::KvStoreRma::NewStub(channel)), transport_(transport), address_(std::move(address)) {}

absl::StatusOr<std::shared_ptr<RmaClient::Connection>> RmaClient::Connect(Deadline deadline) {
  std::lock_guard lock(mutex_);
  if (connection_ != nullptr && connection_->channel->status().ok()) return connection_;
  connection_.reset();
  const Deadline now = Clock::now();
  if (now < not_before_) return absl::UnavailableError("no connection to the store's memory");
  const auto connect = [&]() -> absl::Status {
    grpc::ClientContext context;
    context.set_deadline(ToGrpcDeadline(std::min(deadline, now + kConnectTimeout)));
    v1::DataEndpoint endpoint;
    SPLICE_RETURN_IF_ERROR(FromStoreStatus(stub_->GetDataEndpoint(&context, {}, &endpoint)));
    const transport::RemoteMemory remote{endpoint.address(), endpoint.rkey(), endpoint.base(), endpoint.size(),
                                         endpoint.host_id()};
    SPLICE_ASSIGN_OR_RETURN(
        auto channel, transport_.Connect(remote, std::min<Clock::duration>(kConnectTimeout, deadline - Clock::now())));
    connection_ = std::make_shared<Connection>(Connection{std::move(channel), endpoint.instance_id()});
    return absl::OkStatus();
  };
  const absl::Status status = connect();
  if (status.ok()) {
    failure_logged_ = false;
    log::Info("chunk_store.rma_connected", log::F("store", address_),
              log::F("carrier", connection_->channel->carrier()));
    return connection_;
  }
  not_before_ = Clock::now() + kRetryAfterFailure;
  if (!failure_logged_) log::Info("chunk_store.no_rma", log::F("store", address_), log::F("cause", status));
  failure_logged_ = true;
  return status;
}

void RmaClient::Drop(const std::shared_ptr<Connection>& connection) {
  std::lock_guard lock(mutex_);
  if (connection_ == connection) connection_.reset();
}

std::string RmaClient::carrier() const {
  std::lock_guard lock(mutex_);
  return connection_ == nullptr ? "" : connection_->channel->carrier();
}

RmaClient::Fetched RmaClient::Fetch(std::span<const ChunkKey> keys, Deadline deadline, const ChunkStore::PlaceFn& place,
                                    const ChunkStore::FetchedFn& sink) {
  absl::StatusOr<std::shared_ptr<Connection>> connection = Connect(deadline);
  if (!connection.ok()) return {0, false, connection.status()};
  return FetchRun(*this, std::move(*connection), keys, deadline).Run(place, sink);
}

void RmaClient::Abort(const std::string& reservation_id, bool writer_quiet) {
  calls_.Run<v1::AbortPutRequest, v1::AbortPutResponse>(
      [&](grpc::ClientContext& context, v1::AbortPutRequest& request) {
        context.set_deadline(std::chrono::system_clock::now() + kDetachedTimeout);
        request.set_reservation_id(reservation_id);
        request.set_writer_quiet(writer_quiet);
      },
      [this](auto... call) { stub_->async()->AbortPut(call...); });
}

RmaClient::Stored RmaClient::Put(std::span<const Chunk* const> chunks, const PutOptions& options, Deadline deadline) {
  Stored stored;
  while (stored.num_done < chunks.size()) {
    size_t end = stored.num_done;
    for (uint64_t bytes = 0; end < chunks.size() && end - stored.num_done < kPutChunks && bytes < kPutBytes; ++end) {
      bytes += chunks[end]->payload.size();
    }
    stored.status = PutWindow(chunks.subspan(stored.num_done, end - stored.num_done), options, deadline, stored);
    if (!stored.status.ok()) {
      // About the path, the store's room or a lost answer: a stream may still do it. All else is about the chunks.
      stored.finished = stored.status.code() != absl::StatusCode::kUnavailable &&
                        stored.status.code() != absl::StatusCode::kUnimplemented &&
                        stored.status.code() != absl::StatusCode::kResourceExhausted;
      return stored;
    }
    stored.num_done = end;
  }
  stored.finished = true;
  return stored;
}

absl::Status RmaClient::PutWindow(std::span<const Chunk* const> chunks, const PutOptions& options, Deadline deadline,
                                  Stored& stored) {
  SPLICE_ASSIGN_OR_RETURN(const std::shared_ptr<Connection> connection, Connect(deadline));
  const Deadline start = Clock::now();
  v1::ReservePutResponse reserved;
  {
    grpc::ClientContext context;
    context.set_deadline(ToGrpcDeadline(deadline));
    v1::ReservePutRequest request;
    for (const Chunk* const chunk : chunks) *request.add_chunks() = MetaFromHeader(chunk->header);
    *request.mutable_options() = PutOptionsToWire(options);
    SPLICE_RETURN_IF_ERROR(FromStoreStatus(stub_->ReservePut(&context, request, &reserved)));
  }
  const auto count = static_cast<int>(chunks.size());
  std::vector<transport::PutOp> ops;
  for (int i = 0; i < std::min({count, reserved.offsets_size(), reserved.existing_size()}); ++i) {
    const std::vector<std::byte>& payload = chunks[i]->payload;
    if (!reserved.existing(i)) ops.push_back({payload.data(), reserved.offsets(i), payload.size()});
  }
  const Deadline quiet_by = std::min(deadline, start + std::chrono::milliseconds(reserved.ttl_ms()) - kQuietMargin);
  absl::Status status;
  if (reserved.instance_id() != connection->instance_id) {
    Drop(connection);
    status = absl::UnavailableError("the store was restarted");
  } else if (reserved.offsets_size() != count || reserved.existing_size() != count) {
    status = absl::InternalError("the store reserved another number of chunks than asked for");
  } else if (!ops.empty()) {
    const auto copied = std::make_shared<Completion>();
    status = connection->channel->Put(
        std::move(ops), [copied](absl::Status s) { copied->Set(std::move(s)); }, quiet_by);
    if (!status.ok()) copied->Set(status);
    if (status.ok()) status = connection->channel->FlushAndWait(quiet_by - Clock::now());
    if (!status.ok()) {
      Drop(connection);
      const bool quiet = connection->channel->Close(kCloseTimeout).ok();
      copied->Wait();  // the payloads are the caller's: nothing may read them after the return
      Abort(reserved.reservation_id(), quiet);
      return status.code() == absl::StatusCode::kDeadlineExceeded && Clock::now() < deadline
                 ? absl::UnavailableError(status.message())
                 : status;
    }
  }
  if (!status.ok()) {
    Abort(reserved.reservation_id(), true);
    return status;
  }
  grpc::ClientContext context;
  context.set_deadline(ToGrpcDeadline(deadline));
  v1::CommitPutRequest request;
  request.set_reservation_id(reserved.reservation_id());
  v1::PutChunksResponse response;
  status = FromStoreStatus(stub_->CommitPut(&context, request, &response));
  if (status.code() == absl::StatusCode::kNotFound) return absl::UnavailableError(status.message());  // expired: again
  SPLICE_RETURN_IF_ERROR(status);
  stored.report.num_stored += response.num_stored();
  stored.report.num_existing += response.num_existing();
  stored.report.num_durable += response.num_durable();
  return absl::OkStatus();
}

}  // namespace spl::chunk
