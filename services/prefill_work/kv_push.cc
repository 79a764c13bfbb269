#include "services/prefill_work/kv_push.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>

#include "services/base/fault_point.h"
#include "services/base/grpc_status.h"
#include "services/base/grpc_trace.h"
#include "services/base/log.h"
#include "services/base/status.h"
#include "services/base/thread_priority.h"
#include "services/wire/convert.h"

namespace spl::prefill {
namespace {

using Clock = std::chrono::steady_clock;

FaultPoint push_fault("prefill.push");
FaultPoint commit_fault("prefill.commit");

// A prompt of 256 slices through 128 layers fits several times over.
constexpr size_t kMaxTasks = 1 << 18;
constexpr std::chrono::milliseconds kIdleWait{200};
constexpr std::chrono::seconds kRpcTimeout{10};
// No write starts this close to the lease's end: it must be over when the decode worker takes the pages back.
constexpr std::chrono::milliseconds kLeaseMargin{1000};

}  // namespace

namespace {

// Pages that are not in the ticket's holes. InvalidArgument: a hole where the request's classes keep something.
absl::StatusOr<int64_t> CountKept(const v1::Ticket& ticket, const engine::KvShape& shape, int64_t num_tokens,
                                  const engine::StreamClasses* classes) {
  const int64_t all = int64_t{shape.num_streams()} * engine::PagesFor(num_tokens);
  if (ticket.hole_begin().empty() && ticket.hole_end().empty()) return all;
  if (ticket.hole_begin_size() != shape.num_streams() || ticket.hole_end_size() != shape.num_streams())
    return InvalidArgument("the ticket has {} and {} ends of holes for {} head streams", ticket.hole_begin_size(),
                           ticket.hole_end_size(), shape.num_streams());
  if (classes == nullptr) return InvalidArgument("the ticket keeps less than the request's reuse policy needs");
  int64_t kept = all;
  for (int32_t s = 0; s < shape.num_streams(); ++s) {
    const uint32_t begin = ticket.hole_begin(s), end = ticket.hole_end(s);
    const engine::PageHole most = engine::HoleOf((*classes)[static_cast<size_t>(s)], num_tokens);
    if (begin > end ||
        (begin < end && (begin < static_cast<uint32_t>(most.begin) || end > static_cast<uint32_t>(most.end))))
      return InvalidArgument(
          "the ticket does not keep pages [{}, {}) of layer {} head {}; its class leaves out [{}, {})", begin, end,
          s / shape.num_kv_heads, s % shape.num_kv_heads, most.begin, most.end);
    kept -= end - begin;
  }
  return kept;
}

absl::Status CheckSpares(const v1::Ticket& ticket, const engine::KvShape& shape) {
  uint64_t lists = 0;
  for (const uint32_t of_rank : ticket.spare_lists()) lists += of_rank;
  const int ranks = ticket.spare_lists_size();
  if (lists * ticket.pages_per_spare() != static_cast<uint64_t>(ticket.spare_page_ids_size()) ||
      (ranks > 0 && shape.num_kv_heads % ranks != 0) || lists > static_cast<uint64_t>(shape.num_streams()))
    return InvalidArgument("the ticket has {} spare pages in {} lists of {}, for {} ranks",
                           ticket.spare_page_ids_size(), lists, ticket.pages_per_spare(), ranks);
  const bool landing = !ticket.landing_page_ids().empty();
  if (ticket.spare_landing_page_ids_size() != (landing ? ticket.spare_page_ids_size() : 0))
    return InvalidArgument("the ticket has {} spare pages and {} spare landing pages", ticket.spare_page_ids_size(),
                           ticket.spare_landing_page_ids_size());
  // Restored heads fill their holes with them.
  for (int i = 0; i < ticket.hole_begin_size() && lists > 0; ++i) {
    if (ticket.hole_end(i) - ticket.hole_begin(i) > ticket.pages_per_spare())
      return InvalidArgument("the ticket's spare lists of {} pages do not fill a hole of {}", ticket.pages_per_spare(),
                             ticket.hole_end(i) - ticket.hole_begin(i));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateTicket(const v1::Ticket& ticket, const v1::DecodeEndpoint& endpoint, const engine::Model& model,
                            int64_t num_tokens, const engine::StreamClasses* classes) {
  const engine::KvShape shape = engine::KvShapeOf(model.config());
  const int64_t pages = engine::PagesFor(num_tokens);
  SPLICE_ASSIGN_OR_RETURN(const int64_t kept, CountKept(ticket, shape, num_tokens, classes));
  if (ticket.num_layers() != static_cast<uint32_t>(shape.num_layers) ||
      ticket.num_kv_heads() != static_cast<uint32_t>(shape.num_kv_heads) || ticket.num_pages_per_stream() != pages ||
      ticket.page_ids_size() != kept)
    return InvalidArgument("the ticket has {} pages ({} layers, {} heads, {} each); a prompt of {} tokens needs {}",
                           ticket.page_ids_size(), ticket.num_layers(), ticket.num_kv_heads(),
                           ticket.num_pages_per_stream(), num_tokens, kept);
  SPLICE_RETURN_IF_ERROR(CheckSpares(ticket, shape));
  const uint64_t registered = (endpoint.pool_bytes() - endpoint.scratch_bytes()) / model.page_bytes();
  const uint64_t pool_pages =
      endpoint.device_handle().empty()
          ? registered
          : endpoint.device_pool_pages() * (1 + static_cast<uint64_t>(endpoint.more_device_handles_size()));
  for (const auto* ids : {&ticket.page_ids(), &ticket.spare_page_ids()}) {
    for (uint32_t page : *ids) {
      if (page >= pool_pages)
        return InvalidArgument("the ticket names page {}, the pool of '{}' has {}", page, endpoint.worker_id(),
                               pool_pages);
    }
  }
  if (!ticket.landing_page_ids().empty() && ticket.landing_page_ids_size() != ticket.page_ids_size())
    return InvalidArgument("the ticket has {} pages and {} landing pages", ticket.page_ids_size(),
                           ticket.landing_page_ids_size());
  for (const auto* ids : {&ticket.landing_page_ids(), &ticket.spare_landing_page_ids()}) {
    for (uint32_t page : *ids) {
      if (page >= registered)
        return InvalidArgument("the ticket names landing page {}, '{}' has {}", page, endpoint.worker_id(), registered);
    }
  }
  return absl::OkStatus();
}

PushMetrics::PushMetrics(Metrics& metrics)
    : bytes_out(metrics.Counter(metric::kKvTransferBytesTotal, "KV bytes transferred.", {{"direction", "out"}})),
      failures_lost(metrics.Counter(metric::kKvTransferFailuresTotal, "Transfers that failed.", {{"reason", "lost"}})),
      failures_lease(
          metrics.Counter(metric::kKvTransferFailuresTotal, "Transfers that failed.", {{"reason", "lease"}})),
      failures_commit(
          metrics.Counter(metric::kKvTransferFailuresTotal, "Transfers that failed.", {{"reason", "commit"}})),
      seconds(metrics.Histogram(metric::kKvTransferSeconds,
                                "From the last computed layer to the decode worker's acknowledgement.",
                                buckets::Stage())) {}

KvPush::KvPush(PushWorker& worker, std::shared_ptr<const Peer> peer, const v1::Ticket& ticket,
               const engine::Model& model, std::shared_ptr<const engine::StreamClasses> classes,
               std::unique_ptr<TicketGuard::Hold> hold, std::string request_id)
    : worker_(worker),
      peer_(std::move(peer)),
      ticket_(ticket),
      shape_(engine::KvShapeOf(model.config())),
      page_bytes_(model.page_bytes()),
      over_a_page_(page_bytes_),
      classes_(std::move(classes)),
      hold_(std::move(hold)),
      request_id_(std::move(request_id)),
      lease_end_(Clock::now() + std::chrono::milliseconds(ticket.ttl_ms()) - kLeaseMargin),
      sender_(peer_->MakeSender()),
      crc_(shape_.num_streams(), 0) {
  int32_t next = 0;
  for (int32_t stream = 0; stream < shape_.num_streams(); ++stream) {
    first_target_.push_back(next);
    next += static_cast<int32_t>(ticket_.num_pages_per_stream()) - HoleOf(stream).size();
  }
  worker_.PushStarted();
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
    return Errorf(absl::StatusCode::kResourceExhausted, "the landing memory of decode worker '{}' is full",
                  push->peer_->endpoint.worker_id());
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
  if (!worker_.Enqueue([self = shared_from_this(), ready] { self->DoLayer(ready); }))
    Fail(absl::ResourceExhaustedError("the prefill worker's push queue is full"));
}

void KvPush::DoLayer(const engine::LayerReady& ready) {
  if (!status().ok()) return;
  if (Clock::now() >= lease_end_) {
    worker_.metrics().failures_lease.Increment();
    return Fail(absl::DeadlineExceededError("the ticket's lease ran out while its KV was pushed"));
  }
  const FaultOutcome fault = push_fault.Hit();
  if (!fault.status.ok()) return Fail(fault.status);
  if (ready.fence != nullptr) {
    if (const absl::Status written = ready.fence->Wait(); !written.ok()) return Fail(written);
  }
  std::vector<Pages> heads(static_cast<size_t>(shape_.num_kv_heads));
  Pages all;
  for (int32_t h = 0; h < shape_.num_kv_heads; ++h) {
    Pages& head = heads[static_cast<size_t>(h)];
    AddKept(ready, ready.layer * shape_.num_kv_heads + h, head);
    all.local.insert(all.local.end(), head.local.begin(), head.local.end());
    all.remote.insert(all.remote.end(), head.remote.begin(), head.remote.end());
  }
  if (all.local.empty()) return;
  if (fault.drop) {  // simulates a lost write: the checksums are right, the bytes never leave
    all.crcs.resize(all.local.size());
    if (!ready.kv->pool().ChecksumPages(all.local, all.crcs.data()).ok()) return;
  } else if (const absl::Status posted = Send(ready.kv, all); !posted.ok()) {
    return Fail(posted);
  }
  // Pages of a stream come in order, so the stream's checksum is built by joining theirs.
  auto next = all.crcs.begin();
  for (int32_t h = 0; h < shape_.num_kv_heads; ++h) {
    uint32_t& crc = crc_[static_cast<size_t>(ready.layer * shape_.num_kv_heads + h)];
    for (size_t i = heads[static_cast<size_t>(h)].local.size(); i > 0; --i) crc = over_a_page_(crc) ^ *next++;
  }
}

engine::PageHole KvPush::HoleOf(int32_t stream) const {
  if (ticket_.hole_begin().empty()) return {};
  return {static_cast<int32_t>(ticket_.hole_begin(stream)), static_cast<int32_t>(ticket_.hole_end(stream))};
}

// The stream's pages to send, and their target pages.
void KvPush::AddKept(const engine::LayerReady& ready, int32_t stream, Pages& pages) const {
  const auto& targets = sender_->uses_landing_pages() ? ticket_.landing_page_ids() : ticket_.page_ids();
  const std::vector<int32_t>& local = ready.kv->streams()[static_cast<size_t>(stream)];
  const engine::PageHole hole = HoleOf(stream);
  for (int32_t page = ready.first_page; page < ready.first_page + ready.num_pages; ++page) {
    if (page >= hole.begin && page < hole.end) continue;
    if (ready.kept != nullptr && !ready.kept->KeepsPage(ready.layer, page)) continue;
    pages.local.push_back(local[static_cast<size_t>(page)]);
    pages.remote.push_back(
        targets[first_target_[static_cast<size_t>(stream)] + page - (page >= hole.end ? hole.size() : 0)]);
  }
}

absl::Status KvPush::Send(const std::shared_ptr<const engine::SequenceKv>& kv, Pages& pages) {
  pages.crcs.resize(pages.local.size());
  // Weak: the sender, which is ours, may keep this until the next layer.
  const absl::Status posted = sender_->Send(kv->pool(), {pages.local, pages.remote}, pages.crcs.data(), lease_end_,
                                            [weak = weak_from_this(), kv](const absl::Status& status) {
                                              const auto self = weak.lock();
                                              if (self == nullptr || status.ok()) return;
                                              if (absl::IsDeadlineExceeded(status))
                                                self->worker_.metrics().failures_lease.Increment();
                                              self->Fail(status);
                                            });
  if (!posted.ok()) worker_.metrics().failures_lost.Increment();
  return posted;
}

// Restored heads are known after the last layer: the KV in their holes goes to the spare pages.
absl::Status KvPush::SendRestored() {
  if (ticket_.hole_begin().empty() || commit_.restored_heads().empty()) return absl::OkStatus();
  if (Clock::now() >= lease_end_) {
    worker_.metrics().failures_lease.Increment();
    return absl::DeadlineExceededError("the ticket's lease ran out while its KV was pushed");
  }
  const std::vector<int32_t> restored(commit_.restored_heads().begin(), commit_.restored_heads().end());
  const std::vector<int32_t> lists_of_rank(ticket_.spare_lists().begin(), ticket_.spare_lists().end());
  SPLICE_ASSIGN_OR_RETURN(const std::vector<int32_t> lists,
                          engine::AssignSpares(shape_, *classes_, kv_->num_tokens(), lists_of_rank, restored));
  const auto& spares = sender_->uses_landing_pages() ? ticket_.spare_landing_page_ids() : ticket_.spare_page_ids();
  for (size_t i = 0; i < restored.size(); ++i) {
    const engine::PageHole hole = HoleOf(restored[i]);
    if (hole.size() == 0) continue;
    const std::vector<int32_t>& local = kv_->streams()[static_cast<size_t>(restored[i])];
    Pages pages;
    for (int32_t page = hole.begin; page < hole.end; ++page) {
      pages.local.push_back(local[static_cast<size_t>(page)]);
      pages.remote.push_back(spares[lists[i] * static_cast<int32_t>(ticket_.pages_per_spare()) + page - hole.begin]);
    }
    SPLICE_RETURN_IF_ERROR(Send(kv_, pages));
    // The checksum is over the pages in order: those of the hole stand in the middle.
    std::vector<uint32_t> crcs(local.size());
    SPLICE_RETURN_IF_ERROR(kv_->pool().ChecksumPages(local, crcs.data()));
    uint32_t& joined = crc_[static_cast<size_t>(restored[i])];
    joined = 0;
    for (const uint32_t crc : crcs) joined = over_a_page_(joined) ^ crc;
  }
  return absl::OkStatus();
}

namespace {

void AddRanges(const engine::PositionRanges& ranges, v1::KeptPositions& positions) {
  for (const engine::PositionRange& range : ranges) {
    positions.add_bounds(static_cast<uint32_t>(range.begin));
    positions.add_bounds(static_cast<uint32_t>(range.end));
  }
}

}  // namespace

void KvPush::Commit(const engine::PrefillOutcome& outcome, std::unique_ptr<PushLease> lease) {
  std::shared_ptr<const engine::SequenceKv> kv = outcome.kv;
  const engine::KeptTokens* const kept_tokens = outcome.kept.get();
  v1::CommitRequest commit;
  commit.set_num_tokens(static_cast<uint32_t>(kv->num_tokens()));
  for (const engine::SampledToken& token : outcome.first_tokens) *commit.add_first_tokens() = wire::ToProto(token);
  commit.mutable_restored_heads()->Assign(outcome.restored_heads.begin(), outcome.restored_heads.end());
  for (const int32_t stream : outcome.restored_heads) restored_pages_ += HoleOf(stream).size();
  if (!outcome.only.empty()) {
    AddRanges(outcome.only, *commit.mutable_only());
    left_out_pages_ = int64_t{shape_.num_streams()} *
                      (static_cast<int64_t>(ticket_.num_pages_per_stream()) - engine::PagesFor(kv->num_tokens()));
  }
  for (size_t layer = 0; kept_tokens != nullptr && layer < kept_tokens->layers.size(); ++layer) {
    AddRanges(kept_tokens->layers[layer], *commit.add_kept());
    for (int32_t page = 0; page < kv->num_pages_per_stream(); ++page) {
      if (!kept_tokens->KeepsPage(static_cast<int32_t>(layer), page)) left_out_pages_ += shape_.num_kv_heads;
    }
  }
  const auto computed = Clock::now();
  const std::shared_ptr<PushLease> kept = std::move(lease);
  const bool queued = worker_.Enqueue([self = shared_from_this(), kv, commit, computed, kept] {
    self->kv_ = kv;
    self->commit_ = commit;
    self->lease_ = kept;
    self->computed_ = computed;
    self->DoCommit();
  });
  if (!queued) {
    kv.reset();
    if (kept != nullptr) kept->release();
    EndUnflushed();
    worker_.PushEnded();
  }
}

// Runs while the last writes are in flight.
void KvPush::DescribeLease() {
  if (lease_ == nullptr) return;
  v1::HeadLease& lease = *commit_.mutable_lease();
  lease = lease_->lease;
  for (const LeasedHeads::Head& head : lease_->heads->heads())
    *lease.add_summaries() =
        wire::ToProto(engine::SummarizeKeys(lease_->heads->pool(), head.stream, head.first_page, head.pages));
}

void KvPush::DropLease() {
  if (lease_ != nullptr) lease_->release();
  lease_.reset();
}

void KvPush::DoCommit() {
  push_span_ = Span(*tracer_, "prefill.push", trace_, SpanKind::kInternal, computed_);
  push_span_.Set("splice.bytes", num_bytes());
  push_span_.Set("splice.transport", peer_->carrier());
  if (status().ok()) {
    if (const absl::Status sent = SendRestored(); !sent.ok()) Fail(sent);
  }
  sender_->Finish();
  if (const absl::Status failed = status(); !failed.ok()) {
    DoAbort(failed, [] {});
    return;
  }
  DescribeLease();
  const auto flushed = [self = shared_from_this()](const absl::Status& flush_status) {
    // On the transport's thread, which must not wait: the rest goes back to ours.
    (void)self->worker_.Enqueue([self, flush_status] {
      self->Fail(flush_status);
      if (self->status().ok())
        self->SendCommit();
      else
        self->DoAbort(self->status(), [] {});
    });
  };
  if (const absl::Status status = peer_->channel->Flush(flushed); !status.ok()) {
    worker_.metrics().failures_lost.Increment();
    DoAbort(status, [] {});
  }
}

void KvPush::SendCommit() {
  hold_->EndFlushed();
  struct Call {
    grpc::ClientContext context;
    v1::CommitResponse response;
  };
  commit_.set_ticket_id(ticket_.ticket_id());
  commit_.set_generation(ticket_.generation());
  commit_.mutable_crc32c()->Assign(crc_.begin(), crc_.end());
  commit_.set_in_landing_pages(sender_->uses_landing_pages());
  const FaultOutcome fault = commit_fault.Hit();
  if (fault.corrupt) commit_.set_crc32c(0, commit_.crc32c(0) ^ 1u);
  if (fault.drop) {
    DropLease();
    kv_.reset();
    return worker_.PushEnded();
  }
  auto call = std::make_shared<Call>();
  call->context.set_deadline(std::chrono::system_clock::now() + kRpcTimeout);
  commit_span_ = Span(*tracer_, "prefill.commit", push_span_.context(), SpanKind::kClient);
  AddTrace(call->context, commit_span_.context());
  peer_->decode->async()->Commit(
      &call->context, &commit_, &call->response, [self = shared_from_this(), call](const grpc::Status& grpc_status) {
        const absl::Status status = FromGrpcStatus(grpc_status);
        self->commit_span_.SetStatus(status);
        self->commit_span_.End();
        self->push_span_.End();
        if (status.ok()) {
          self->worker_.metrics().bytes_out.Increment(static_cast<double>(self->num_bytes()));
          self->worker_.metrics().seconds.Observe(
              std::chrono::duration<double>(Clock::now() - self->computed_).count());
        } else {
          self->DropLease();
          self->worker_.metrics().failures_commit.Increment();
          log::Warning("prefill.commit_failed", log::F("request", self->request_id_),
                       log::F("decode", self->peer_->endpoint.worker_id()), log::F("status", status));
        }
        self->lease_.reset();
        self->kv_.reset();
        self->worker_.PushEnded();
      });
}

void KvPush::Abort(std::shared_ptr<const engine::SequenceKv> kv, const absl::Status& why, std::function<void()> done) {
  const bool queued = worker_.Enqueue([self = shared_from_this(), kv, why, done] {
    self->kv_ = kv;
    self->DoAbort(why, done);
  });
  if (queued) return;
  EndUnflushed();
  worker_.PushEnded();
  done();
}

void KvPush::DoAbort(const absl::Status& why, std::function<void()> done) {
  push_span_.SetStatus(why);
  push_span_.End();
  DropLease();
  sender_->Finish();
  const auto finish = [self = shared_from_this(), done = std::move(done)] {
    self->kv_.reset();
    self->worker_.PushEnded();
    done();
  };
  const auto flushed = [self = shared_from_this(), why, finish](const absl::Status& flush_status) {
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

void KvPush::EndUnflushed() {
  if (!hold_->EndUnflushed()) peer_->given_up = true;
}

void KvPush::SendRelease(const std::string& reason, bool writer_quiet, std::function<void()> done) {
  struct Call {
    grpc::ClientContext context;
    v1::ReleaseRequest request;
    v1::ReleaseResponse response;
  };
  auto call = std::make_shared<Call>();
  call->request.set_ticket_id(ticket_.ticket_id());
  call->request.set_generation(ticket_.generation());
  call->request.set_reason(reason);
  call->request.set_writer_quiet(writer_quiet);
  call->context.set_deadline(std::chrono::system_clock::now() + kRpcTimeout);
  peer_->decode->async()->Release(&call->context, &call->request, &call->response,
                                  [call, done](const grpc::Status&) { done(); });
}

PushWorker::PushWorker(const engine::Model& model, Metrics& metrics, std::function<void()> on_pages_back)
    : model_(model), metrics_(metrics), on_pages_back_(std::move(on_pages_back)), tasks_(kMaxTasks), thread_([this] {
        Loop();
      }) {}

PushWorker::~PushWorker() { Stop(); }

void PushWorker::Loop() {
  SetThreadPriority(ThreadPriority::kTransfer);
  while (true) {
    auto task = tasks_.Pop(kIdleWait);
    if (task)
      (*task)();
    else if (tasks_.closed())
      return;
  }
}

void PushWorker::PushStarted() {
  std::lock_guard lock(mutex_);
  ++num_active_;
}

void PushWorker::PushEnded() {
  on_pages_back_();
  std::lock_guard lock(mutex_);
  --num_active_;
  idle_.notify_all();
}

void PushWorker::WaitIdle(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  idle_.wait_until(lock, deadline, [&] { return num_active_ == 0; });
}

void PushWorker::Stop() {
  tasks_.Close();
  if (thread_.joinable()) thread_.join();
}

}  // namespace spl::prefill
