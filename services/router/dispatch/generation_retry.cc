// The part of Generation that decides what follows a failed attempt: another pair of workers, a pause, or the end.
#include <algorithm>

#include "services/base/log.h"
#include "services/router/dispatch/failures.h"
#include "services/router/dispatch/generation.h"
#include "services/router/request/api_error.h"

namespace spl::router {

// Nothing was started, so this is no attempt. `missing` says what there is none of.
void Generation::WaitForWorkers(const absl::Status& missing) {
  waiting_in_ = TtftStage::kRetry;
  if (history_.none_since == Clock::time_point()) history_.none_since = Clock::now();
  if (Clock::now() - history_.none_since >= core_.options().worker_wait)
    return Fail(history_.attempts == 0 ? missing : ToClientStatus(missing, history_.attempts));
  retry_timer_.expires_after(core_.options().retry_backoff);
  retry_timer_.async_wait([self = shared_from_this()](const boost::system::error_code& error) {
    if (!error) self->Dispatch();
  });
}

void Generation::OnWorkerLost(const std::string& worker_id) {
  Post([this, worker_id] {
    if (done_ || attempt_ == nullptr || !attempt_->reserved) return;
    const bool on_prefill = attempt_->prefill_call != nullptr && attempt_->prefill.process_id() == worker_id;
    if (!on_prefill && attempt_->decode.worker_id != worker_id) return;
    OnAttemptFailed(Errorf(absl::StatusCode::kUnavailable, "worker {} is lost", worker_id), worker_id);
  });
}

// Decides whether the request goes on elsewhere.
void Generation::OnAttemptFailed(const absl::Status& status, const std::string& worker_id) {
  const bool lost_stream = attempt_ != nullptr && attempt_->prefilled;
  waiting_in_ = TtftStage::kRetry;
  if (IsWorkersFault(status.code())) core_.breakers().OnFailure(worker_id, Clock::now());
  NoteKill(status, worker_id);
  Abandon("the attempt failed");
  history_.failed.insert(worker_id);
  if (IsRequestsFault(status.code())) return Fail(status);
  if (Clock::now() >= request_.deadline) {
    return Fail(Errorf(absl::StatusCode::kDeadlineExceeded, "the request's deadline passed"));
  }
  if (started_output_ && answer_.num_continuations() > 1) {
    return Fail(
        Annotate(ToClientStatus(status, history_.attempts), "a request with n > 1 cannot move to another worker"));
  }
  if (lost_stream ? history_.migrations >= core_.options().max_migrations
                  : history_.failures + 1 >= core_.options().max_attempts) {
    return Fail(ToClientStatus(status, std::max(history_.attempts, 1U)));
  }
  if (!core_.retry_budget().TakeRetry(Clock::now())) {
    core_.metrics().budget_refusals.Increment();
    return Fail(Annotate(ToClientStatus(status, std::max(history_.attempts, 1U)),
                         "too many requests are being retried; this one is not"));
  }
  if (lost_stream) {
    ++history_.migrations;
    core_.metrics().migrations.Increment();
  } else {
    ++history_.failures;
  }
  log::Warning(lost_stream ? "router.migration" : "router.retry", log::F("request", request_.request_id),
               log::F("status", status), log::F("output_tokens", answer_.tokens().size()));
  RetryLater();
}

// The worker broke off in the middle of this request: perhaps because of it.
void Generation::NoteKill(const absl::Status& status, const std::string& worker_id) {
  if (status.code() != absl::StatusCode::kUnavailable || attempt_ == nullptr || !attempt_->reserved) return;
  const bool is_prefill = attempt_->prefill.worker_id == worker_id;
  if (!is_prefill && attempt_->decode.worker_id != worker_id) return;
  history_.NoteBreakOff(is_prefill ? attempt_->prefill.process_id() : worker_id,
                        is_prefill ? attempt_->prefill.epoch : attempt_->decode.epoch, Clock::now());
}

// At once when there is a pair that has not failed this request; else after a pause, so that a worker can come back, or
// be connected.
void Generation::RetryLater() {
  const AttemptHistory::Kills kills = history_.CountKills(core_.fleet());
  const uint32_t most = core_.options().max_kills;
  if (kills.lost >= most) {
    core_.metrics().poisoned.Increment();
    return Fail(SetErrorCode(
        Errorf(absl::StatusCode::kInvalidArgument,
               "{} workers were lost while they worked on this request; it is not tried on another one", kills.lost),
        "request_killed_workers"));
  }
  // It goes nowhere before it is known what it has done.
  if (kills.lost + kills.unknown >= most && Clock::now() < history_.last_break_off() + core_.options().fate_timeout) {
    retry_timer_.expires_after(std::chrono::milliseconds(20));
    retry_timer_.async_wait([self = shared_from_this()](const boost::system::error_code& error) {
      if (!error && !self->done_) self->RetryLater();
    });
    return;
  }
  if (history_.HasFreshPair(*core_.fleet().snapshot(), num_prompt_tokens() + answer_.tokens().size()))
    return Dispatch();
  retry_timer_.expires_after(core_.options().retry_backoff * std::max(history_.failures, 1U));
  retry_timer_.async_wait([self = shared_from_this()](const boost::system::error_code& error) {
    if (!error) self->Dispatch();
  });
}

// Ends the current attempt on both workers; what still arrives from it is ignored.
void Generation::Abandon(const char* reason) {
  const AttemptPtr attempt = std::move(attempt_);
  attempt_ = nullptr;
  if (attempt == nullptr) return;
  if (attempt->prefill_call != nullptr) attempt->prefill_call->Cancel();
  if (attempt->stream != nullptr) attempt->stream->Cancel();
  core_.breakers().OnNeither(attempt->prefill.worker_id);
  core_.breakers().OnNeither(attempt->decode.worker_id);
  ReleaseTicket(*attempt, reason, core_.options());
}

}  // namespace spl::router
