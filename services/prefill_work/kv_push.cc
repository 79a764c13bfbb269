#include "services/prefill_work/kv_push.h"

#include <algorithm>

#include "services/base/fault_point.h"
#include "services/base/status.h"

namespace spl::prefill {
namespace {

using Clock = std::chrono::steady_clock;

FaultPoint push_fault("prefill.push");

// No write starts this close to the lease's end: it must be over when the decode worker takes the pages back.
constexpr std::chrono::milliseconds kLeaseMargin{1000};
// In one call of a sender that does not wait for its layers. Each launch costs the pass beside it some 50 us, whatever
// its size, and this much takes as long (docs/results/2026-11-28-kv-push.md). A slice of fewer bytes is one call.
constexpr size_t kBytesAtOnce = size_t{64} << 20;
// That is 8 layers of 2,048 tokens of an 8B model.
constexpr int32_t kLayersAtOnce = 8;

}  // namespace

KvPush::KvPush(PushWorker& worker, std::shared_ptr<const Peer> peer, const v1::Ticket& ticket,
               const engine::Model& model, std::shared_ptr<const engine::StreamClasses> classes,
               std::unique_ptr<TicketGuard::Hold> hold, std::string request_id)
    : PromptDelivery(worker, std::move(peer), ticket, std::move(hold), std::move(request_id)),
      shape_(engine::KvShapeOf(model.config())),
      page_bytes_(model.page_bytes()),
      over_a_page_(page_bytes_),
      classes_(std::move(classes)),
      lease_end_(Clock::now() + std::chrono::milliseconds(ticket.ttl_ms()) - kLeaseMargin),
      held_pages_(static_cast<int32_t>(ticket.held_tokens()) / kernels::kPageTokens),
      sender_(peer_->MakeSender()),
      gathers_(sender_->waits_on_device()),
      crcs_(static_cast<size_t>(ticket.page_ids_size())) {
  int32_t next = 0;
  for (int32_t stream = 0; stream < shape_.num_streams(); ++stream) {
    first_target_.push_back(next);
    next += static_cast<int32_t>(ticket_.num_pages_per_stream()) - held_pages_ - HoleOf(stream).size();
  }
}

absl::StatusOr<std::shared_ptr<KvPush>> KvPush::Create(PushWorker& worker, std::shared_ptr<const Peer> peer,
                                                       const v1::Ticket& ticket, const engine::Model& model,
                                                       std::shared_ptr<const engine::StreamClasses> classes,
                                                       std::unique_ptr<TicketGuard::Hold> hold,
                                                       std::string request_id) {
  auto push = std::shared_ptr<KvPush>(
      new KvPush(worker, std::move(peer), ticket, model, std::move(classes), std::move(hold), std::move(request_id)));
  if (push->sender_->uses_landing_pages() && ticket.landing_page_ids().empty()) {
    worker.PushEnded();
    return Errorf(
        absl::StatusCode::kResourceExhausted,
        "no room for the {} MiB of KV of this prompt in the {} MiB of host memory in which it lands at decode "
        "worker '{}', over {}: others are on their way there, or the worker needs a larger --host-kv-bytes",
        push->num_bytes() >> 20, (push->peer_->endpoint.pool_bytes() - push->peer_->endpoint.scratch_bytes()) >> 20,
        push->peer_->endpoint.worker_id(), push->sender_->carrier());
  }
  return push;
}

int64_t KvPush::num_bytes() const {
  return (ticket_.page_ids_size() + restored_pages_ - left_out_pages_) * static_cast<int64_t>(page_bytes_);
}

void KvPush::Fail(const absl::Status& status) {
  std::lock_guard lock(mutex_);
  if (status_.ok()) status_ = status;
}

absl::Status KvPush::status() const {
  std::lock_guard lock(mutex_);
  return status_;
}

void KvPush::OnLayer(const engine::LayerReady& ready) {
  hold_->NoteWriting();
  bool is_due = !gathers_ || ready.layer == shape_.num_layers - 1;
  {
    std::lock_guard lock(mutex_);
    if (ready.early) {
      early_.push_back(ready);
    } else {
      due_.push_back(ready);
      due_bytes_ += BytesOf(ready);
      if (due_bytes_ >= kBytesAtOnce) is_due = true;
      if (is_due) due_bytes_ = 0;
    }
  }
  if (ready.early)
    (void)worker_.EnqueueEarly([self = Self()] { self->SendNext(self->early_); });  // or the commit does it
  else if (is_due && !worker_.Enqueue([self = Self()] { self->SendNext(self->due_); }))
    Fail(absl::ResourceExhaustedError("the prefill worker's push queue is full"));
}

int32_t KvPush::layers_at_once() const { return gathers_ ? kLayersAtOnce : 1; }

size_t KvPush::BytesOf(const engine::LayerReady& ready) const {
  int64_t pages = 0;
  for (const engine::PageRange& range : ready.pages) pages += range.end - range.begin;
  return static_cast<size_t>(pages * shape_.num_kv_heads) * page_bytes_;
}

std::vector<engine::LayerReady> KvPush::TakeNext(std::deque<engine::LayerReady>& queue) {
  std::vector<engine::LayerReady> next;
  size_t bytes = 0;
  std::lock_guard lock(mutex_);
  while (!queue.empty() && (next.empty() || (gathers_ && bytes < kBytesAtOnce && queue.front().kv == next[0].kv))) {
    bytes += BytesOf(queue.front());
    next.push_back(std::move(queue.front()));
    queue.pop_front();
  }
  return next;
}

bool KvPush::SendNext(std::deque<engine::LayerReady>& queue) {
  const std::vector<engine::LayerReady> layers = TakeNext(queue);
  if (layers.empty()) return false;
  Pages pages;
  absl::Status status = this->status();
  for (size_t i = 0; i < layers.size() && status.ok(); ++i) status = AddLayer(layers[i], pages);
  if (status.ok() && !pages.local.empty()) status = Send(layers[0].kv, std::move(pages));
  Fail(status);
  return true;
}

absl::Status KvPush::CheckLease() {
  if (Clock::now() < lease_end_) return absl::OkStatus();
  worker_.metrics().failures_lease.Increment();
  return absl::DeadlineExceededError("the ticket's lease ran out while its KV was pushed");
}

absl::Status KvPush::AddLayer(const engine::LayerReady& ready, Pages& pages) {
  SPLICE_RETURN_IF_ERROR(CheckLease());
  const FaultOutcome fault = push_fault.Hit();
  SPLICE_RETURN_IF_ERROR(fault.status);
  Pages lost;
  Pages& to = fault.drop ? lost : pages;
  for (int32_t h = 0; h < shape_.num_kv_heads; ++h) AddKept(ready, ready.layer * shape_.num_kv_heads + h, to);
  if (ready.fence != nullptr && (to.behind.empty() || to.behind.back() != ready.fence))
    to.behind.push_back(ready.fence);  // several layers may have one
  if (!fault.drop) return absl::OkStatus();
  // Simulates a lost write: the checksums are right, the bytes never leave.
  if (ready.fence != nullptr) SPLICE_RETURN_IF_ERROR(ready.fence->Wait());
  lost.crcs.resize(lost.local.size());
  if (ready.kv->pool().ChecksumPages(lost.local, lost.crcs.data()).ok()) sent_.push_back(std::move(lost));
  return absl::OkStatus();
}

int32_t KvPush::TargetOf(int32_t stream, int32_t page) const {
  const engine::PageHole hole = HoleOf(stream);
  return first_target_[stream] + page - held_pages_ - (page >= hole.end ? hole.size() : 0);
}

uint32_t KvPush::ChecksumOf(int32_t stream) const {
  const engine::PageHole hole = HoleOf(stream);
  const auto restored = hole_crcs_.find(stream);
  uint32_t crc = 0;
  for (auto page = held_pages_; page < static_cast<int32_t>(ticket_.num_pages_per_stream()); ++page) {
    std::optional<uint32_t> of_page;
    if (page < hole.begin || page >= hole.end) {
      of_page = crcs_[TargetOf(stream, page)];
    } else if (restored != hole_crcs_.end()) {
      of_page = restored->second[page - hole.begin];
    }
    if (of_page.has_value()) crc = over_a_page_(crc) ^ *of_page;
  }
  return crc;
}

engine::PageHole KvPush::HoleOf(int32_t stream) const {
  if (ticket_.hole_begin().empty()) return {};
  return {static_cast<int32_t>(ticket_.hole_begin(stream)), static_cast<int32_t>(ticket_.hole_end(stream))};
}

// The stream's pages to send, and their target pages.
void KvPush::AddKept(const engine::LayerReady& ready, int32_t stream, Pages& pages) const {
  const auto& targets = sender_->uses_landing_pages() ? ticket_.landing_page_ids() : ticket_.page_ids();
  const std::vector<int32_t>& local = ready.kv->streams()[stream];
  const engine::PageHole hole = HoleOf(stream);
  for (const engine::PositionRange& range : ready.pages) {
    for (int32_t page = std::max(range.begin, held_pages_); page < range.end; ++page) {
      if (page >= hole.begin && page < hole.end) continue;
      if (ready.kept != nullptr && !ready.kept->KeepsPage(ready.layer, page)) continue;
      pages.local.push_back(local[page]);
      pages.targets.push_back(TargetOf(stream, page));
      pages.remote.push_back(targets[pages.targets.back()]);
    }
  }
}

absl::Status KvPush::Send(const std::shared_ptr<const engine::SequenceKv>& kv, Pages pages) {
  pages.crcs.resize(pages.local.size());
  Pages& sent = sent_.emplace_back(std::move(pages));
  // Weak: the sender, which is ours, may keep this until it finishes.
  const absl::Status posted =
      sender_->Send(kv->pool(), {.local = sent.local, .remote = sent.remote, .behind = sent.behind}, sent.crcs.data(),
                    lease_end_, [weak = std::weak_ptr<KvPush>(Self()), kv](const absl::Status& status) {
                      const auto self = weak.lock();
                      if (self == nullptr || status.ok()) return;
                      if (absl::IsDeadlineExceeded(status)) self->worker_.metrics().failures_lease.Increment();
                      self->Fail(status);
                    });
  sent.behind.clear();
  if (!posted.ok()) worker_.metrics().failures_lost.Increment();
  return posted;
}

void KvPush::FinishSends() {
  sender_->Finish();
  for (Pages& pages : sent_) {
    for (size_t i = 0; i < pages.targets.size(); ++i) crcs_[pages.targets[i]] = pages.crcs[i];
    if (pages.hole_of.has_value()) hole_crcs_[*pages.hole_of] = std::move(pages.crcs);
  }
  sent_.clear();
}

// Restored heads are known after the last layer: the KV in their holes goes to the spare pages.
absl::Status KvPush::SendRestored() {
  if (ticket_.hole_begin().empty() || commit_.restored_heads().empty()) return absl::OkStatus();
  SPLICE_RETURN_IF_ERROR(CheckLease());
  const std::vector<int32_t> restored(commit_.restored_heads().begin(), commit_.restored_heads().end());
  const std::vector<int32_t> lists_of_rank(ticket_.spare_lists().begin(), ticket_.spare_lists().end());
  SPLICE_ASSIGN_OR_RETURN(const std::vector<int32_t> lists,
                          engine::AssignSpares(shape_, *classes_, kv_->num_tokens(), lists_of_rank, restored));
  const auto& spares = sender_->uses_landing_pages() ? ticket_.spare_landing_page_ids() : ticket_.spare_page_ids();
  for (size_t i = 0; i < restored.size(); ++i) {
    const engine::PageHole hole = HoleOf(restored[i]);
    if (hole.size() == 0) continue;
    const std::vector<int32_t>& local = kv_->streams()[restored[i]];
    Pages pages;
    pages.hole_of = restored[i];
    for (int32_t page = hole.begin; page < hole.end; ++page) {
      pages.local.push_back(local[page]);
      pages.remote.push_back(spares[lists[i] * static_cast<int32_t>(ticket_.pages_per_spare()) + page - hole.begin]);
    }
    SPLICE_RETURN_IF_ERROR(Send(kv_, std::move(pages)));
  }
  return absl::OkStatus();
}

void KvPush::NoteOutcome(const engine::PrefillOutcome& outcome) {
  const engine::SequenceKv& kv = *outcome.kv;
  for (const int32_t stream : outcome.restored_heads) restored_pages_ += HoleOf(stream).size();
  if (!outcome.only.empty()) {
    left_out_pages_ = int64_t{shape_.num_streams()} *
                      (static_cast<int64_t>(ticket_.num_pages_per_stream()) - engine::PagesFor(kv.num_tokens()));
  }
  const engine::KeptTokens* const kept_tokens = outcome.kept.get();
  for (size_t layer = 0; kept_tokens != nullptr && layer < kept_tokens->layers.size(); ++layer) {
    for (int32_t page = 0; page < kv.num_pages_per_stream(); ++page) {
      if (!kept_tokens->KeepsPage(static_cast<int32_t>(layer), page)) left_out_pages_ += shape_.num_kv_heads;
    }
  }
}

void KvPush::DoCommit() {
  while (SendNext(due_) || SendNext(early_)) {
  }
  if (status().ok()) {
    if (const absl::Status sent = SendRestored(); !sent.ok()) Fail(sent);
  }
  FinishSends();
  if (const absl::Status failed = status(); !failed.ok()) {
    DoAbort(failed, [] {});
    return;
  }
  const auto flushed = [self = Self()](const absl::Status& flush_status) {
    // On the transport's thread, which must not wait: the rest goes back to ours.
    (void)self->worker_.Enqueue([self, flush_status] {
      self->Fail(flush_status);
      if (self->status().ok())
        self->CommitWritten();
      else
        self->DoAbort(self->status(), [] {});
    });
  };
  if (const absl::Status status = peer_->channel->Flush(flushed); !status.ok()) {
    worker_.metrics().failures_lost.Increment();
    DoAbort(status, [] {});
  }
}

void KvPush::CommitWritten() {
  for (int32_t stream = 0; stream < shape_.num_streams(); ++stream) commit_.add_crc32c(ChecksumOf(stream));
  commit_.set_in_landing_pages(sender_->uses_landing_pages());
  SendCommit();
}

void KvPush::DoAbort(const absl::Status& why, std::function<void()> done) {
  {
    std::lock_guard lock(mutex_);
    due_.clear();
    early_.clear();
  }
  EndPushSpan(why);
  FinishSends();
  const auto finish = [self = Self(), done = std::move(done)] {
    self->End();
    done();
  };
  const auto flushed = [self = Self(), why, finish](const absl::Status& flush_status) {
    flush_status.ok() ? self->hold_->EndFlushed() : self->EndUnflushed();
    (void)self->worker_.Enqueue(
        [self, why, finish, quiet = flush_status.ok()] { self->SendRelease(MessageOf(why), quiet, finish); });
  };
  // The decode worker takes the pages back when it sees the end of the channel.
  if (!peer_->channel->Flush(flushed).ok()) {
    EndUnflushed();
    finish();
  }
}

}  // namespace spl::prefill
