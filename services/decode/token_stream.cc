#include "services/decode/token_stream.h"

#include "services/base/grpc_status.h"

namespace spl::decode {

// gRPC's side of the stream. Holds the stream alive until gRPC is done with the call.
class TokenStream::Reactor final : public grpc::ServerWriteReactor<v1::StreamChunk> {
 public:
  explicit Reactor(std::shared_ptr<TokenStream> stream) : stream_(std::move(stream)) {}

  void OnWriteDone(bool /*ok*/) override {
    {
      std::lock_guard lock(stream_->mutex_);
      stream_->writing_ = false;
    }
    stream_->Advance();
  }
  void OnCancel() override {
    bool running = false;
    {
      std::lock_guard lock(stream_->mutex_);
      running = !stream_->ended_;
    }
    if (running && stream_->on_cancel_) stream_->on_cancel_();
  }
  void OnDone() override {
    {
      std::lock_guard lock(stream_->mutex_);
      stream_->reactor_ = nullptr;
    }
    delete this;
  }

  v1::StreamChunk in_flight;

 private:
  std::shared_ptr<TokenStream> stream_;
};

void TokenStream::Push(const v1::StreamChunk& chunk) {
  {
    std::lock_guard lock(mutex_);
    pending_.MergeFrom(chunk);
  }
  Advance();
}

void TokenStream::End(const absl::Status& status) {
  {
    std::lock_guard lock(mutex_);
    if (ended_) return;
    ended_ = true;
    end_status_ = status;
  }
  Advance();
}

bool TokenStream::has_reader() {
  std::lock_guard lock(mutex_);
  return attached_once_;
}

grpc::ServerWriteReactor<v1::StreamChunk>* TokenStream::Attach() {
  Reactor* reactor = nullptr;
  {
    std::lock_guard lock(mutex_);
    if (attached_once_) return nullptr;
    attached_once_ = true;
    reactor = reactor_ = new Reactor(shared_from_this());
  }
  Advance();
  return reactor;
}

// Starts the next write, or the end, when nothing is in flight. gRPC is called without the lock, because it may run
// OnWriteDone before StartWrite returns. The flags set under the lock make this thread the only one that calls, and the
// reactor lives until Finish was called.
void TokenStream::Advance() {
  Reactor* reactor = nullptr;
  bool write = false;
  absl::Status end_status;
  {
    std::lock_guard lock(mutex_);
    if (reactor_ == nullptr || writing_ || finished_) return;
    reactor = reactor_;
    if (pending_.tokens_size() > 0) {
      reactor->in_flight.Swap(&pending_);
      pending_.Clear();
      write = writing_ = true;
    } else if (ended_) {
      finished_ = true;
      end_status = end_status_;
    } else {
      return;
    }
  }
  if (write)
    reactor->StartWrite(&reactor->in_flight);
  else
    reactor->Finish(ToGrpcStatus(end_status));
}

}  // namespace spl::decode
