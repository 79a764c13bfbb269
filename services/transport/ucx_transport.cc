#include <arpa/inet.h>
#include <netdb.h>
#include <ucp/api/ucp.h>

#include <deque>
#include <map>
#include <set>

#include "kernels/common/host_buffer.h"
#include "services/base/address.h"
#include "services/base/log.h"
#include "services/base/status.h"
#include "services/transport/copy_engine.h"
#include "services/transport/kv_transport.h"
#include "services/transport/rkey_frame.h"
#include "services/transport/ucx_channel.h"
#include "services/transport/ucx_memory.h"
#include "services/transport/ucx_runtime.h"
#include "services/transport/ucx_worker.h"

namespace spl::transport {
namespace {

constexpr size_t kMaxAcceptedPeers = 4096;
constexpr size_t kEndedMax = 4096;
constexpr auto kStopTimeout = std::chrono::seconds(3);
constexpr auto kAbandonTimeout = std::chrono::seconds(2);

// The handle that a channel's owner holds; its destruction begins the close.
class ChannelHandle final : public KvChannel {
 public:
  explicit ChannelHandle(std::shared_ptr<UcxChannel> channel) : channel_(std::move(channel)) {}
  ~ChannelHandle() override { channel_->CloseSoon(); }

  absl::Status Put(std::vector<PutOp> ops, std::function<void(absl::Status)> done, LeaseEnd lease_end) override {
    return channel_->Put(std::move(ops), std::move(done), lease_end);
  }
  std::span<std::byte> mapped_memory() const override { return channel_->mapped_memory(); }
  absl::Status PutThrough(Copier copier, std::vector<PutOp> ops, std::function<void(absl::Status)> done,
                          LeaseEnd lease_end) override {
    return channel_->Put(std::move(ops), std::move(done), lease_end, std::move(copier));
  }
  absl::Status Get(std::vector<GetOp> ops, std::function<void(absl::Status)> done) override {
    return channel_->Get(std::move(ops), std::move(done));
  }
  absl::Status Flush(std::function<void(absl::Status)> done) override { return channel_->Flush(std::move(done)); }
  absl::Status FlushAndWait(std::chrono::nanoseconds timeout) override;
  absl::Status Close(std::chrono::nanoseconds timeout) override { return channel_->Close(timeout); }
  std::string carrier() const override { return channel_->carrier(); }
  std::string local_address() const override { return channel_->local_address(); }
  absl::Status status() const override { return channel_->status(); }

 private:
  const std::shared_ptr<UcxChannel> channel_;
};

absl::Status ChannelHandle::FlushAndWait(std::chrono::nanoseconds timeout) {
  struct Waiter {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    absl::Status status;
  };
  const auto waiter = std::make_shared<Waiter>();
  SPLICE_RETURN_IF_ERROR(channel_->Flush([waiter](absl::Status status) {
    std::lock_guard lock(waiter->mutex);
    waiter->status = std::move(status);
    waiter->done = true;
    waiter->changed.notify_all();
  }));
  std::unique_lock lock(waiter->mutex);
  if (waiter->changed.wait_for(lock, timeout, [&] { return waiter->done; })) return waiter->status;
  return Errorf(absl::StatusCode::kDeadlineExceeded, "flush did not complete in time");
}

class UcxTransport;

// UCX wants both ends of a connection to handle errors alike, and only endpoints without error handling use shared
// memory. So each way has its own listener: one for every peer, one on the loopback address for peers on this host.
struct Listener {
  UcxTransport* transport = nullptr;
  ucp_err_handling_mode_t mode = UCP_ERR_HANDLING_MODE_PEER;
  ucp_listener_h handle = nullptr;
  HostPort address;
};

class UcxTransport final : public KvTransport {
  using Deadline = std::chrono::steady_clock::time_point;

 public:
  explicit UcxTransport(TransportOptions options) : options_(std::move(options)) {}
  ~UcxTransport() override { Stop(); }

  absl::Status Start();
  absl::StatusOr<std::unique_ptr<RegisteredMemory>> Allocate(size_t bytes, Mapping mapping) override;
  std::string listen_address() const override {
    const HostPort& bound = public_->address;
    return HostPort{options_.advertise_host.empty() ? bound.host : options_.advertise_host, bound.port}.ToString();
  }
  absl::StatusOr<std::unique_ptr<KvChannel>> Connect(const RemoteMemory& remote,
                                                     std::chrono::nanoseconds timeout) override;
  WriterConnections ConnectionsOf(const std::string& channel_address, Deadline opened_before) const override;
  void CutWriter(const std::string& channel_address, Deadline opened_before) override;
  void Stop() override;

 private:
  // An endpoint over which a peer writes here.
  struct Accepted {
    std::string address;  // address of the peer's end: its KvChannel::local_address
    std::chrono::steady_clock::time_point opened;
    bool maps = false;
    bool closing = false;
  };
  absl::StatusOr<std::unique_ptr<Listener>> Listen(const HostPort& address, ucp_err_handling_mode_t mode);
  absl::StatusOr<std::shared_ptr<UcxChannel>> ConnectOnce(const RemoteMemory& remote, const HostPort& address,
                                                          ucp_err_handling_mode_t mode, Deadline deadline);
  void Accept(Listener& listener, ucp_conn_request_h request);  // [progress]
  void ClosePeer(ucp_ep_h ep);                                  // [progress]
  void CloseListener(std::unique_ptr<Listener>& listener);      // [progress]
  static void OnConnectionRequest(ucp_conn_request_h request, void* arg);
  static void OnPeerError(void* arg, ucp_ep_h ep, ucs_status_t status);

  void ForgetPeer(ucp_ep_h ep);

  const TransportOptions options_;
  std::unique_ptr<UcxWorker> worker_;
  CopyEngine copies_;
  std::unique_ptr<Listener> public_;
  std::unique_ptr<Listener> local_;  // null with carriers "tcp"

  mutable std::mutex mutex_;  // guards all below
  // Changed by the progress thread only. An endpoint stays until UCX has let go of it.
  std::map<ucp_ep_h, Accepted> accepted_;
  std::set<std::string> ended_;  // addresses of endpoints that were accepted and are gone, kEndedMax at most
  std::deque<std::string> ended_oldest_first_;
  std::vector<std::shared_ptr<UcxChannel>> channels_;
  bool stopped_ = false;
};

// sockaddr bytes of "host:port".
absl::StatusOr<std::string> Resolve(const HostPort& address) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found);
  if (error != 0) {
    return Errorf(absl::StatusCode::kUnavailable, "cannot resolve '{}': {}", address.ToString(), gai_strerror(error));
  }
  std::string bytes(reinterpret_cast<const char*>(found->ai_addr), found->ai_addrlen);
  freeaddrinfo(found);
  return bytes;
}

absl::Status UcxTransport::Start() {
  SPLICE_ASSIGN_OR_RETURN(worker_, UcxWorker::Create(options_.carriers));
  SPLICE_ASSIGN_OR_RETURN(public_, Listen({options_.listen_host, options_.listen_port}, UCP_ERR_HANDLING_MODE_PEER));
  if (options_.carriers != "tcp") {
    SPLICE_ASSIGN_OR_RETURN(local_, Listen({"127.0.0.1", 0}, UCP_ERR_HANDLING_MODE_NONE));
  }
  log::Info("transport.listening", log::F("address", listen_address()), log::F("carriers", options_.carriers));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Listener>> UcxTransport::Listen(const HostPort& address, ucp_err_handling_mode_t mode) {
  auto listener = std::make_unique<Listener>(Listener{this, mode, nullptr, address});
  SPLICE_ASSIGN_OR_RETURN(const std::string sockaddr_bytes, Resolve(address));
  ucp_listener_params_t params{};
  params.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
  params.sockaddr.addr = reinterpret_cast<const sockaddr*>(sockaddr_bytes.data());
  params.sockaddr.addrlen = static_cast<socklen_t>(sockaddr_bytes.size());
  params.conn_handler.cb = &UcxTransport::OnConnectionRequest;
  params.conn_handler.arg = listener.get();
  ucp_listener_attr_t attributes{};
  attributes.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR;
  ucs_status_t status = UCS_OK;
  SPLICE_RETURN_IF_ERROR(worker_->Run([&] {
    status = ucp_listener_create(worker_->worker(), &params, &listener->handle);
    if (status == UCS_OK) status = ucp_listener_query(listener->handle, &attributes);
  }));
  SPLICE_RETURN_IF_ERROR(StatusFromUcs(status, "cannot listen for KV transfers on " + address.ToString()));
  listener->address.port = ntohs(attributes.sockaddr.ss_family == AF_INET6
                                     ? reinterpret_cast<const sockaddr_in6*>(&attributes.sockaddr)->sin6_port
                                     : reinterpret_cast<const sockaddr_in*>(&attributes.sockaddr)->sin_port);
  return listener;
}

absl::StatusOr<std::unique_ptr<RegisteredMemory>> UcxTransport::Allocate(size_t bytes, Mapping mapping) {
  if (bytes == 0) return InvalidArgument("registered memory of 0 bytes");
  std::unique_ptr<kernels::Buffer> own;
  uint16_t local_port = 0;
  if (mapping == Mapping::kNone) {
    SPLICE_ASSIGN_OR_RETURN(own, kernels::AllocateHostBuffer(bytes));
  } else if (local_ != nullptr) {
    local_port = local_->address.port;
  }
  auto memory = std::make_unique<UcxMemory>(*worker_, local_port);
  SPLICE_RETURN_IF_ERROR(memory->Map(bytes, std::move(own)));
  return memory;
}

void UcxTransport::OnConnectionRequest(ucp_conn_request_h request, void* arg) {
  auto* const listener = static_cast<Listener*>(arg);
  UcxTransport* const self = listener->transport;
  // Endpoints are made outside of UCX's callbacks.
  if (!self->worker_->Post([self, listener, request] { self->Accept(*listener, request); })) {
    ucp_listener_reject(listener->handle, request);
  }
}

void UcxTransport::Accept(Listener& listener, ucp_conn_request_h request) {
  if (listener.handle == nullptr) return;  // destroyed with its requests
  if (accepted_.size() >= kMaxAcceptedPeers) {
    ucp_listener_reject(listener.handle, request);
    return;
  }
  ucp_conn_request_attr_t peer{};
  peer.field_mask = UCP_CONN_REQUEST_ATTR_FIELD_CLIENT_ADDR;
  if (const ucs_status_t status = ucp_conn_request_query(request, &peer); status != UCS_OK) {
    log::Warning("transport.accept_failed", log::F("cause", ucs_status_string(status)));
    ucp_listener_reject(listener.handle, request);
    return;
  }
  ucp_ep_params_t params{};
  params.field_mask =
      UCP_EP_PARAM_FIELD_CONN_REQUEST | UCP_EP_PARAM_FIELD_ERR_HANDLER | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
  params.conn_request = request;
  params.err_handler.cb = &UcxTransport::OnPeerError;
  params.err_handler.arg = this;
  params.err_mode = listener.mode;
  ucp_ep_h ep = nullptr;
  const ucs_status_t status = ucp_ep_create(worker_->worker(), &params, &ep);
  if (status == UCS_OK) {
    std::lock_guard lock(mutex_);
    accepted_[ep] = {.address = AddressText(peer.client_address),
                     .opened = std::chrono::steady_clock::now(),
                     .maps = listener.mode == UCP_ERR_HANDLING_MODE_NONE};
  } else {
    log::Warning("transport.accept_failed", log::F("cause", ucs_status_string(status)));
  }
}

void UcxTransport::OnPeerError(void* arg, ucp_ep_h ep, ucs_status_t) {
  auto* const self = static_cast<UcxTransport*>(arg);
  (void)self->worker_->PostAlways([self, ep] { self->ClosePeer(ep); });
}

// The endpoint counts until its close is complete: until then UCX may still write data that came over it.
void UcxTransport::ClosePeer(ucp_ep_h ep) {
  {
    std::lock_guard lock(mutex_);
    const auto found = accepted_.find(ep);
    if (found == accepted_.end() || std::exchange(found->second.closing, true)) return;
  }
  struct Closing {
    UcxTransport* transport;
    ucp_ep_h ep;
  };
  auto closing = std::make_unique<Closing>(Closing{this, ep});
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  param.cb.send = [](void* request, ucs_status_t, void* user_data) {
    ucp_request_free(request);
    const std::unique_ptr<Closing> closed(static_cast<Closing*>(user_data));
    closed->transport->ForgetPeer(closed->ep);
  };
  param.user_data = closing.get();
  if (UCS_PTR_IS_PTR(ucp_ep_close_nbx(ep, &param))) {
    (void)closing.release();  // the callback's
  } else {
    ForgetPeer(ep);
  }
}

void UcxTransport::ForgetPeer(ucp_ep_h ep) {
  std::lock_guard lock(mutex_);
  const auto found = accepted_.find(ep);
  if (found == accepted_.end()) return;
  if (ended_.insert(found->second.address).second) ended_oldest_first_.push_back(found->second.address);
  accepted_.erase(found);
  if (ended_oldest_first_.size() <= kEndedMax) return;
  ended_.erase(ended_oldest_first_.front());
  ended_oldest_first_.pop_front();
}

KvTransport::WriterConnections UcxTransport::ConnectionsOf(const std::string& channel_address,
                                                           Deadline opened_before) const {
  WriterConnections found;
  std::lock_guard lock(mutex_);
  found.known = ended_.contains(channel_address);
  for (const auto& [ep, peer] : accepted_) {
    found.known = found.known || peer.address == channel_address;
    if ((channel_address.empty() || peer.address == channel_address) && peer.opened < opened_before)
      ++(peer.maps ? found.mapped : found.over_network);
  }
  return found;
}

void UcxTransport::CutWriter(const std::string& channel_address, Deadline opened_before) {
  (void)worker_->PostAlways([this, channel_address, opened_before] {
    std::vector<ucp_ep_h> cut;
    {
      std::lock_guard lock(mutex_);
      for (const auto& [ep, peer] : accepted_) {
        if (peer.address == channel_address && peer.opened < opened_before && !peer.maps && !peer.closing)
          cut.push_back(ep);
      }
    }
    for (const ucp_ep_h ep : cut) ClosePeer(ep);
    if (!cut.empty()) log::Warning("transport.writer_cut", log::F("connections", cut.size()));
  });
}

absl::StatusOr<std::shared_ptr<UcxChannel>> UcxTransport::ConnectOnce(const RemoteMemory& remote,
                                                                      const HostPort& host_port,
                                                                      ucp_err_handling_mode_t mode, Deadline deadline) {
  SPLICE_ASSIGN_OR_RETURN(const std::string address, Resolve(host_port));
  auto channel = std::make_shared<UcxChannel>(*worker_, copies_, remote);
  {
    std::lock_guard lock(mutex_);
    if (stopped_) return Errorf(absl::StatusCode::kUnavailable, "the transport is stopped");
    std::erase_if(channels_, [](const std::shared_ptr<UcxChannel>& other) { return other->closed(); });
    channels_.push_back(channel);
  }
  SPLICE_RETURN_IF_ERROR(worker_->Run([&] { channel->Open(address, mode); }));
  const absl::Status status = channel->WaitConnected(deadline);
  if (status.ok()) return channel;
  channel->CloseSoon();
  return status;
}

absl::StatusOr<std::unique_ptr<KvChannel>> UcxTransport::Connect(const RemoteMemory& remote,
                                                                 std::chrono::nanoseconds timeout) {
  const Deadline deadline = std::chrono::steady_clock::now() + timeout;
  SPLICE_ASSIGN_OR_RETURN(const HostPort address, ParseHostPort(remote.address));
  SPLICE_ASSIGN_OR_RETURN(const RkeyFrame frame, UnframeRkey(remote.rkey));
  std::string why_not_shm = "it runs on another host or in another IPC namespace";
  if (options_.carriers != "tcp" && remote.host_id == HostId() && frame.local_port != 0) {
    const auto channel = ConnectOnce(remote, {"127.0.0.1", frame.local_port}, UCP_ERR_HANDLING_MODE_NONE, deadline);
    if (channel.ok() && (*channel)->mapped()) return std::make_unique<ChannelHandle>(*channel);
    if (channel.ok()) (*channel)->CloseSoon();
    if (!channel.ok() && options_.carriers == "shm") return channel.status();
    why_not_shm = "its memory cannot be mapped";
  }
  if (options_.carriers == "shm") {
    return Errorf(absl::StatusCode::kFailedPrecondition, "no shared memory with {}: {}; use carriers auto or tcp",
                  remote.address, why_not_shm);
  }
  SPLICE_ASSIGN_OR_RETURN(const auto channel, ConnectOnce(remote, address, UCP_ERR_HANDLING_MODE_PEER, deadline));
  return std::make_unique<ChannelHandle>(channel);
}

void UcxTransport::CloseListener(std::unique_ptr<Listener>& listener) {
  if (listener != nullptr && listener->handle != nullptr) ucp_listener_destroy(listener->handle);
  if (listener != nullptr) listener->handle = nullptr;  // the address stays readable
}

void UcxTransport::Stop() {
  std::vector<std::shared_ptr<UcxChannel>> channels;
  {
    std::lock_guard lock(mutex_);
    if (stopped_) return;
    stopped_ = true;
    channels.swap(channels_);
  }
  if (worker_ == nullptr) return;
  for (const auto& channel : channels) channel->CloseSoon();
  const Deadline deadline = std::chrono::steady_clock::now() + kStopTimeout;
  for (const auto& channel : channels) {
    if (channel->WaitClosed(deadline)) continue;
    channel->Abandon();
    if (!channel->WaitClosed(deadline + kAbandonTimeout)) log::Warning("transport.channel_not_quiet");
  }
  copies_.Stop();
  const absl::Status status = worker_->Run([this] {
    CloseListener(public_);
    CloseListener(local_);
    std::vector<ucp_ep_h> peers;
    {
      std::lock_guard lock(mutex_);
      for (const auto& [ep, peer] : accepted_) peers.push_back(ep);
    }
    for (const ucp_ep_h ep : peers) ClosePeer(ep);
  });
  if (!status.ok()) log::Warning("transport.stop", log::F("status", status));
  worker_->Stop();
}

}  // namespace

absl::StatusOr<std::unique_ptr<KvTransport>> KvTransport::Create(const TransportOptions& options) {
  auto transport = std::make_unique<UcxTransport>(options);
  SPLICE_RETURN_IF_ERROR(transport->Start());
  return transport;
}

}  // namespace spl::transport
