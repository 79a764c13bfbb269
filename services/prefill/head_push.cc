#include "services/prefill/head_push.h"

#include <mutex>
#include <utility>

#include "services/base/fault_point.h"
#include "services/base/status.h"

namespace spl::prefill {
namespace {

FaultPoint fetch_fault("prefill.fetch_heads");

// One fetch. Everything that the transport reads lives until its last callback has run.
struct Fetch {
  PushWorker& worker;
  const std::shared_ptr<const Peer> peer;
  const std::shared_ptr<const LeasedHeads> heads;
  const HeadFetchHold hold;
  const std::chrono::steady_clock::time_point deadline;
  const std::function<void(absl::StatusOr<std::vector<uint32_t>>)> done;
  std::vector<int32_t> local;
  std::vector<uint32_t> remote, crcs;
  std::unique_ptr<PageSender> sender;

  std::mutex mutex;  // guards sent
  absl::Status sent;

  void NoteSent(const absl::Status& status) {
    std::lock_guard lock(mutex);
    if (sent.ok()) sent = status;
  }
  // Before the answer: who gets one that is not OK asks whether the writes are over.
  void NoteQuiet(bool flushed) {
    if (hold.hold != nullptr && flushed) hold.hold->EndFlushed();
    if (hold.hold != nullptr && !flushed && !hold.hold->EndUnflushed()) peer->given_up = true;
  }
  void End(const absl::Status& status) {
    NoteQuiet(false);  // unless it was flushed, or nothing was written
    if (status.ok())
      done(std::move(crcs));
    else if (absl::IsDeadlineExceeded(status) || absl::IsAborted(status))
      done(status);
    else
      done(absl::UnavailableError(MessageOf(status)));  // some writes may be in flight
    worker.PushEnded();
  }
};

void Run(const std::shared_ptr<Fetch>& fetch) {
  const FaultOutcome fault = fetch_fault.Hit();
  if (!fault.status.ok()) return fetch->End(fault.status);
  if (std::chrono::steady_clock::now() >= fetch->deadline)
    return fetch->End(absl::DeadlineExceededError("the time for fetching heads was over before it began"));
  if (fetch->hold.cancelled->load()) return fetch->End(absl::AbortedError("the fetch was given up"));
  if (fetch->hold.hold != nullptr) fetch->hold.hold->NoteWriting();
  fetch->sender = fetch->peer->MakeSender();
  fetch->crcs.resize(fetch->local.size());
  const absl::Status posted =
      fetch->sender->Send(fetch->heads->pool(), {fetch->local, fetch->remote}, fetch->crcs.data(), fetch->deadline,
                          [fetch](const absl::Status& status) { fetch->NoteSent(status); });
  fetch->sender->Finish();
  if (!posted.ok()) return fetch->End(posted);
  if (fault.corrupt) fetch->crcs[0] ^= 1u;
  const absl::Status flushing = fetch->peer->channel->Flush([fetch](const absl::Status& flushed) {
    fetch->NoteSent(flushed);
    fetch->NoteQuiet(flushed.ok());
    fetch->End(fetch->sent);
  });
  if (!flushing.ok()) fetch->End(flushing);
}

}  // namespace

absl::Status PushHeads(PushWorker& worker, std::shared_ptr<const Peer> peer, std::shared_ptr<const LeasedHeads> heads,
                       HeadFetchHold hold, const v1::FetchHeadsRequest& request,
                       std::chrono::steady_clock::time_point deadline,
                       std::function<void(absl::StatusOr<std::vector<uint32_t>>)> done) {
  auto fetch = std::shared_ptr<Fetch>(new Fetch{worker,
                                                std::move(peer),
                                                std::move(heads),
                                                std::move(hold),
                                                deadline,
                                                std::move(done),
                                                {},
                                                {},
                                                {},
                                                nullptr,
                                                {},
                                                {}});
  const v1::DecodeEndpoint& endpoint = fetch->peer->endpoint;
  if (!endpoint.device_handle().empty() || !fetch->heads->pool().host_memory())
    return absl::UnimplementedError("heads are fetched between pools in host memory only");
  const uint64_t pool_pages =
      (endpoint.pool_bytes() - endpoint.scratch_bytes()) / fetch->heads->pool().view().page_bytes();
  for (const v1::FetchHeadsRequest::Head& wanted : request.heads()) {
    const LeasedHeads::Head* const head = fetch->heads->Find(static_cast<int32_t>(wanted.stream()));
    if (head == nullptr || head->pages.size() != static_cast<size_t>(wanted.page_ids_size()))
      return InvalidArgument("{} pages of head stream {} are to be fetched, the lease has {}", wanted.page_ids_size(),
                             wanted.stream(), head == nullptr ? 0 : head->pages.size());
    fetch->local.insert(fetch->local.end(), head->pages.begin(), head->pages.end());
    for (const uint32_t page : wanted.page_ids()) {
      if (page >= pool_pages)
        return InvalidArgument("heads are to be fetched into page {}, the pool of '{}' has {}", page,
                               endpoint.worker_id(), pool_pages);
      fetch->remote.push_back(page);
    }
  }
  if (fetch->local.empty()) return absl::InvalidArgumentError("no heads are to be fetched");
  worker.PushStarted();
  if (worker.Enqueue([fetch] { Run(fetch); })) return absl::OkStatus();
  worker.PushEnded();
  return absl::ResourceExhaustedError("the prefill worker's push queue is full");
}

}  // namespace spl::prefill
