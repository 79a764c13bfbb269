// One request on its way through the cluster.
//
//   prepare → queue → place → reserve(D) → stream(D) + prefill(P) → first token → tokens of D → done
//                ▲      ▲ └────── full ─────┘│       │                              │
//                └──────┴─ no room anywhere ─┘       └── failed: next attempt       └── D lost: next attempt with
//                                                        on other workers               the tokens streamed so far
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "services/router/dispatch/answer.h"
#include "services/router/dispatch/attempt.h"
#include "services/router/dispatch/attempt_history.h"
#include "services/router/dispatch/dispatcher.h"
#include "services/router/dispatch/request_prompt.h"
#include "services/router/telemetry/ttft_stages.h"

namespace spl::router {

// Owns the request's calls on workers and its output state. Start, Cancel, Resume and OnWorkerLost may be called from
// any thread; all state lives on one strand, so there are no locks. Keeps itself alive while calls are open.
//
// However it ends (last token, error, client gone, deadline), its calls are cancelled and its ticket is released at
// once.
class Generation : public std::enable_shared_from_this<Generation> {
 public:
  // `lease`: what the request counts for its caller, until it is over.
  Generation(Dispatcher& core, uint64_t id, GenerationRequest request, std::shared_ptr<GenerationSink> sink,
             RateLimits::Lease lease);
  ~Generation();

  // Tokenizes on the calling thread (a worker thread of the router), then returns; the rest is asynchronous. Once.
  void Start();
  // Ends the request with `reason`; does nothing if it has ended already.
  void Cancel(absl::Status reason);
  // Called when the sink wants output again after it has asked for a pause.
  void Resume();
  void OnWorkerLost(const std::string& worker_id);

  const std::string& request_id() const { return request_.request_id; }

 private:
  using Clock = std::chrono::steady_clock;

  // Preparation.
  void OnPrepared(absl::StatusOr<RequestPrompt> prompt);
  void ArmDeadline();
  void EnterQueue();
  QueuedRequest Queued();

  // Attempts.
  void Dispatch();
  void WaitForWorkers(const absl::Status& missing);
  absl::Status Place(const FleetSnapshot& fleet);
  void Reserve(const FleetSnapshot& fleet);
  void OnReserved(const AttemptPtr& attempt, const absl::Status& status, v1::Ticket ticket);
  void OpenStream(const AttemptPtr& attempt);
  void RunPrefill(const AttemptPtr& attempt);
  void OnPrefilled(const AttemptPtr& attempt, const absl::Status& status, const v1::PrefillResponse& response);
  void Learn(const Attempt& attempt, const v1::Receipt& receipt);
  void OnChunk(const AttemptPtr& attempt, v1::StreamChunk chunk);
  void OnStreamEnded(const AttemptPtr& attempt, const absl::Status& status);
  void OnDecodeFull(const std::string& worker_id);
  void OnAttemptFailed(const absl::Status& status, const std::string& worker_id);
  void NoteKill(const absl::Status& status, const std::string& worker_id);
  void RetryLater();
  void Abandon(const char* reason);

  // Output.
  void Deliver(const v1::StreamChunk& chunk);
  void DeliverFirst(const v1::PrefillResponse& response);
  void Emit(std::vector<Delta> deltas);
  void EndStage(TtftStage stage);
  Span CallSpan(std::string_view name, const std::string& worker_id) const;
  void RecordTrace(const absl::Status& status) const;
  void ObserveLatency();
  void ObserveFirst();

  // End.
  void Succeed();
  void Fail(const absl::Status& status);
  void Finish(const absl::Status& status);
  void LogLine(const absl::Status& status) const;
  // State shown to operators (RequestLog).
  void Note(const char* stage);
  void Describe(RequestRecord& record) const;
  FinalInfo MakeFinal() const;
  SentRequest Sent() const { return {request_, prompt_, answer_.tokens(), core_.namespace_keys()}; }
  size_t num_prompt_tokens() const { return prompt_.tokens.size(); }
  double SecondsSince(Clock::time_point start) const;

  template <typename Function>
  void Post(Function function) {
    boost::asio::post(strand_, [self = shared_from_this(), function = std::move(function)]() mutable { function(); });
  }

  Dispatcher& core_;
  const uint64_t id_;
  GenerationRequest request_;
  std::shared_ptr<GenerationSink> sink_;
  boost::asio::strand<boost::asio::io_context::executor_type> strand_;
  boost::asio::steady_timer deadline_timer_;
  boost::asio::steady_timer retry_timer_;

  const Clock::time_point arrived_;
  TtftStages stages_{arrived_};               // until the first token
  TtftStage waiting_in_ = TtftStage::kQueue;  // what time until the next Dispatch is
  Clock::time_point admitted_;
  Clock::time_point last_output_;
  double ttft_seconds_ = 0;
  double queue_seconds_ = 0;

  RequestPrompt prompt_;
  RateLimits::Lease lease_;
  Answer answer_;
  v1::Receipt receipt_;

  AttemptPtr attempt_;
  AttemptHistory history_;
  bool started_output_ = false;
  bool paused_ = false;
  bool done_ = false;
};

}  // namespace spl::router
