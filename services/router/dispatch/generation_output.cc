// The part of Generation that gives the sink its tokens, and how a request ends.
#include <utility>

#include "services/base/status.h"
#include "services/router/dispatch/generation.h"
#include "services/router/request/wire.h"

namespace spl::router {

void Generation::DeliverFirst(const v1::PrefillResponse& response) {
  if (!started_output_) {
    receipt_ = response.receipt();
    receipt_.set_prefill_worker(attempt_->prefill.process_id());
    receipt_.set_prefill(attempt_->prefill.local.has_value() ? "local" : "pool");
  }
  receipt_.set_decode_worker(attempt_->decode.worker_id);
  if (receipt_.transport().empty()) receipt_.set_transport(attempt_->link.transport);
  if (attempt_->decode.replays && !answer_.tokens().empty()) return;  // it is the client's already
  const bool wants_prompt = request_.prompt_logprobs.has_value() && answer_.num_tokens() == 0;
  std::vector<Delta> deltas;
  for (int i = 0; i < response.first_tokens_size(); ++i) {
    const absl::Status taken = answer_.Take(static_cast<uint32_t>(i), response.first_tokens(i), &deltas);
    if (!taken.ok()) return Fail(taken);
  }
  if (wants_prompt) {
    auto prompt = PromptFromProto(prompt_.tokens, response.prompt_logprobs());
    if (!prompt.ok()) return Fail(Annotate(prompt.status(), "prefill on " + attempt_->prefill.worker_id));
    const auto shared = std::make_shared<const std::vector<OutputToken>>(*std::move(prompt));
    for (Delta& delta : deltas) delta.prompt = shared;
  }
  Emit(std::move(deltas));
}

void Generation::Deliver(const v1::StreamChunk& chunk) {
  if (chunk.has_choice()) *receipt_.mutable_decode_choice() = chunk.choice();
  if (chunk.has_kv_bytes()) receipt_.set_decode_kv_bytes(chunk.kv_bytes());
  std::vector<Delta> deltas;
  for (const v1::StreamChunk::Token& token : chunk.tokens()) {
    const absl::Status taken = answer_.Take(token.index(), token.token(), &deltas);
    if (!taken.ok()) return Fail(taken);
  }
  Emit(std::move(deltas));
}

void Generation::Emit(std::vector<Delta> deltas) {
  ObserveLatency();
  if (!started_output_) ObserveFirst();
  started_output_ = true;
  Note("decoding");
  if (answer_.finished()) {
    const FinalInfo final = MakeFinal();
    const std::shared_ptr<GenerationSink> sink = sink_;
    Succeed();
    sink->OnOutput(deltas, &final);
    core_.OnDelivered(id_);
    return;
  }
  std::erase_if(deltas, [](const Delta& d) {
    return d.text.empty() && d.tokens.empty() && d.finish_reason == FinishReason::kNone && d.prompt == nullptr;
  });
  if (!deltas.empty() && !sink_->OnOutput(deltas, nullptr)) paused_ = true;
}

void Generation::Resume() {
  Post([this] {
    if (done_ || !paused_) return;
    paused_ = false;
    if (attempt_ != nullptr && attempt_->prefilled && attempt_->stream != nullptr) attempt_->stream->ReadNext();
  });
}

void Generation::Cancel(absl::Status reason) {
  Post([this, reason = std::move(reason)] {
    if (!done_) Fail(reason);
  });
}

void Generation::Succeed() {
  if (!answer_.stopped_by_string() && attempt_ != nullptr) {
    // The decode worker ends the sequence and the stream by itself; only take note of it.
    if (attempt_->stream != nullptr) attempt_->stream->ReadNext();
    core_.breakers().OnNeither(attempt_->decode.worker_id);
    attempt_.reset();
  } else {
    Abandon("a stop string was found");
  }
  const uint32_t steps = answer_.num_tokens() / static_cast<uint32_t>(answer_.num_continuations());
  if (steps > 1) core_.planner().OnTpot((SecondsSince(arrived_) - ttft_seconds_) / (steps - 1));
  core_.metrics().prompt_tokens.Increment(static_cast<double>(num_prompt_tokens()));
  core_.metrics().prompt_tokens_per_request.Observe(static_cast<double>(num_prompt_tokens()));
  core_.metrics().reuse_prefix_tokens.Increment(receipt_.cached_tokens());
  core_.metrics().reuse_segment_tokens.Increment(receipt_.aligned_tokens());
  core_.metrics().reuse_miss_tokens.Increment(static_cast<double>(num_prompt_tokens()) - receipt_.cached_tokens() -
                                              receipt_.aligned_tokens());
  Finish(absl::OkStatus());
}

void Generation::Fail(const absl::Status& status) {
  Abandon("the request ended");
  const std::shared_ptr<GenerationSink> sink = sink_;
  const bool left = status.code() == absl::StatusCode::kCancelled;
  if (left || status.code() == absl::StatusCode::kDeadlineExceeded) core_.metrics().cancellations.Increment();
  if (!left) core_.metrics().CountError(status.code());
  Finish(status);
  sink->OnError(status);
  core_.OnDelivered(id_);
}

void Generation::Finish(const absl::Status& status) {
  done_ = true;
  lease_.Take(answer_.num_tokens());
  lease_.Reset();
  deadline_timer_.cancel();
  retry_timer_.cancel();
  const double seconds = SecondsSince(arrived_);
  core_.metrics().e2e_seconds.Observe(seconds);
  LogLine(status);
  RecordTrace(status);
  core_.requests().End(id_, [&](RequestRecord& record) {
    Describe(record);
    record.seconds = seconds;  // from the arrival, as TTFT is: never less than it
    record.status = status.ok() ? "OK" : status.ToString();
  });
  sink_.reset();
  core_.OnFinished(id_);
}

}  // namespace spl::router
