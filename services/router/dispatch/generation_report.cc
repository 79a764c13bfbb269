// The part of Generation that tells others about the request: its receipt, log line, trace, metrics, and its record
// among the running requests.
#include "services/base/fault_point.h"
#include "services/base/log.h"
#include "services/base/status.h"
#include "services/router/dispatch/generation.h"

namespace spl::router {
namespace {

FaultPoint deliver_fault("router.deliver");

RequestRan RanOf(const v1::Receipt& r, bool exact) {
  return {.reuse = r.reuse_policy(),
          .decode = r.decode_selector(),
          .exact = exact,
          .prefill_place = r.prefill(),
          .transport = r.transport(),
          .transfer_seconds = r.transfer_seconds(),
          .prefix_tokens = r.cached_tokens(),
          .stored_tokens = r.stored_tokens(),
          .aligned_tokens = r.aligned_tokens(),
          .recomputed_tokens = r.recomputed_tokens(),
          .computed_tokens = r.computed_tokens(),
          .bytes_fetched = r.bytes_fetched(),
          .bytes_moved = r.bytes_moved()};
}

}  // namespace

// Until the first token; behind it a retry is a span and no stage.
void Generation::EndStage(TtftStage stage) {
  const TtftStages::Clock::time_point start = stages_.cursor();
  if (started_output_) return;
  stages_.End(stage);
  if (!core_.tracer().Records(request_.trace)) return;
  const std::string name = std::string("router.") + TtftStageName(stage);
  core_.tracer().Record(request_.trace, {.name = name, .start = start, .end = stages_.cursor()});
}

Span Generation::CallSpan(std::string_view name, const std::string& worker_id) const {
  Span span(core_.tracer(), name, request_.trace, SpanKind::kClient);
  span.Set("splice.worker", worker_id);
  return span;
}

void Generation::RecordTrace(const absl::Status& status) const {
  if (!core_.tracer().Records(request_.trace)) return;
  core_.tracer().Record(request_.trace, request_.parent_trace,
                        {.name = "router.request",
                         .kind = SpanKind::kServer,
                         .start = arrived_,
                         .end = Clock::now(),
                         .attributes = {{"splice.request", request_.request_id},
                                        {"splice.api", request_.api},
                                        {"splice.caller", request_.caller.name},
                                        {"splice.prompt_tokens", static_cast<int64_t>(num_prompt_tokens())},
                                        {"splice.cached_tokens", static_cast<int64_t>(receipt_.cached_tokens())},
                                        {"splice.output_tokens", static_cast<int64_t>(answer_.num_tokens())},
                                        {"splice.attempts", static_cast<int64_t>(history_.attempts)},
                                        {"splice.ttft_seconds", ttft_seconds_}},
                         .status = status});
}

// The first token's text is ready for the client's stream.
void Generation::ObserveFirst() {
  (void)deliver_fault.Hit();
  EndStage(TtftStage::kDeliver);
  // By the clock reading that ends the last stage: the stages add up to it.
  ttft_seconds_ = std::chrono::duration<double>(stages_.cursor() - arrived_).count();
  core_.metrics().ttft_seconds.Observe(ttft_seconds_);
  core_.metrics().ObserveStages(stages_);
  core_.planner().OnTtft(ttft_seconds_);
  for (const auto& [stage, seconds] : stages_.ToMap()) (*receipt_.mutable_ttft_stages())[stage] = seconds;
}

void Generation::ObserveLatency() {
  const Clock::time_point now = Clock::now();
  if (started_output_) core_.metrics().inter_token_seconds.Observe(SecondsSince(last_output_));
  last_output_ = now;
}

FinalInfo Generation::MakeFinal() const {
  FinalInfo final{.prompt_tokens = static_cast<uint32_t>(num_prompt_tokens()),
                  .completion_tokens = answer_.num_tokens(),
                  .receipt = receipt_};
  v1::Receipt& r = final.receipt;
  r.set_prompt_tokens(final.prompt_tokens);
  r.set_queue_seconds(r.queue_seconds() + queue_seconds_);
  r.set_ttft_seconds(ttft_seconds_);
  r.set_seed(request_.sampling.seed.value_or(0));
  r.set_attempts(history_.attempts);
  r.set_migrations(history_.migrations);
  const std::shared_ptr<const FleetSnapshot> fleet = core_.fleet().snapshot();
  r.set_weights(fleet->model.weights);
  r.set_kv_dtype(fleet->model.kv_dtype);
  // After a move the prompt's KV and the output's were computed by other workers, whose rounding may be another one
  // (other processors, other companions on a GPU): at a near tie the rest may be another text than the undisturbed one.
  r.set_exact(r.exact() && history_.migrations == 0);
  r.mutable_knowledge_bases()->insert(request_.knowledge_bases.begin(), request_.knowledge_bases.end());
  return final;
}

void Generation::LogLine(const absl::Status& status) const {
  const std::string outcome = absl::StatusCodeToString(status.code());
  const std::string message = MessageOf(status);
  const std::string trace = request_.trace.TraceIdHex();
  log::Info("router.request", log::F("request", request_.request_id), log::F("trace", trace),
            log::F("api", request_.api), log::F("caller", request_.caller.name), log::F("status", outcome),
            log::F("message", message), log::F("prompt_tokens", num_prompt_tokens()),
            log::F("cached_tokens", receipt_.cached_tokens()), log::F("output_tokens", answer_.num_tokens()),
            log::F("n", request_.sampling.n), log::F("queue_ms", queue_seconds_ * 1e3),
            log::F("ttft_ms", ttft_seconds_ * 1e3), log::F("e2e_ms", SecondsSince(arrived_) * 1e3),
            log::F("prefill", receipt_.prefill_worker()), log::F("decode", receipt_.decode_worker()),
            log::F("attempts", history_.attempts), log::F("migrations", history_.migrations));
}

void Generation::Note(const char* stage) {
  core_.requests().Update(id_, [&](RequestRecord& record) {
    record.stage = stage;
    Describe(record);
  });
}

void Generation::Describe(RequestRecord& record) const {
  if (attempt_ != nullptr) {
    record.prefill_worker = attempt_->prefill.process_id();
    record.decode_worker = attempt_->decode.worker_id;
  }
  record.queue_seconds = queue_seconds_;
  record.ttft_seconds = ttft_seconds_;
  record.ttft_stages = {receipt_.ttft_stages().begin(), receipt_.ttft_stages().end()};
  record.prompt_tokens = static_cast<uint32_t>(num_prompt_tokens());
  record.cached_tokens = receipt_.cached_tokens() + receipt_.aligned_tokens();
  record.completion_tokens = answer_.num_tokens();
  if (started_output_) record.ran = RanOf(receipt_, receipt_.exact() && history_.migrations == 0);
  record.attempts = history_.attempts;
  record.migrations = history_.migrations;
}

double Generation::SecondsSince(Clock::time_point start) const {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace spl::router
