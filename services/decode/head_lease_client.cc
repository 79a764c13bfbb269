#include "services/decode/head_lease_client.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "services/base/check.h"
#include "services/base/grpc_status.h"
#include "services/base/log.h"
#include "services/base/status.h"
#include "services/base/thread_priority.h"

namespace spl::decode {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMaxTasks = 4096;
constexpr size_t kMaxStubs = 64;
constexpr std::chrono::milliseconds kTick{50};  // renewals and the end of quarantines are this exact
constexpr std::chrono::seconds kAskEvery{2};

// A call keeps everything that gRPC refers to until its callback has run.
template <typename Request, typename Response>
struct Call {
  grpc::ClientContext context;
  Request request;
  Response response;
};

}  // namespace

class HeadLeaseClient::Lease final : public engine::HeadSource, public std::enable_shared_from_this<Lease> {
 public:
  Lease(HeadLeaseClient& client, const v1::HeadLease& lease, std::vector<engine::KeySummary> summaries)
      : client_(client),
        id_(lease.lease_id()),
        stub_(client.StubOf(lease.grpc_address())),
        writer_(client.fence_.Note(lease.writer(), client.options_.fetch_timeout)),
        ttl_(lease.ttl_ms()),
        summaries_(std::move(summaries)),
        ends_(Clock::now() + ttl_),
        renew_at_(Clock::now() + ttl_ / 3) {}

  // Not the RPC itself: this runs on the engine's thread.
  ~Lease() override {
    (void)client_.tasks_.TryPush([client = &client_, stub = stub_, id = id_] {
      auto call = std::make_shared<Call<v1::ReleaseHeadLeaseRequest, v1::ReleaseHeadLeaseResponse>>();
      call->request.set_lease_id(id);
      call->context.set_deadline(std::chrono::system_clock::now() + client->options_.rpc_timeout);
      client->CallStarted();
      stub->async()->ReleaseHeadLease(&call->context, &call->request, &call->response,
                                      [call, client](const grpc::Status&) { client->CallEnded(); });
    });
  }

  std::span<const engine::KeySummary> summaries() const override { return summaries_; }
  bool alive() const override { return !ended_.load() && Clock::now() < ends_.load(); }
  void Fetch(std::shared_ptr<engine::HeadPages> pages, std::function<void(absl::Status)> done) override {
    if (client_.tasks_.TryPush(
            [client = &client_, self = shared_from_this(), pages, done] { client->StartFetch(self, pages, done); }))
      return;
    done(absl::ResourceExhaustedError("too many heads are being fetched"));
  }

  void Heard(const absl::Status& status, Clock::time_point asked) {
    if (status.ok()) ends_ = asked + ttl_;
    if (absl::IsNotFound(status)) ended_ = true;
  }
  void RenewIfDue(Clock::time_point now) {
    if (now < renew_at_ || ended_) return;
    renew_at_ = now + ttl_ / 3;
    auto call = std::make_shared<Call<v1::RenewHeadLeaseRequest, v1::RenewHeadLeaseResponse>>();
    call->request.set_lease_id(id_);
    call->context.set_deadline(std::chrono::system_clock::now() + client_.options_.rpc_timeout);
    client_.CallStarted();
    stub_->async()->RenewHeadLease(&call->context, &call->request, &call->response,
                                   [call, now, client = &client_, weak = weak_from_this()](const grpc::Status& status) {
                                     if (const auto self = weak.lock()) self->Heard(FromGrpcStatus(status), now);
                                     client->CallEnded();
                                   });
  }
  const std::string& id() const { return id_; }
  Stub& stub() const { return *stub_; }
  const TicketWriter& writer() const { return writer_; }

 private:
  HeadLeaseClient& client_;
  const std::string id_;
  const std::shared_ptr<Stub> stub_;
  const TicketWriter writer_;
  const std::chrono::milliseconds ttl_;
  const std::vector<engine::KeySummary> summaries_;
  std::atomic<bool> ended_{false};
  std::atomic<Clock::time_point> ends_;  // unless it is renewed
  Clock::time_point renew_at_;           // the client's thread only
};

HeadLeaseClient::HeadLeaseClient(const HeadLeaseOptions& options, std::string worker_id, uint64_t epoch,
                                 WriterFence& fence)
    : options_(options),
      worker_id_(std::move(worker_id)),
      epoch_(epoch),
      fence_(fence),
      tasks_(kMaxTasks),
      thread_([this] { Loop(); }) {}

HeadLeaseClient::~HeadLeaseClient() { SPLICE_CHECK(!thread_.joinable(), "Stop() was not called"); }

std::shared_ptr<engine::HeadSource> HeadLeaseClient::Open(const v1::HeadLease& lease,
                                                          std::vector<engine::KeySummary> summaries) {
  auto opened = std::make_shared<Lease>(*this, lease, std::move(summaries));
  std::lock_guard lock(mutex_);
  std::erase_if(leases_, [](const auto& weak) { return weak.expired(); });
  leases_.push_back(opened);
  return opened;
}

size_t HeadLeaseClient::num_fetching() const {
  std::lock_guard lock(mutex_);
  return num_fetching_ + quarantined_.size();
}

// Prefill workers are few; addresses of those that are gone are forgotten when there have been many.
std::shared_ptr<HeadLeaseClient::Stub> HeadLeaseClient::StubOf(const std::string& address) {
  std::lock_guard lock(mutex_);
  if (const auto known = stubs_.find(address); known != stubs_.end()) return known->second;
  if (stubs_.size() >= kMaxStubs) stubs_.clear();
  std::shared_ptr<Stub> stub = v1::Prefill::NewStub(MakePeerChannel(address, options_.tls.get()));
  stubs_.emplace(address, stub);
  return stub;
}

void HeadLeaseClient::CallStarted() {
  std::lock_guard lock(mutex_);
  ++num_calls_;
}

void HeadLeaseClient::CallEnded() {
  std::lock_guard lock(mutex_);
  --num_calls_;
  idle_.notify_all();
}

void HeadLeaseClient::Loop() {
  SetThreadPriority(ThreadPriority::kTransfer);
  while (true) {
    const auto task = tasks_.Pop(kTick);
    if (task)
      (*task)();
    else if (tasks_.closed())
      return;
    RenewDue(Clock::now());
  }
}

void HeadLeaseClient::RenewDue(Clock::time_point now) {
  std::vector<std::shared_ptr<Lease>> leases;
  {
    std::lock_guard lock(mutex_);
    if (stopping_) return;
    for (const auto& weak : leases_) {
      if (auto lease = weak.lock()) leases.push_back(std::move(lease));
    }
  }
  for (const auto& lease : leases) lease->RenewIfDue(now);
  LookForProofs(now);
}

void HeadLeaseClient::LookForProofs(Clock::time_point now) {
  std::list<Quarantined> over;  // their pages go back without the lock
  std::vector<std::pair<RandomId, TicketWriter>> to_ask;
  {
    std::lock_guard lock(mutex_);
    for (auto it = quarantined_.begin(); it != quarantined_.end();) {
      const auto at = it++;
      if (fence_.Gone(at->writer)) {
        over.splice(over.end(), quarantined_, at);
        continue;
      }
      if (now >= at->ask_at) {
        at->ask_at = now + kAskEvery;
        to_ask.emplace_back(at->fetch, at->writer);
      }
      if (now >= at->cut_at && !at->cut) at->cut = fence_.Cut(at->writer);
    }
  }
  for (const auto& [fetch, writer] : to_ask) (void)fence_.Ask(writer, fetch, [this, id = fetch] { Free(id); });
}

void HeadLeaseClient::Free(const RandomId& fetch) {
  std::list<Quarantined> over;
  std::lock_guard lock(mutex_);
  const auto found = std::find_if(quarantined_.begin(), quarantined_.end(),
                                  [&](const Quarantined& quarantined) { return quarantined.fetch == fetch; });
  if (found != quarantined_.end()) over.splice(over.end(), quarantined_, found);
}

void HeadLeaseClient::StartFetch(const std::shared_ptr<Lease>& lease, std::shared_ptr<engine::HeadPages> pages,
                                 std::function<void(absl::Status)> done) {
  auto call = std::make_shared<Call<v1::FetchHeadsRequest, v1::FetchHeadsResponse>>();
  call->request.set_lease_id(lease->id());
  call->request.set_worker_id(worker_id_);
  call->request.set_epoch(epoch_);
  call->request.set_ttl_ms(static_cast<uint32_t>(options_.fetch_timeout.count()));
  const RandomId fetch = RandomId::Make();
  call->request.set_fetch_id(fetch.ToBytes());
  for (size_t i = 0; i < pages->streams.size(); ++i) {
    v1::FetchHeadsRequest::Head& head = *call->request.add_heads();
    head.set_stream(static_cast<uint32_t>(pages->streams[i]));
    head.mutable_page_ids()->Assign(pages->pages[i].begin(), pages->pages[i].end());
  }
  call->context.set_deadline(std::chrono::system_clock::now() + options_.fetch_timeout);
  {
    std::lock_guard lock(mutex_);
    ++num_calls_;
    ++num_fetching_;
  }
  lease->stub().async()->FetchHeads(
      &call->context, &call->request, &call->response,
      [this, call, pages, done, lease, fetch, asked = Clock::now()](const grpc::Status& grpc_status) {
        const Quarantined quarantined{pages, fetch, lease->writer(), Clock::now(),
                                      Clock::now() + options_.fetch_timeout};
        const absl::Status status = FromGrpcStatus(grpc_status);
        lease->Heard(status, asked);
        // Checksums take longer than a callback should.
        const bool queued = status.ok() && tasks_.TryPush([this, call, pages, quarantined, done] {
          std::vector<int32_t> all;
          for (const auto& list : pages->pages) all.insert(all.end(), list.begin(), list.end());
          std::vector<uint32_t> crcs(all.size());
          absl::Status verified = pages->pool.ChecksumPages(all, crcs.data());
          if (verified.ok() &&
              !std::equal(crcs.begin(), crcs.end(), call->response.crc32c().begin(), call->response.crc32c().end()))
            verified = absl::DataLossError("heads arrived damaged: their checksums differ");
          EndFetch(quarantined, verified, done);
        });
        if (!queued) EndFetch(quarantined, status.ok() ? absl::UnavailableError("stopping") : status, done);
        CallEnded();
      });
}

void HeadLeaseClient::EndFetch(Quarantined quarantined, const absl::Status& status,
                               const std::function<void(absl::Status)>& done) {
  const bool may_write = absl::IsDeadlineExceeded(status) || absl::IsUnavailable(status) || absl::IsCancelled(status);
  if (!status.ok()) log::Warning("decode.head_fetch_failed", log::F("status", status));
  {
    std::lock_guard lock(mutex_);
    --num_fetching_;
    if (may_write && !stopping_) quarantined_.push_back(std::move(quarantined));
  }
  done(status);
}

// Running fetches end by their deadline at the latest; their pages go with the pool.
void HeadLeaseClient::Stop() {
  {
    std::lock_guard lock(mutex_);
    if (stopping_ && !thread_.joinable()) return;
    stopping_ = true;
  }
  tasks_.Close();
  if (thread_.joinable()) thread_.join();
  std::list<Quarantined> quarantined;
  std::unique_lock lock(mutex_);
  idle_.wait_for(lock, options_.fetch_timeout + options_.rpc_timeout, [&] { return num_calls_ == 0; });
  quarantined.swap(quarantined_);
}

}  // namespace spl::decode
