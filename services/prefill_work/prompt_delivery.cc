#include "services/prefill_work/prompt_delivery.h"

#include <grpcpp/grpcpp.h>

#include <utility>

#include "services/base/fault_point.h"
#include "services/base/grpc_status.h"
#include "services/base/grpc_trace.h"
#include "services/base/log.h"
#include "services/base/status.h"
#include "services/wire/convert.h"

namespace spl::prefill {
namespace {

using Clock = std::chrono::steady_clock;

FaultPoint commit_fault("prefill.commit");

constexpr std::chrono::seconds kRpcTimeout{10};

void AddRanges(const engine::PositionRanges& ranges, v1::KeptPositions& positions) {
  for (const engine::PositionRange& range : ranges) {
    positions.add_bounds(static_cast<uint32_t>(range.begin));
    positions.add_bounds(static_cast<uint32_t>(range.end));
  }
}

// All that the decode worker must know of the prompt.
v1::CommitRequest CommitOf(const engine::PrefillOutcome& outcome) {
  v1::CommitRequest commit;
  commit.set_num_tokens(static_cast<uint32_t>(outcome.kv->num_tokens()));
  // A shorter prompt, or one without some tokens, is no beginning of a next turn.
  if (outcome.only.empty() && outcome.kept == nullptr)
    commit.set_exact_tokens(static_cast<uint32_t>(outcome.kv->exact_tokens()));
  for (const engine::SampledToken& token : outcome.first_tokens) *commit.add_first_tokens() = wire::ToProto(token);
  commit.mutable_restored_heads()->Assign(outcome.restored_heads.begin(), outcome.restored_heads.end());
  if (!outcome.only.empty()) AddRanges(outcome.only, *commit.mutable_only());
  if (outcome.kept != nullptr) {
    for (const engine::PositionRanges& layer : outcome.kept->layers) AddRanges(layer, *commit.add_kept());
  }
  return commit;
}

}  // namespace

PromptDelivery::PromptDelivery(PushWorker& worker, std::shared_ptr<const Peer> peer, const v1::Ticket& ticket,
                               std::unique_ptr<TicketGuard::Hold> hold, std::string request_id)
    : worker_(worker),
      peer_(std::move(peer)),
      ticket_(ticket),
      hold_(std::move(hold)),
      request_id_(std::move(request_id)) {
  worker_.PushStarted();
}

void PromptDelivery::FollowLayers(engine::PrefillRequest& request) {
  request.on_layer = [self = shared_from_this()](const engine::LayerReady& ready) { self->OnLayer(ready); };
  request.layers_a_fence = layers_at_once();
}

void PromptDelivery::Commit(const engine::PrefillOutcome& outcome) {
  NoteOutcome(outcome);
  std::shared_ptr<const engine::SequenceKv> kv = outcome.kv;
  const bool queued =
      worker_.Enqueue([self = shared_from_this(), kv, commit = CommitOf(outcome), computed = Clock::now()]() mutable {
        self->kv_ = std::move(kv);
        self->commit_ = std::move(commit);
        self->computed_ = computed;
        self->push_span_ = Span(*self->tracer_, "prefill.push", self->trace_, SpanKind::kInternal, computed);
        self->push_span_.Set("splice.bytes", self->num_bytes());
        self->push_span_.Set("splice.transport", self->carrier());
        self->DoCommit();
      });
  if (queued) return;
  kv.reset();
  EndUnflushed();
  worker_.PushEnded();
}

void PromptDelivery::Abort(std::shared_ptr<const engine::SequenceKv> kv, const absl::Status& why,
                           std::function<void()> done) {
  const bool queued = worker_.Enqueue([self = shared_from_this(), kv, why, done] {
    self->kv_ = kv;
    self->DoAbort(why, done);
  });
  if (queued) return;
  EndUnflushed();
  worker_.PushEnded();
  done();
}

void PromptDelivery::EndUnflushed() {
  if (!hold_->EndUnflushed()) peer_->given_up = true;
}

void PromptDelivery::EndPushSpan(const absl::Status& why) {
  push_span_.SetStatus(why);
  push_span_.End();
}

void PromptDelivery::End() {
  kv_.reset();
  worker_.PushEnded();
}

void PromptDelivery::SendCommit() {
  hold_->EndFlushed();
  commit_.set_ticket_id(ticket_.ticket_id());
  commit_.set_generation(ticket_.generation());
  const FaultOutcome fault = commit_fault.Hit();
  if (fault.corrupt && commit_.crc32c_size() > 0) commit_.set_crc32c(0, commit_.crc32c(0) ^ 1u);
  if (fault.drop) {
    OnRefused();
    return End();
  }
  commit_span_ = Span(*tracer_, "prefill.commit", push_span_.context(), SpanKind::kClient);
  if (peer_->commit != nullptr)
    return peer_->commit(commit_, commit_span_.context(),
                         [self = shared_from_this()](const absl::Status& status) { self->EndCommit(status); });
  struct Call {
    grpc::ClientContext context;
    v1::CommitResponse response;
  };
  auto call = std::make_shared<Call>();
  call->context.set_deadline(std::chrono::system_clock::now() + kRpcTimeout);
  AddTrace(call->context, commit_span_.context());
  peer_->decode->async()->Commit(
      &call->context, &commit_, &call->response,
      [self = shared_from_this(), call](const grpc::Status& status) { self->EndCommit(FromGrpcStatus(status)); });
}

void PromptDelivery::EndCommit(const absl::Status& status) {
  commit_span_.SetStatus(status);
  commit_span_.End();
  push_span_.End();
  if (status.ok()) {
    worker_.metrics().bytes_out.Increment(static_cast<double>(num_bytes()));
    worker_.metrics().seconds.Observe(std::chrono::duration<double>(Clock::now() - computed_).count());
  } else {
    OnRefused();
    worker_.metrics().failures_commit.Increment();
    log::Warning("prefill.commit_failed", log::F("request", request_id_), log::F("decode", peer_->endpoint.worker_id()),
                 log::F("status", status));
  }
  End();
}

void PromptDelivery::SendRelease(const std::string& reason, bool writer_quiet, std::function<void()> done) {
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

}  // namespace spl::prefill
