#include "services/membership/etcd.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "etcd/v3/rpc.grpc.pb.h"
#include "services/base/grpc_status.h"
#include "services/base/log.h"
#include "services/base/periodic.h"
#include "services/base/status.h"
#include "services/membership/member_json.h"

namespace spl::membership {
namespace {

using SteadyClock = std::chrono::steady_clock;
namespace etcd = etcdserverpb;

constexpr int64_t kMaxMembers = 10'000;
constexpr std::chrono::milliseconds kPruneEvery{200};

std::string MembersPrefix(const EtcdOptions& options) { return options.prefix + "/members/"; }

// The first key after all keys that begin with `prefix`, which ends in a slash.
std::string RangeEnd(std::string prefix) {
  ++prefix.back();
  return prefix;
}

// Calls one address of etcd at a time, the next one after an error. Knows its open call, so that Stop can end it. Only
// the owner's thread makes calls; Stop may come from any.
class Client {
 public:
  explicit Client(const EtcdOptions& options) : options_(options), token_(options.access) {
    for (const std::string& endpoint : options.endpoints) {
      grpc::ChannelArguments arguments;
      arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
      arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 100);
      arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1'000);
      // A watch is silent while nothing changes. etcd allows a ping every 5 s.
      arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10'000);
      arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 3'000);
      arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
      arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
      channels_.push_back(MakeEtcdChannel(endpoint, options.access, arguments));
    }
  }

  const std::shared_ptr<grpc::Channel>& channel() const { return channels_[current_]; }
  const std::string& endpoint() const { return options_.endpoints[current_]; }
  void NextEndpoint() { current_ = (current_ + 1) % channels_.size(); }

  // Runs `call` with a context that Stop cancels, and once more if etcd needs another token. `timeout` 0: no limit.
  template <typename Function>
  absl::Status Call(std::chrono::milliseconds timeout, Function call) {
    absl::Status status;
    for (int attempt = 0; attempt < 2; ++attempt) {
      if (token_.needed()) {
        SPLICE_RETURN_IF_ERROR(CallOnce(options_.call_timeout,
                                        [&](grpc::ClientContext& context) { return token_.Get(context, channel()); }));
      }
      status = CallOnce(timeout, [&](grpc::ClientContext& context) {
        token_.AddTo(context);
        return call(context);
      });
      if (!token_.Rejected(status)) break;
    }
    return status;
  }

  // Adds the token to a call that is made after Stop.
  void AddToken(grpc::ClientContext& context) const { token_.AddTo(context); }

  // False: Stop was called.
  bool Pause(std::chrono::milliseconds time) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, time, [&] { return stopped_; });
    return !stopped_;
  }
  bool stopped() const {
    std::lock_guard lock(mutex_);
    return stopped_;
  }
  void Stop() {
    std::lock_guard lock(mutex_);
    stopped_ = true;
    if (open_ != nullptr) open_->TryCancel();
    changed_.notify_all();
  }

 private:
  template <typename Function>
  absl::Status CallOnce(std::chrono::milliseconds timeout, Function call) {
    grpc::ClientContext context;
    // A member without a leader ends the call instead of keeping it waiting.
    context.AddMetadata("hasleader", "true");
    if (timeout.count() > 0) context.set_deadline(std::chrono::system_clock::now() + timeout);
    {
      std::lock_guard lock(mutex_);
      if (stopped_) return absl::CancelledError("stopped");
      open_ = &context;
    }
    const absl::Status status = call(context);
    std::lock_guard lock(mutex_);
    open_ = nullptr;
    return status;
  }

  const EtcdOptions& options_;
  std::vector<std::shared_ptr<grpc::Channel>> channels_;
  size_t current_ = 0;
  EtcdToken token_;           // used by the calling thread only
  mutable std::mutex mutex_;  // guards the rest
  std::condition_variable changed_;
  grpc::ClientContext* open_ = nullptr;
  bool stopped_ = false;
};

class EtcdDiscovery final : public Discovery {
 public:
  explicit EtcdDiscovery(EtcdOptions options) : options_(std::move(options)), client_(options_) {}
  ~EtcdDiscovery() override { Stop(); }

  void Start(OnChange on_change) override {
    on_change_ = std::move(on_change);
    thread_ = std::thread([this] { Run(); });
    pruner_ = std::make_unique<Periodic>(kPruneEvery, [this] { Prune(); });
  }
  void Stop() override {
    client_.Stop();
    if (thread_.joinable()) thread_.join();
    if (pruner_ != nullptr) pruner_->Stop();
  }
  std::string description() const override {
    return fmt::format("etcd {} {}", fmt::join(options_.endpoints, ","), options_.prefix);
  }

 private:
  void Run() {
    while (!client_.stopped()) {
      absl::Status status = have_list_ ? absl::OkStatus() : List();
      if (status.ok()) status = Watch();
      if (client_.stopped()) return;
      if (status.ok()) continue;  // the list is stale: read it again at once
      if (reachable_) {
        log::Warning("membership.etcd_unreachable", log::F("endpoint", client_.endpoint()), log::F("status", status));
      }
      reachable_ = false;
      client_.NextEndpoint();
      if (!client_.Pause(options_.retry_pause)) return;
    }
  }

  absl::Status List() {
    const std::string prefix = MembersPrefix(options_);
    etcd::RangeRequest request;
    request.set_key(prefix);
    request.set_range_end(RangeEnd(prefix));
    request.set_limit(kMaxMembers);
    etcd::RangeResponse response;
    SPLICE_RETURN_IF_ERROR(client_.Call(options_.call_timeout, [&](grpc::ClientContext& context) {
      return FromGrpcStatus(etcd::KV::NewStub(client_.channel())->Range(&context, request, &response));
    }));
    std::map<std::string, Member> listed;
    for (const etcd::KeyValue& kv : response.kvs()) {
      if (auto member = Parse(kv)) listed.emplace(kv.key(), *std::move(member));
    }
    revision_ = response.header().revision();
    cluster_id_ = response.header().cluster_id();
    have_list_ = true;
    std::lock_guard lock(mutex_);
    const auto keep_until = SteadyClock::now() + options_.absent_grace;
    std::map<std::string, SteadyClock::time_point> absent;
    for (const auto& [key, member] : members_) {
      if (listed.contains(key)) continue;
      // A member that is already missing keeps its time limit.
      const auto known = absent_.find(key);
      absent[key] = known == absent_.end() ? keep_until : known->second;
      listed.emplace(key, member);
    }
    absent_ = std::move(absent);
    members_ = std::move(listed);
    DeliverLocked();
    return absl::OkStatus();
  }

  // Watches until the stream ends. OK: the list must be read again.
  absl::Status Watch() {
    return client_.Call(std::chrono::milliseconds(0), [&](grpc::ClientContext& context) -> absl::Status {
      const auto stub = etcd::Watch::NewStub(client_.channel());
      const auto stream = stub->Watch(&context);
      etcd::WatchRequest request;
      etcd::WatchCreateRequest& create = *request.mutable_create_request();
      create.set_key(MembersPrefix(options_));
      create.set_range_end(RangeEnd(create.key()));
      create.set_start_revision(revision_ + 1);
      create.set_progress_notify(true);  // so that a quiet watch does not resume from a compacted revision
      etcd::WatchResponse response;
      bool stale = !stream->Write(request);
      while (!stale && stream->Read(&response)) stale = !Take(response);
      if (stale) context.TryCancel();
      const absl::Status status = FromGrpcStatus(stream->Finish());
      if (!cancelled_.empty())
        return absl::UnavailableError("etcd has cancelled the watch: " + std::exchange(cancelled_, ""));
      if (!have_list_) return absl::OkStatus();
      return status.ok() ? absl::UnavailableError("etcd has ended the watch") : status;
    });
  }

  // Applies one response. False: the watch is over; have_list_ tells whether the list is still valid.
  bool Take(const etcd::WatchResponse& response) {
    const bool other_store = response.header().cluster_id() != cluster_id_ || response.header().revision() < revision_;
    if (other_store || response.compact_revision() > 0) {
      log::Info("membership.etcd_list_again", log::F("reason", other_store ? "another store" : "compacted"),
                log::F("revision", revision_), log::F("compacted", response.compact_revision()));
      have_list_ = false;
      return false;
    }
    if (response.canceled()) {
      // Perhaps etcd no longer knows the token. The list is read again, and would fail for that reason.
      cancelled_ = response.cancel_reason().empty() ? "no reason given" : response.cancel_reason();
      have_list_ = false;
      return false;
    }
    if (!reachable_) log::Info("membership.etcd_back", log::F("endpoint", client_.endpoint()));
    reachable_ = true;
    std::lock_guard lock(mutex_);
    bool changed = false;
    for (const etcd::Event& event : response.events()) {
      const std::string& key = event.kv().key();
      absent_.erase(key);
      auto member = event.type() == etcd::Event::PUT ? Parse(event.kv()) : std::nullopt;
      if (member.has_value()) {
        members_[key] = *std::move(member);
        changed = true;
      } else {
        changed |= members_.erase(key) > 0;
      }
      revision_ = std::max(revision_, event.kv().mod_revision());
    }
    // The answer to a creation has the store's revision, not the position of this watch.
    if (!response.created() && response.events().empty()) revision_ = std::max(revision_, response.header().revision());
    if (changed) DeliverLocked();
    return true;
  }

  std::optional<Member> Parse(const etcd::KeyValue& kv) {
    auto member = MemberFromJson(kv.value());
    if (member.ok()) return *std::move(member);
    log::Warning("membership.bad_member", log::F("key", kv.key()), log::F("status", member.status()));
    return std::nullopt;
  }

  void Prune() {
    std::lock_guard lock(mutex_);
    const auto now = SteadyClock::now();
    const size_t removed = std::erase_if(absent_, [&](const auto& entry) {
      if (entry.second > now) return false;
      members_.erase(entry.first);
      return true;
    });
    if (removed > 0) DeliverLocked();
  }

  void DeliverLocked() {
    Members members;
    for (const auto& [key, member] : members_) members.push_back(member);
    Normalize(members);
    if (delivered_ && members == last_) return;
    delivered_ = true;
    last_ = members;
    on_change_(last_);
  }

  const EtcdOptions options_;
  Client client_;
  OnChange on_change_;
  std::thread thread_;
  std::unique_ptr<Periodic> pruner_;
  // Used by the thread only.
  bool have_list_ = false;
  bool reachable_ = true;  // as last logged
  int64_t revision_ = 0;   // last revision seen
  uint64_t cluster_id_ = 0;
  std::string cancelled_;  // why etcd cancelled the watch; empty: it did not
  std::mutex mutex_;       // guards the rest
  std::map<std::string, Member> members_;
  std::map<std::string, SteadyClock::time_point> absent_;  // keys missing in the last list → time of removal
  Members last_;
  bool delivered_ = false;
};

class EtcdRegistration final : public Registration {
 public:
  EtcdRegistration(EtcdOptions options, Member member)
      : options_(std::move(options)),
        key_(MembersPrefix(options_) + RoleName(member.role) + "/" + member.worker_id),
        value_(ToJson(member)),
        client_(options_),
        thread_([this] { Run(); }) {}
  ~EtcdRegistration() override { Stop(); }

  void Stop() override {
    client_.Stop();
    if (!thread_.joinable()) return;
    thread_.join();
    Revoke();
  }

 private:
  void Run() {
    bool reachable = true;
    while (!client_.stopped()) {
      const absl::Status status = lease_ == 0 ? Register() : Renew();
      if (status.ok()) {
        reachable = true;
        if (lease_ != 0) client_.Pause(std::chrono::milliseconds(options_.lease_ttl) / 3);
        continue;
      }
      if (client_.stopped()) return;
      if (reachable) {
        log::Warning("membership.not_registered", log::F("key", key_), log::F("endpoint", client_.endpoint()),
                     log::F("status", status));
      }
      reachable = false;
      client_.NextEndpoint();
      client_.Pause(options_.retry_pause);
    }
  }

  absl::Status Register() {
    etcd::LeaseGrantRequest grant;
    grant.set_ttl(options_.lease_ttl.count());
    etcd::LeaseGrantResponse granted;
    SPLICE_RETURN_IF_ERROR(client_.Call(options_.call_timeout, [&](grpc::ClientContext& context) {
      return FromGrpcStatus(etcd::Lease::NewStub(client_.channel())->LeaseGrant(&context, grant, &granted));
    }));
    etcd::PutRequest put;
    put.set_key(key_);
    put.set_value(value_);
    put.set_lease(granted.id());
    etcd::PutResponse done;
    SPLICE_RETURN_IF_ERROR(client_.Call(options_.call_timeout, [&](grpc::ClientContext& context) {
      return FromGrpcStatus(etcd::KV::NewStub(client_.channel())->Put(&context, put, &done));
    }));
    lease_ = granted.id();
    log::Info("membership.registered", log::F("key", key_), log::F("endpoint", client_.endpoint()),
              log::F("lease", lease_), log::F("ttl_s", granted.ttl()));
    return absl::OkStatus();
  }

  // Opens a stream for each renewal, so that the renewal has a deadline, and the next one may go to another address.
  absl::Status Renew() {
    etcd::LeaseKeepAliveResponse response;
    SPLICE_RETURN_IF_ERROR(client_.Call(options_.call_timeout, [&](grpc::ClientContext& context) -> absl::Status {
      const auto stream = etcd::Lease::NewStub(client_.channel())->LeaseKeepAlive(&context);
      etcd::LeaseKeepAliveRequest request;
      request.set_id(lease_);
      const bool answered = stream->Write(request) && stream->Read(&response);
      stream->WritesDone();
      if (answered) context.TryCancel();  // etcd may take its time to end the stream
      const absl::Status status = FromGrpcStatus(stream->Finish());
      if (answered) return absl::OkStatus();
      return status.ok() ? absl::UnavailableError("etcd has not answered the renewal") : status;
    }));
    if (response.ttl() > 0) return absl::OkStatus();
    log::Warning("membership.lease_lost", log::F("key", key_), log::F("lease", lease_));
    lease_ = 0;
    return absl::OkStatus();
  }

  // Best effort: if it fails, the lease expires by itself.
  void Revoke() {
    if (lease_ == 0) return;
    for (size_t i = 0; i < options_.endpoints.size(); ++i, client_.NextEndpoint()) {
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() + options_.call_timeout / 2);
      client_.AddToken(context);
      etcd::LeaseRevokeRequest request;
      request.set_id(lease_);
      etcd::LeaseRevokeResponse response;
      if (etcd::Lease::NewStub(client_.channel())->LeaseRevoke(&context, request, &response).ok()) return;
    }
  }

  const EtcdOptions options_;
  const std::string key_;
  const std::string value_;
  Client client_;
  int64_t lease_ = 0;  // used by the thread only, until it has ended
  std::thread thread_;
};

}  // namespace

std::unique_ptr<Discovery> MakeEtcdDiscovery(EtcdOptions options) {
  return std::make_unique<EtcdDiscovery>(std::move(options));
}

std::unique_ptr<Registration> MakeEtcdRegistration(EtcdOptions options, Member member) {
  return std::make_unique<EtcdRegistration>(std::move(options), std::move(member));
}

}  // namespace spl::membership
