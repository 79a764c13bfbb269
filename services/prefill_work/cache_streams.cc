#include "services/prefill_work/cache_streams.h"

#include <utility>
#include <vector>

namespace spl::prefill {
namespace {

constexpr size_t kMaxStreams = 64;       // routers
constexpr size_t kKeysInMessage = 4096;  // 128 KiB
constexpr std::chrono::milliseconds kWakeEvery{20};

void Append(const chunk::ChunkKey& key, v1::CacheEvents::Kind kind, v1::CacheEvents& message) {
  const bool same = message.events_size() > 0 && message.events(message.events_size() - 1).kind() == kind;
  v1::CacheEvents::Event& event = same ? *message.mutable_events(message.events_size() - 1) : *message.add_events();
  event.set_kind(kind);
  event.mutable_keys()->append(reinterpret_cast<const char*>(key.bytes.data()), key.bytes.size());
}

}  // namespace

// Writes while there is something to write, then sleeps until it is woken.
class CacheStreams::Stream final : public grpc::ServerWriteReactor<v1::CacheEvents> {
 public:
  Stream(CacheStreams& owner, const v1::WatchCacheRequest& request) : owner_(owner) {
    // Zero asks for a snapshot: numbers begin with 1.
    if (request.epoch() == owner.epoch_) next_ = request.next_sequence();
  }

  void Wake() {
    {
      std::lock_guard lock(mutex_);
      if (writing_ || ending_ || !PrepareLocked()) return;
      writing_ = true;
    }
    StartWrite(&message_);
  }

  // A running write ends first.
  void End(const grpc::Status& status) {
    {
      std::lock_guard lock(mutex_);
      if (std::exchange(ending_, true)) return;
      status_ = status;
      if (writing_) return;
    }
    Finish(status);
  }

  std::shared_ptr<Stream> self;  // while the call is open

 private:
  void OnWriteDone(bool ok) override {
    bool ended;
    {
      std::lock_guard lock(mutex_);
      writing_ = false;
      ended = ending_;
    }
    if (ended) return Finish(status_);
    ok ? Wake() : End(grpc::Status::CANCELLED);
  }
  void OnCancel() override { End(grpc::Status::CANCELLED); }
  void OnDone() override {
    const std::shared_ptr<Stream> keep = std::move(self);
    owner_.Remove(keep);
  }

  // Puts the next events into message_. False: there are none.
  bool PrepareLocked() {
    message_.Clear();
    message_.set_epoch(owner_.epoch_);
    std::vector<CacheEvents::Event> events;
    if (!in_snapshot_ && !owner_.events_.Read(next_, kKeysInMessage, &events)) {
      next_ = owner_.events_.Snapshot(&snapshot_);
      in_snapshot_ = true;
      message_.set_snapshot_begin(true);
      message_.set_with_segments(true);
    }
    if (in_snapshot_) {
      message_.set_snapshot(true);
      for (size_t i = 0; i < kKeysInMessage && !snapshot_.empty(); ++i) {
        Append(snapshot_.back(), v1::CacheEvents::STORED, message_);
        snapshot_.pop_back();
      }
      message_.set_first_sequence(next_);
      in_snapshot_ = !snapshot_.empty();
      message_.set_snapshot_end(!in_snapshot_);
      if (!in_snapshot_) snapshot_.shrink_to_fit();
      return true;
    }
    message_.set_first_sequence(next_);
    for (const CacheEvents::Event& event : events)
      Append(event.key, event.stored ? v1::CacheEvents::STORED : v1::CacheEvents::REMOVED, message_);
    next_ += events.size();
    return !events.empty();
  }

  CacheStreams& owner_;
  std::mutex mutex_;  // guards the rest; message_ belongs to gRPC while writing_
  v1::CacheEvents message_;
  uint64_t next_ = 0;
  std::vector<chunk::ChunkKey> snapshot_;  // the part that has not been sent
  bool in_snapshot_ = false;
  bool writing_ = false;
  bool ending_ = false;
  grpc::Status status_;  // status at the end
};

CacheStreams::CacheStreams(const CacheEvents& events, uint64_t epoch)
    : events_(events), epoch_(epoch), waker_(std::make_unique<Periodic>(kWakeEvery, [this] { Wake(); })) {}

CacheStreams::~CacheStreams() { Close(); }

grpc::ServerWriteReactor<v1::CacheEvents>* CacheStreams::Open(const v1::WatchCacheRequest& request) {
  auto stream = std::make_shared<Stream>(*this, request);
  stream->self = stream;
  grpc::Status refusal;
  {
    std::lock_guard lock(mutex_);
    if (closed_) refusal = {grpc::StatusCode::UNAVAILABLE, "the prefill worker is stopping"};
    if (streams_.size() >= kMaxStreams)
      refusal = {grpc::StatusCode::RESOURCE_EXHAUSTED, "too many routers watch the cache of this worker"};
    if (refusal.ok()) streams_.insert(stream);
  }
  refusal.ok() ? stream->Wake() : stream->End(refusal);
  return stream.get();
}

void CacheStreams::Remove(const std::shared_ptr<Stream>& stream) {
  std::lock_guard lock(mutex_);
  streams_.erase(stream);
}

void CacheStreams::Wake() {
  std::vector<std::shared_ptr<Stream>> streams;
  {
    std::lock_guard lock(mutex_);
    streams.assign(streams_.begin(), streams_.end());
  }
  for (const auto& stream : streams) stream->Wake();
}

void CacheStreams::Close() {
  waker_->Stop();
  std::vector<std::shared_ptr<Stream>> streams;
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
    streams.assign(streams_.begin(), streams_.end());
  }
  for (const auto& stream : streams) stream->End({grpc::StatusCode::UNAVAILABLE, "the prefill worker is stopping"});
}

}  // namespace spl::prefill
