#include "services/router/fleet/cache_watch.h"

#include <utility>

namespace spl::router {

CacheWatch::CacheWatch(std::shared_ptr<CacheView> view, std::string worker_id, uint64_t epoch,
                       std::function<void(const absl::Status&)> on_end)
    : view_(std::move(view)), worker_id_(std::move(worker_id)), epoch_(epoch), on_end_(std::move(on_end)) {}

void CacheWatch::Start(PrefillWorker& worker, std::shared_ptr<CacheView> view, std::string worker_id, uint64_t epoch,
                       std::function<void(const absl::Status&)> on_end) {
  auto* const watch = new CacheWatch(std::move(view), std::move(worker_id), epoch, std::move(on_end));
  watch->request_.set_epoch(epoch);
  watch->request_.set_next_sequence(watch->view_->NextSequence(watch->worker_id_, epoch));
  watch->calls_ = worker.calls();
  watch->calls_->Add(&watch->context_);
  worker.async()->WatchCache(&watch->context_, &watch->request_, watch);
  watch->StartRead(&watch->message_);
  watch->StartCall();
}

void CacheWatch::OnReadDone(bool ok) {
  if (!ok) return;
  if (!Take()) {
    view_->Forget(worker_id_);  // the next watch begins with a snapshot
    return context_.TryCancel();
  }
  StartRead(&message_);
}

bool CacheWatch::Take() {
  if (message_.epoch() != epoch_) return false;
  if (message_.snapshot_begin()) view_->BeginSnapshot(worker_id_, epoch_, message_.with_segments());
  uint64_t sequence = message_.first_sequence();
  for (const v1::CacheEvents::Event& event : message_.events()) {
    if (event.keys().size() % sizeof(chunk::Digest) != 0) return false;
    if (message_.snapshot()) {
      view_->AddToSnapshot(worker_id_, epoch_, event.keys());
      continue;
    }
    const bool stored = event.kind() == v1::CacheEvents::STORED;
    if (!view_->Apply(worker_id_, epoch_, sequence, stored, event.keys())) return false;
    sequence += event.keys().size() / sizeof(chunk::Digest);
  }
  if (message_.snapshot_end()) view_->EndSnapshot(worker_id_, epoch_, message_.first_sequence());
  return true;
}

void CacheWatch::OnDone(const grpc::Status& status) {
  on_end_(FromGrpcStatus(status));
  on_end_ = nullptr;
  const std::shared_ptr<CallTracker> calls = std::move(calls_);
  calls->Remove(&context_);
  delete this;
}

}  // namespace spl::router
