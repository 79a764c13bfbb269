// One request on its way through the cluster.
//
//   prepare → queue → place → reserve(D) → stream(D) + prefill(P) → first token → tokens of D → done
//                ▲      ▲ └────── full ─────┘│       │                              │
//                └──────┴─ no room anywhere ─┘       └── failed: next attempt       └── D lost: next attempt with
//                                                        on other workers               the tokens streamed so far
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <chrono>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "services/router/dispatch/dispatcher.h"
#include "services/router/fleet/workers.h"
#include "services/router/request/continuation.h"
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
  // Ends the request with `reason`; nothing happens when it is over already.
  void Cancel(absl::Status reason);
  // The sink wants output again after it has asked for a pause.
  void Resume();
  void OnWorkerLost(const std::string& worker_id);

  const std::string& request_id() const { return request_.request_id; }

 private:
  using Clock = std::chrono::steady_clock;
  using ReserveCall = UnaryCall<v1::ReserveRequest, v1::Ticket>;
  using PrefillCall = UnaryCall<v1::PrefillRequest, v1::PrefillResponse>;

  // One try on one pair of workers. Calls of an attempt that is no longer the current one are ignored.
  struct Attempt {
    PrefillView prefill;
    DecodeView decode;
    PeerLink link;                              // between the two
    double expected_seconds = 0;                // until the prompt's KV is at the decode worker
    uint32_t exact_tokens = 0;                  // see PredictedReuse
    std::shared_ptr<PrefillCall> prefill_call;  // while it runs
    std::shared_ptr<TokenStream> stream;        // while it is open
    v1::Ticket ticket;
    bool reserved = false;
    bool prefilled = false;
    // No prefill write to the ticket's pages can be on its way: none was asked for, the prefill worker says that it
    // failed, or decoding has begun. Prefill's answer alone does not say so: it comes before the last write has
    // arrived.
    bool writer_quiet = true;
    absl::Status early_end;  // the stream ended before prefill answered
    bool stream_ended = false;
    std::vector<v1::StreamChunk> early;  // at most one: the next is read after prefill has answered
    LoadTracker::Hold prefill_load;
    LoadTracker::Hold decode_load;
    Span reserve_span, prefill_span, decode_span;  // of its calls
  };
  using AttemptPtr = std::shared_ptr<Attempt>;

  // Preparation.
  void OnPrepared(absl::StatusOr<TokenizedPrompt> tokens);
  absl::Status CheckAndClamp(const FleetSnapshot& fleet);
  absl::Status CheckTokenIds(uint32_t vocab_size) const;
  struct SegmentNamespace {
    chunk::Digest key{};
    bool shared = false;  // a public one (wire: TokenSegment.shared)
  };
  SegmentNamespace NamespaceOf(const TokenSegment& segment) const;
  void MakeKeys(const TokenizedPrompt& prompt);
  void ArmDeadline();
  void EnterQueue();
  QueuedRequest Queued();

  // Attempts.
  void Dispatch();
  void WaitForWorkers(const absl::Status& missing);
  absl::StatusOr<Candidate> Place(const FleetSnapshot& fleet);
  void Reserve(const FleetSnapshot& fleet);
  void OnReserved(const AttemptPtr& attempt, const absl::Status& status, v1::Ticket ticket);
  void OpenStream(const AttemptPtr& attempt);
  void RunPrefill(const AttemptPtr& attempt);
  void OnPrefilled(const AttemptPtr& attempt, const absl::Status& status, v1::PrefillResponse response);
  void Learn(const Attempt& attempt, const RequestReceipt& receipt);
  void OnChunk(const AttemptPtr& attempt, v1::StreamChunk chunk);
  void OnStreamEnded(const AttemptPtr& attempt, const absl::Status& status);
  void OnDecodeFull(const std::string& worker_id);
  void OnAttemptFailed(const absl::Status& status, const std::string& worker_id);
  void NoteKill(const absl::Status& status, const std::string& worker_id);
  void RetryLater();
  void Abandon(const char* reason);
  void Release(Attempt& attempt, const char* reason);
  void AskWriter(const Attempt& attempt, const char* reason);

  // Output.
  void Deliver(const v1::StreamChunk& chunk);
  void DeliverFirst(const v1::PrefillResponse& response);
  absl::Status Take(uint32_t index, const v1::SampledToken& sampled, std::vector<Delta>* deltas);
  void Emit(std::vector<Delta> deltas);
  void EndStage(TtftStage stage);
  Span CallSpan(std::string_view name, const std::string& worker_id) const;
  void RecordTrace(const absl::Status& status) const;
  void ObserveLatency();
  void ObserveFirst();
  bool AllFinished() const;

  // End.
  void Succeed();
  void Fail(const absl::Status& status);
  void Finish(const absl::Status& status);
  void LogLine(const absl::Status& status) const;
  // What operators see (RequestLog).
  void Note(const char* stage);
  void Describe(RequestRecord& record) const;
  FinalInfo MakeFinal() const;
  // Tokens of the answer so far that the attempt's workers take for a part of the prompt: none where they are replayed.
  size_t NumPriorOutput() const;
  void AddTokensToPrefill(google::protobuf::RepeatedField<uint32_t>& tokens) const;
  double SecondsSince(Clock::time_point start) const;

  template <typename Function>
  void Post(Function function);

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

  std::vector<TokenId> prompt_;
  std::vector<TokenSegment> segments_;  // of the prompt
  PromptKeys keys_;
  RateLimits::Lease lease_;
  chunk::Digest namespace_key_{};
  std::vector<std::unique_ptr<Continuation>> continuations_;
  std::vector<TokenId> output_;  // of a single continuation: what a new decode worker has to go on from
  uint32_t completion_tokens_ = 0;
  RequestReceipt receipt_;

  AttemptPtr attempt_;
  uint32_t attempts_ = 0;  // prefills started
  uint32_t failures_ = 0;  // attempts that ended before prefill answered
  uint32_t migrations_ = 0;
  Clock::time_point none_since_{};  // no pair of workers can take the request since; epoch: one can
  std::set<std::string> full_;      // decode workers that had no room since the last wait
  std::set<std::string> failed_;    // workers that failed this request
  // Lives of workers that broke off while this request was there. Whether they are lost is the fleet's to say.
  struct Suspect {
    std::string worker_id;
    uint64_t epoch = 0;
    Clock::time_point since;
  };
  std::vector<Suspect> suspects_;
  bool started_output_ = false;
  bool paused_ = false;
  bool done_ = false;
};

}  // namespace spl::router
