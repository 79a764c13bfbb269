// Where the time to the first token of one request goes: consecutive stages without gaps.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <map>
#include <string>

namespace spl::router {

// In the order in which a request passes through them. What another program measures is a duration by its own clock; no
// two clocks are compared.
enum class TtftStage {
  kAccept,         // the request is here whole, until a thread has read it
  kTokenize,       // chat template, tokens, chunk keys
  kQueue,          // waiting for a turn, or for room on a decode worker
  kDispatch,       // choosing workers, building the calls
  kReserve,        // decode worker: reserving pages
  kPrefillWorker,  // prefill worker outside of its engine: reading the call, the answer
  kPrefillQueue,   // prefill worker: waiting for pages, for a fetch thread, for the engine
  kLookup,         // prefill worker: what of the prompt is here
  kFetch,          // prefill worker: chunks from the store
  kPrefill,        // prefill worker: computing, slices of other prompts in between
  kNetwork,  // of the two calls, what no program counts as its own: gRPC, the wire, threads that wait on both ends
  kDeliver,  // text of the first token, until the client's stream has it
  kRetry,    // attempts that failed, and pauses behind them
};
inline constexpr size_t kNumTtftStages = 13;
const char* TtftStageName(TtftStage stage);  // "accept", "prefill_queue", …

// What a prefill worker says of one call (PrefillResponse.run_seconds and the receipt).
struct PrefillWorkerTimes {
  double run_s = 0;  // the whole call; 0: an older worker, whose rest counts as network
  double queue_s = 0, lookup_s = 0, fetch_s = 0, prefill_s = 0;
};

// One request's. A cursor stands where the last stage ended, so that the stages add up to the time between `start` and
// the cursor. Not thread-safe; cost: a clock reading a call.
class TtftStages {
 public:
  using Clock = std::chrono::steady_clock;

  explicit TtftStages(Clock::time_point start) : cursor_(start) {}

  // All since the last call was `stage`.
  void End(TtftStage stage, Clock::time_point now = Clock::now());
  // All since the last call was a call of a worker, of which `worker_s` were `stage`; the rest is network. A worker
  // that claims more than there was gets what there was.
  void EndCall(TtftStage stage, double worker_s, Clock::time_point now = Clock::now());
  void EndPrefillCall(const PrefillWorkerTimes& times, Clock::time_point now = Clock::now());

  double seconds(TtftStage stage) const { return seconds_[static_cast<size_t>(stage)]; }
  double sum() const;
  Clock::time_point cursor() const { return cursor_; }
  // Of stages that took any time, by name.
  std::map<std::string, double> ToMap() const;

 private:
  double Advance(Clock::time_point now);  // seconds since the last time
  void Add(TtftStage stage, double seconds) { seconds_[static_cast<size_t>(stage)] += seconds; }

  Clock::time_point cursor_;
  std::array<double, kNumTtftStages> seconds_{};
};

}  // namespace spl::router
