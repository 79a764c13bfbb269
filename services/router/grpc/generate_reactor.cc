#include "services/router/grpc/generate_reactor.h"

#include "services/base/grpc_status.h"
#include "services/router/grpc/proto_names.h"
#include "services/router/request/api_error.h"
#include "services/router/request/wire.h"

namespace spl::router {
namespace {

// Log-probabilities in one message: some 100 KB, far below the 4 MB that clients of gRPC accept.
constexpr size_t kLogprobsPerMessage = 8192;

v1::GenerateResponse ToProto(const Delta& delta) {
  v1::GenerateResponse response;
  v1::GenerateResponse::Delta* out = response.mutable_delta();
  out->set_index(delta.index);
  out->set_text(delta.text);
  for (const OutputToken& token : delta.tokens) {
    out->add_token_ids(static_cast<uint32_t>(token.id));
    if (token.has_logprob) *out->add_logprobs() = LogprobToProto(token);
  }
  out->set_finish_reason(ToProto(delta.finish_reason));
  return response;
}

v1::GenerateResponse ToProto(const FinalInfo& final) {
  v1::GenerateResponse response;
  v1::GenerateResponse::Final* out = response.mutable_final();
  out->set_prompt_tokens(final.prompt_tokens);
  out->set_completion_tokens(final.completion_tokens);
  *out->mutable_receipt() = final.receipt;
  return response;
}

}  // namespace

std::shared_ptr<GenerateReactor> GenerateReactor::Create(grpc::CallbackServerContext* context) {
  auto reactor = std::shared_ptr<GenerateReactor>(new GenerateReactor(context));
  reactor->self_ = reactor;
  return reactor;
}

void GenerateReactor::SetEcho(std::string text) {
  std::lock_guard lock(mutex_);
  echo_ = std::move(text);
}

void GenerateReactor::Attach(const std::shared_ptr<Generation>& generation) {
  std::lock_guard lock(mutex_);
  generation_ = generation;
  if (cancelled_) generation->Cancel(absl::CancelledError("the client left"));
}

bool GenerateReactor::OnOutput(std::span<const Delta> deltas, const FinalInfo* final) {
  std::lock_guard lock(mutex_);
  for (const Delta& delta : deltas) AddLocked(delta);
  if (final != nullptr) {
    pending_.push_back(ToProto(*final));
    ended_ = true;
  }
  paused_ = pending_.size() > kMaxPending;
  AdvanceLocked();
  return !paused_;
}

// All continuations' first deltas have the prompt; the client gets it once.
void GenerateReactor::AddLocked(const Delta& delta) {
  if (delta.prompt != nullptr && begun_.empty()) AddPromptLocked(*delta.prompt);
  v1::GenerateResponse response = ToProto(delta);
  if (begun_.insert(delta.index).second) response.mutable_delta()->mutable_text()->insert(0, echo_);
  pending_.push_back(std::move(response));
}

void GenerateReactor::AddPromptLocked(const std::vector<OutputToken>& prompt) {
  size_t room = 0;
  for (const OutputToken& token : prompt) {
    const size_t size = 1 + token.top.size();
    if (room < size) {
      pending_.emplace_back();
      room = kLogprobsPerMessage;
    }
    room -= size;
    v1::GenerateResponse::PromptTokens::Token* const out = pending_.back().mutable_prompt()->add_tokens();
    out->set_token_id(static_cast<uint32_t>(token.id));
    if (token.has_logprob) *out->mutable_logprob() = LogprobToProto(token);
  }
}

void GenerateReactor::OnError(const absl::Status& status) {
  std::lock_guard lock(mutex_);
  ended_ = true;
  status_ = ProtoNames(v1::Prompt::KIND_NOT_SET).In(status);  // an error of FromProto has these names already
  // Written only while the call is still open: gRPC sends trailers with Finish.
  if (const auto retry_ms = RetryAfterMsOf(status)) SetRetryAfter(*context_, std::chrono::milliseconds(*retry_ms));
  AdvanceLocked();
}

void GenerateReactor::OnWriteDone(bool ok) {
  std::shared_ptr<Generation> resume;
  {
    std::lock_guard lock(mutex_);
    writing_ = false;
    pending_.pop_front();
    if (!ok) pending_.clear();  // the client is gone; OnCancel ends the generation
    AdvanceLocked();
    if (paused_ && pending_.empty()) {
      paused_ = false;
      resume = generation_.lock();
    }
  }
  if (resume != nullptr) resume->Resume();
}

void GenerateReactor::AdvanceLocked() {
  if (writing_ || finished_) return;
  if (!pending_.empty()) {
    writing_ = true;
    StartWrite(&pending_.front());
  } else if (ended_) {
    finished_ = true;
    Finish(ToGrpcStatus(status_));
  }
}

void GenerateReactor::OnCancel() {
  std::shared_ptr<Generation> generation;
  {
    std::lock_guard lock(mutex_);
    cancelled_ = true;
    generation = generation_.lock();
  }
  if (generation != nullptr) generation->Cancel(absl::CancelledError("the client left"));
}

void GenerateReactor::OnDone() { const std::shared_ptr<GenerateReactor> self = std::move(self_); }

}  // namespace spl::router
