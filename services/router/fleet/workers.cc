#include "services/router/fleet/workers.h"

#include <algorithm>

#include "services/wire/version.h"

namespace spl::router {
namespace {

constexpr size_t kMaxVersionBytes = 64;

}  // namespace

std::shared_ptr<grpc::Channel> MakeWorkerChannel(const std::string& address, const PeerTls* tls) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetMaxSendMessageSize(-1);
  // A restarted worker must be found again by the next poll, not after gRPC's default of minutes.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 500);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return MakePeerChannel(address, tls, std::move(arguments));
}

std::string ProgramVersionIn(const grpc::ClientContext& answered) {
  const auto& metadata = answered.GetServerInitialMetadata();
  const auto found = metadata.find(wire::kProgramVersionKey);
  if (found == metadata.end()) return "";
  return std::string(found->second.data(), std::min(found->second.size(), kMaxVersionBytes));
}

void CallTracker::Add(grpc::ClientContext* context) {
  std::lock_guard lock(mutex_);
  open_.insert(context);
  if (closed_) context->TryCancel();
}

void CallTracker::Remove(grpc::ClientContext* context) {
  std::lock_guard lock(mutex_);
  open_.erase(context);
  if (open_.empty()) empty_.notify_all();
}

bool CallTracker::CancelAllAndWait(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  closed_ = true;
  for (grpc::ClientContext* const context : open_) context->TryCancel();
  return empty_.wait_for(lock, timeout, [&] { return open_.empty(); });
}

std::shared_ptr<TokenStream> TokenStream::Start(DecodeWorker& worker, v1::StreamRequest request,
                                                std::chrono::steady_clock::time_point deadline,
                                                const TraceContext& trace, Callbacks callbacks) {
  auto stream = std::shared_ptr<TokenStream>(new TokenStream(std::move(callbacks)));
  stream->self_ = stream;
  stream->request_ = std::move(request);
  stream->context_.set_deadline(ToGrpcDeadline(deadline));
  AddTrace(stream->context_, trace);
  stream->calls_ = worker.calls();
  stream->calls_->Add(&stream->context_);
  worker.async()->Stream(&stream->context_, &stream->request_, stream.get());
  stream->AddHold();  // reads start outside of reactions: the call may not end between two of them
  stream->StartRead(&stream->chunk_);
  stream->StartCall();
  return stream;
}

void TokenStream::ReadNext() {
  {
    std::lock_guard lock(mutex_);
    if (!idle_) return;
    idle_ = false;
  }
  StartRead(&chunk_);
}

void TokenStream::Cancel() {
  context_.TryCancel();
  ReadNext();  // which fails, and lets the call end
}

void TokenStream::OnReadDone(bool ok) {
  if (!ok) return RemoveHold();
  v1::StreamChunk chunk;
  chunk.Swap(&chunk_);
  {
    std::lock_guard lock(mutex_);
    idle_ = true;
  }
  callbacks_.on_chunk(std::move(chunk));
}

void TokenStream::OnDone(const grpc::Status& status) {
  const std::shared_ptr<TokenStream> self = std::move(self_);
  callbacks_.on_done(FromGrpcStatus(status));
  callbacks_ = {};
  calls_->Remove(&context_);
}

}  // namespace spl::router
