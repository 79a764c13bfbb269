#include "services/transport/ucx_channel.h"

#include <arpa/inet.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "services/base/fault_point.h"
#include "services/base/log.h"
#include "services/base/status.h"
#include "services/transport/rkey_frame.h"
#include "services/transport/rma_ops.h"
#include "services/transport/ucx_runtime.h"

namespace spl::transport {
namespace {

FaultPoint put_fault("transport.put");
FaultPoint get_fault("transport.get");

constexpr size_t kMaxPendingJobs = 4096;
// UCX keeps a request for each; enough to fill any pipe.
constexpr size_t kMaxOpsInFlight = 256;

absl::Status Closed() { return Errorf(absl::StatusCode::kCancelled, "the channel is closed"); }

// Which transports the data lanes of an endpoint use, by UCX's own report.
std::string CarrierOf(ucp_ep_h ep) {
  char* text = nullptr;
  size_t length = 0;
  FILE* const stream = open_memstream(&text, &length);
  if (stream == nullptr) return "tcp";
  ucp_ep_print_info(ep, stream);
  std::fclose(stream);
  const std::string info(text, length);
  std::free(text);
  for (const char* name : {"rc_", "dc_", "ud_"}) {
    if (info.find(name) != std::string::npos) return "rdma";
  }
  return "tcp";
}

}  // namespace

UcxChannel::UcxChannel(UcxWorker& worker, CopyEngine& copies, RemoteMemory remote)
    : worker_(worker), copies_(copies), remote_(std::move(remote)) {}

UcxChannel::~UcxChannel() = default;

void UcxChannel::Open(const std::string& address_bytes, ucp_err_handling_mode_t mode) {
  mode_ = mode;
  alive_until_closed_ = shared_from_this();
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR | UCP_EP_PARAM_FIELD_ERR_HANDLER |
                      UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
  params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
  params.sockaddr.addr = reinterpret_cast<const sockaddr*>(address_bytes.data());
  params.sockaddr.addrlen = static_cast<socklen_t>(address_bytes.size());
  params.err_handler.cb = &UcxChannel::OnError;
  params.err_handler.arg = this;
  params.err_mode = mode;
  ucs_status_t status = ucp_ep_create(worker_.worker(), &params, &ep_);
  if (status != UCS_OK) {
    ep_ = nullptr;
    return Connected(status);
  }
  // The connection stands when a flush of the empty endpoint has gone through.
  ucp_request_param_t request{};
  request.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  request.cb.send = &UcxChannel::OnConnected;
  request.user_data = this;
  const ucs_status_ptr_t pending = ucp_ep_flush_nbx(ep_, &request);
  if (!UCS_PTR_IS_PTR(pending)) return Connected(UCS_PTR_STATUS(pending));
  ++num_calls_due_;
}

void UcxChannel::OnConnected(void* request, ucs_status_t status, void* user_data) {
  ucp_request_free(request);
  const auto self = static_cast<UcxChannel*>(user_data)->shared_from_this();
  --self->num_calls_due_;
  self->Connected(status);
  self->FinishClose();
}

void UcxChannel::Connected(ucs_status_t ucs_status) {
  absl::Status status = StatusFromUcs(ucs_status, "cannot connect to the KV memory at " + remote_.address);
  if (status.ok() && !this->status().ok()) status = this->status();
  if (status.ok() && ep_ == nullptr) status = Closed();  // the caller's deadline came first
  if (status.ok()) status = MapOrChooseCarrier();
  if (!status.ok()) Lose(status);
  {
    std::lock_guard lock(mutex_);
    connected_ = true;
  }
  changed_.notify_all();
}

absl::Status UcxChannel::MapOrChooseCarrier() {
  SPLICE_ASSIGN_OR_RETURN(const RkeyFrame frame, UnframeRkey(remote_.rkey));
  const ucs_status_t unpacked = ucp_ep_rkey_unpack(ep_, frame.packed.data(), &rkey_);
  SPLICE_RETURN_IF_ERROR(StatusFromUcs(unpacked, "cannot unpack the peer's rkey"));
  carrier_ = CarrierOf(ep_);
  ucp_ep_attr_t attributes{};
  attributes.field_mask = UCP_EP_ATTR_FIELD_LOCAL_SOCKADDR;
  if (ucp_ep_query(ep_, &attributes) == UCS_OK) local_address_ = AddressText(attributes.local_sockaddr);
  if (mode_ != UCP_ERR_HANDLING_MODE_NONE) return absl::OkStatus();
  void* address = nullptr;
  if (ucp_rkey_ptr(rkey_, remote_.base, &address) == UCS_OK) {
    mapped_ = static_cast<std::byte*>(address);
    carrier_ = "shm";
  }
  return absl::OkStatus();
}

absl::Status UcxChannel::WaitConnected(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  if (!changed_.wait_until(lock, deadline, [&] { return connected_; })) {
    return Errorf(absl::StatusCode::kDeadlineExceeded, "no answer from the KV memory at {} in time", remote_.address);
  }
  return status_;
}

absl::Status UcxChannel::Admit() {
  std::lock_guard lock(mutex_);
  if (closing_) return Closed();
  if (!status_.ok()) return status_;
  if (num_pending_ >= kMaxPendingJobs) {
    return Errorf(absl::StatusCode::kResourceExhausted, "{} writes to {} are pending already", num_pending_,
                  remote_.address);
  }
  ++num_pending_;
  return absl::OkStatus();
}

absl::Status UcxChannel::Put(std::vector<PutOp> put_ops, std::function<void(absl::Status)> done, LeaseEnd lease_end,
                             Copier copier) {
  if (copier && mapped_ == nullptr)
    return Errorf(absl::StatusCode::kFailedPrecondition, "the KV memory at {} is not mapped here", remote_.address);
  std::vector<RmaOp> ops = ToRmaOps(put_ops);
  SPLICE_RETURN_IF_ERROR(CheckRmaOps(ops, remote_.size));
  if (put_fault.armed()) {
    const FaultOutcome fault = put_fault.Hit();
    SPLICE_RETURN_IF_ERROR(fault.status);
    if (fault.drop) ops.clear();  // claims success and moves nothing: the receiver's checksum must detect this
  }
  return Start({std::move(ops), false, lease_end, std::move(copier)}, std::move(done));
}

absl::Status UcxChannel::Get(std::vector<GetOp> get_ops, std::function<void(absl::Status)> done) {
  std::vector<RmaOp> ops = ToRmaOps(get_ops);
  SPLICE_RETURN_IF_ERROR(CheckRmaOps(ops, remote_.size));
  if (get_fault.armed()) {
    const FaultOutcome fault = get_fault.Hit();
    SPLICE_RETURN_IF_ERROR(fault.status);
    if (fault.drop) ops.clear();
  }
  return Start({std::move(ops), true, kNoLease, nullptr}, std::move(done));
}

absl::Status UcxChannel::Start(Request request, const std::function<void(absl::Status)>& done) {
  SPLICE_RETURN_IF_ERROR(Admit());
  const auto self = shared_from_this();
  std::vector<RmaOp> ops = CoalesceRmaOps(std::move(request.ops));
  bool accepted;
  if (mapped_ != nullptr) {
    CopyJob job{.remote = mapped_,
                .is_get = request.is_get,
                .ops = std::move(ops),
                .copier = std::move(request.copier),
                .lease_end = request.lease_end,
                .late = [self] { return self->MissLease(); },
                .interrupted = [self] { return self->Interruption(); }};
    job.done = [self, done](const absl::Status& status) {
      self->worker_.PostAlways([self, done, status] { self->Finish(done, status); });
    };
    accepted = copies_.Push(std::move(job));
  } else {
    const auto job = std::make_shared<Job>();
    job->ops = std::move(ops);
    job->is_get = request.is_get;
    job->lease_end = request.lease_end;
    job->done = done;
    accepted = worker_.Post([self, job] { self->Enqueue(std::make_unique<Job>(std::move(*job))); });
  }
  if (accepted) return absl::OkStatus();
  Finish(nullptr, absl::OkStatus());
  return Errorf(absl::StatusCode::kResourceExhausted, "the transport's queue is full");
}

absl::Status UcxChannel::Flush(std::function<void(absl::Status)> done) {
  if (mapped_ != nullptr)
    return Put({}, std::move(done), kNoLease);  // jobs run in order: a marker at the end is a flush
  SPLICE_RETURN_IF_ERROR(Admit());
  const auto job = std::make_shared<Job>();
  job->is_flush = true;
  job->done = std::move(done);
  const auto self = shared_from_this();
  if (worker_.Post([self, job] { self->Enqueue(std::make_unique<Job>(std::move(*job))); })) return absl::OkStatus();
  Finish(nullptr, absl::OkStatus());
  return Errorf(absl::StatusCode::kResourceExhausted, "the transport's queue is full");
}

void UcxChannel::Finish(const std::function<void(absl::Status)>& done, const absl::Status& status) {
  if (done) done(status);
  bool last_of_closing;
  {
    std::lock_guard lock(mutex_);
    last_of_closing = --num_pending_ == 0 && closing_;
  }
  if (!last_of_closing) return;
  const auto self = shared_from_this();
  worker_.PostAlways([self] { self->AdvanceClose(); });
}

// The status of a late job. The channel gets another code, because a caller that sees that one can continue over a new
// channel, with another ticket.
absl::Status UcxChannel::MissLease() {
  const std::string what = "a write to " + remote_.address + " was about to start after the end of its lease";
  log::Warning("transport.lease_missed", log::F("peer", remote_.address), log::F("carrier", carrier_));
  {
    std::lock_guard lock(mutex_);
    if (status_.ok()) status_ = absl::UnavailableError("the KV channel was given up: " + what);
  }
  EndSoon();
  return absl::DeadlineExceededError(what);
}

absl::Status UcxChannel::Interruption() const {
  std::lock_guard lock(mutex_);
  return closing_ ? Closed() : status_;
}

void UcxChannel::Enqueue(std::unique_ptr<Job> job) {
  job->channel = this;
  if (absl::Status interruption = Interruption(); !interruption.ok()) return Finish(job->done, interruption);
  queued_.push_back(std::move(job));
  Pump();
}

void UcxChannel::Pump() {
  while (!queued_.empty() && num_in_flight_ < kMaxOpsInFlight) {
    Job& job = *queued_.front();
    if (!job.all_posted && !PostNext(job)) continue;
    if (!job.all_posted) continue;
    std::unique_ptr<Job> done_posting = std::move(queued_.front());
    queued_.pop_front();
    if (done_posting->num_in_flight == 0) {
      Finish(done_posting->done, done_posting->status);
    } else {
      posted_.push_back(std::move(done_posting));
    }
  }
}

// Posts one operation; false when it failed at once and the job has nothing more to post.
bool UcxChannel::PostNext(Job& job) {
  if (job.next_op < job.ops.size() && std::chrono::steady_clock::now() >= job.lease_end) {
    job.status = MissLease();
    job.all_posted = true;
    return false;
  }
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.send = &UcxChannel::OnOpDone;
  param.user_data = &job;
  ucs_status_ptr_t request = nullptr;
  if (job.is_flush) {
    request = ucp_ep_flush_nbx(ep_, &param);
    job.all_posted = true;
  } else if (job.next_op < job.ops.size()) {
    const RmaOp& op = job.ops[job.next_op++];
    const uint64_t remote = remote_.base + op.remote_offset;
    request = job.is_get ? ucp_get_nbx(ep_, op.local, op.bytes, remote, rkey_, &param)
                         : ucp_put_nbx(ep_, op.local, op.bytes, remote, rkey_, &param);
    job.all_posted = job.next_op == job.ops.size();
  } else {
    job.all_posted = true;  // a put without bytes
  }
  if (UCS_PTR_IS_PTR(request)) {
    ++job.num_in_flight;
    ++num_in_flight_;
    return true;
  }
  const ucs_status_t status = UCS_PTR_STATUS(request);
  if (status == UCS_OK) return true;
  job.status = StatusFromUcs(status, (job.is_get ? "read from " : "write to ") + remote_.address);
  job.all_posted = true;
  MarkLost(job.status);
  return false;
}

void UcxChannel::OnOpDone(void* request, ucs_status_t status, void* user_data) {
  ucp_request_free(request);
  Job* const job = static_cast<Job*>(user_data);
  job->channel->OpDone(*job, status);
}

void UcxChannel::OpDone(Job& job, ucs_status_t status) {
  --job.num_in_flight;
  --num_in_flight_;
  if (status != UCS_OK && job.status.ok()) {
    job.status = StatusFromUcs(status, (job.is_get ? "read from " : "write to ") + remote_.address);
    job.all_posted = true;
    MarkLost(job.status);
  }
  if (job.all_posted && job.num_in_flight == 0) Retire(job);
  // From a task: this may run inside a UCX call of Pump itself.
  const auto self = shared_from_this();
  if (!queued_.empty()) worker_.PostAlways([self] { self->Pump(); });
}

void UcxChannel::Retire(Job& job) {
  const auto is_it = [&](const std::unique_ptr<Job>& other) { return other.get() == &job; };
  const auto found = std::find_if(posted_.begin(), posted_.end(), is_it);
  if (found == posted_.end()) return;  // still at the front of queued_: Pump ends it
  const std::unique_ptr<Job> owned = std::move(*found);
  posted_.erase(found);
  absl::Status status = owned->status;
  if (absl::Status interruption = Interruption(); !interruption.ok()) status = interruption;
  Finish(owned->done, status);
}

void UcxChannel::DropQueued(const absl::Status& status) {
  while (!queued_.empty()) {
    std::unique_ptr<Job> job = std::move(queued_.front());
    queued_.pop_front();
    job->all_posted = true;
    job->status = status;
    if (job->num_in_flight == 0) {
      Finish(job->done, status);
    } else {
      posted_.push_back(std::move(job));
    }
  }
}

void UcxChannel::OnError(void* arg, ucp_ep_h, ucs_status_t status) {
  auto* const channel = static_cast<UcxChannel*>(arg);
  channel->Lose(StatusFromUcs(status, "lost the KV memory at " + channel->remote_.address));
}

// UCX often fails an operation before it reports the peer lost. A caller that sees the failed operation must see the
// channel lost.
void UcxChannel::MarkLost(const absl::Status& status) {
  if (status.code() != absl::StatusCode::kUnavailable) return;
  {
    std::lock_guard lock(mutex_);
    if (!status_.ok() || closing_) return;  // operations cancelled by closing are no loss
    status_ = status;
  }
  EndSoon();
}

void UcxChannel::Lose(const absl::Status& status) {
  {
    std::lock_guard lock(mutex_);
    if (!status_.ok()) return;
    status_ =
        status.code() == absl::StatusCode::kFailedPrecondition || status.code() == absl::StatusCode::kInvalidArgument
            ? status
            : absl::UnavailableError(status.message());
    connected_ = true;
  }
  changed_.notify_all();
  EndSoon();
}

void UcxChannel::EndSoon() {
  const auto self = shared_from_this();
  worker_.PostAlways([self] {
    self->DropQueued(self->status());
    if (self->mapped_ == nullptr) self->CloseEndpoint();
  });
}

absl::Status UcxChannel::status() const {
  std::lock_guard lock(mutex_);
  return status_;
}

bool UcxChannel::closed() const {
  std::lock_guard lock(mutex_);
  return closed_;
}

void UcxChannel::CloseSoon() {
  {
    std::lock_guard lock(mutex_);
    if (closing_) return;
    closing_ = true;
  }
  const auto self = shared_from_this();
  worker_.PostAlways([self] {
    self->DropQueued(Closed());
    self->AdvanceClose();
  });
}

void UcxChannel::Abandon() {
  const auto self = shared_from_this();
  worker_.PostAlways([self] {
    self->Lose(absl::UnavailableError("the transport is stopped"));
    // The end of a mapping's endpoint says that no copy is running, so it closes after the last copy.
    self->mapped_ == nullptr ? self->CloseEndpoint() : self->AdvanceClose();
  });
}

absl::Status UcxChannel::Close(std::chrono::nanoseconds timeout) {
  CloseSoon();
  if (WaitClosed(std::chrono::steady_clock::now() + timeout)) return absl::OkStatus();
  return Errorf(absl::StatusCode::kDeadlineExceeded, "writes to {} are still on their way", remote_.address);
}

bool UcxChannel::WaitClosed(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, deadline, [&] { return closed_; });
}

// Nothing pending any more → everything flushed to the peer → endpoint closed.
void UcxChannel::AdvanceClose() {
  bool alive;
  {
    std::lock_guard lock(mutex_);
    if (!closing_ || closed_ || num_pending_ > 0) return;
    alive = status_.ok() && connected_;
  }
  if (flushing_for_close_) return;
  if (!alive || ep_ == nullptr || mapped_ != nullptr) return CloseEndpoint();
  flushing_for_close_ = true;
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.send = &UcxChannel::OnFlushedForClose;
  param.user_data = this;
  if (UCS_PTR_IS_PTR(ucp_ep_flush_nbx(ep_, &param))) {
    ++num_calls_due_;
  } else {
    CloseEndpoint();
  }
}

void UcxChannel::OnFlushedForClose(void* request, ucs_status_t, void* user_data) {
  ucp_request_free(request);
  const auto self = static_cast<UcxChannel*>(user_data)->shared_from_this();
  --self->num_calls_due_;
  self->worker_.PostAlways([self] { self->CloseEndpoint(); });
}

void UcxChannel::CloseEndpoint() {
  if (ep_ == nullptr) return FinishClose();
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  param.cb.send = &UcxChannel::OnClosed;
  param.user_data = this;
  // UCX forces only endpoints with error handling; the others are quiet already and say good-bye.
  param.flags = mode_ == UCP_ERR_HANDLING_MODE_PEER ? UCP_EP_CLOSE_FLAG_FORCE : 0;
  ++num_calls_due_;
  const ucs_status_ptr_t request = ucp_ep_close_nbx(std::exchange(ep_, nullptr), &param);
  if (UCS_PTR_IS_PTR(request)) return;
  --num_calls_due_;
  FinishClose();
}

void UcxChannel::OnClosed(void* request, ucs_status_t, void* user_data) {
  ucp_request_free(request);
  const auto self = static_cast<UcxChannel*>(user_data)->shared_from_this();
  --self->num_calls_due_;
  self->FinishClose();
}

// Closed only when the owner wants it (not merely lost), every job has ended and UCX has let go of this object;
// whichever of these comes last gets here.
void UcxChannel::FinishClose() {
  if (ep_ != nullptr || num_calls_due_ > 0) return;
  const std::shared_ptr<UcxChannel> self = shared_from_this();
  {
    std::lock_guard lock(mutex_);
    if (!closing_ || closed_ || num_pending_ > 0) return;
    closed_ = true;
  }
  if (rkey_ != nullptr) ucp_rkey_destroy(std::exchange(rkey_, nullptr));  // unmaps shared memory: no copy runs any more
  alive_until_closed_.reset();
  changed_.notify_all();
}

}  // namespace spl::transport
