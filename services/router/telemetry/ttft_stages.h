// Divides the time to first token of one request into consecutive stages without gaps.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <map>
#include <string>

namespace spl::router {

// In the order in which a request passes through them. Another program's measurement is a duration by its own clock;
// clocks are never compared.
enum class TtftStage {
  kAccept,         // from the complete request to a thread that reads it
  kTokenize,       // chat template, tokens, chunk keys
  kQueue,          // waiting for a turn, or for room on a decode worker
  kDispatch,       // choosing workers, building the calls
  kReserve,        // decode worker: reserving pages
  kPrefillWorker,  // prefill worker outside of its engine: reading the call, the answer
  kPrefillQueue,   // prefill worker: waiting for pages, for a fetch thread, for the engine
  kLookup,         // prefill worker: finding cached parts of the prompt
  kFetch,          // prefill worker: chunks from the store
  kPrefill,        // prefill worker: computing, with slices of other prompts in between
  kNetwork,        // the part of the two calls that no program counts: gRPC, the wire, waiting threads on both ends
  kDeliver,        // text of the first token, until the client's stream has it
  kRetry,          // failed attempts, and pauses after them
};
inline constexpr size_t kNumTtftStages = 13;
const char* TtftStageName(TtftStage stage);  // "accept", "prefill_queue", …

// A prefill worker's report on one call (PrefillResponse.run_seconds and the receipt).
struct PrefillWorkerTimes {
  double run_s = 0;  // the whole call; 0: an older worker, whose rest counts as network
  double queue_s = 0, lookup_s = 0, fetch_s = 0, prefill_s = 0;
};

// The stages of one request. A cursor stands at the end of the last stage, so that the stages add up to the time
// between `start` and the cursor. Not thread-safe. Cost: one clock reading per call.
class TtftStages {
 public:
  using Clock = std::chrono::steady_clock;

  explicit TtftStages(Clock::time_point start) : cursor_(start) {}

  // Charges all time since the last call to `stage`.
  void End(TtftStage stage, Clock::time_point now = Clock::now());
  // Charges the time since the last call to a call of a worker: `worker_s` of it to `stage`, the rest to the network.
  // If a worker reports more than the elapsed time, it gets the elapsed time.
  void EndCall(TtftStage stage, double worker_s, Clock::time_point now = Clock::now());
  void EndPrefillCall(const PrefillWorkerTimes& times, Clock::time_point now = Clock::now());

  double seconds(TtftStage stage) const { return seconds_[static_cast<size_t>(stage)]; }
  double sum() const;
  Clock::time_point cursor() const { return cursor_; }
  // Stages that took any time, by name.
  std::map<std::string, double> ToMap() const;

 private:
  double Advance(Clock::time_point now);  // seconds since the last time
  void Add(TtftStage stage, double seconds) { seconds_[static_cast<size_t>(stage)] += seconds; }

  Clock::time_point cursor_;
  std::array<double, kNumTtftStages> seconds_{};
};

}  // namespace spl::router
