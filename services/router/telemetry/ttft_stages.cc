#include "services/router/telemetry/ttft_stages.h"

#include <algorithm>
#include <numeric>

namespace spl::router {

const char* TtftStageName(TtftStage stage) {
  constexpr std::array<const char*, kNumTtftStages> kNames = {
      "accept", "tokenize", "queue",   "dispatch", "reserve", "prefill_worker", "prefill_queue",
      "lookup", "fetch",    "prefill", "network",  "deliver", "retry"};
  return kNames[static_cast<size_t>(stage)];
}

double TtftStages::Advance(Clock::time_point now) {
  const double seconds = std::max(0.0, std::chrono::duration<double>(now - cursor_).count());
  cursor_ = std::max(cursor_, now);
  return seconds;
}

void TtftStages::End(TtftStage stage, Clock::time_point now) { Add(stage, Advance(now)); }

void TtftStages::EndCall(TtftStage stage, double worker_s, Clock::time_point now) {
  const double all = Advance(now);
  const double own = std::clamp(worker_s, 0.0, all);
  Add(stage, own);
  Add(TtftStage::kNetwork, all - own);
}

void TtftStages::EndPrefillCall(const PrefillWorkerTimes& times, Clock::time_point now) {
  const double all = Advance(now);
  double left = all;
  const auto take = [&](TtftStage stage, double seconds) {
    const double taken = std::clamp(seconds, 0.0, left);
    Add(stage, taken);
    left -= taken;
  };
  take(TtftStage::kPrefillQueue, times.queue_s);
  take(TtftStage::kLookup, times.lookup_s);
  take(TtftStage::kFetch, times.fetch_s);
  take(TtftStage::kPrefill, times.prefill_s);
  if (times.run_s > 0)
    take(TtftStage::kPrefillWorker, times.run_s - (times.queue_s + times.lookup_s + times.fetch_s + times.prefill_s));
  Add(TtftStage::kNetwork, left);
}

double TtftStages::sum() const { return std::accumulate(seconds_.begin(), seconds_.end(), 0.0); }

std::map<std::string, double> TtftStages::ToMap() const {
  std::map<std::string, double> out;
  for (size_t i = 0; i < kNumTtftStages; ++i) {
    if (seconds_[i] > 0) out.emplace(TtftStageName(static_cast<TtftStage>(i)), seconds_[i]);
  }
  return out;
}

}  // namespace spl::router
