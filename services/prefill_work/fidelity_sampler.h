// Computes a share of the prompts a second time, exactly and at low priority, and compares the logits of the first
// token.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <random>

#include "services/engine/engine.h"
#include "services/wire/fidelity_metrics.h"

namespace spl::prefill {

// Any thread may call. Watched requests outlive the sampler and refer to the engine: Stop() the engine before it goes.
class FidelitySampler {
 public:
  // `share`: share of the prompts whose policy is not exact.
  FidelitySampler(engine::PrefillEngine& engine, double share, Metrics& metrics)
      : state_(std::make_shared<State>(engine, metrics)), share_(share), random_(std::random_device{}()) {}

  // Call before Submit. For a random share of requests, on_done also orders the exact run; the request's own result is
  // unchanged.
  void Watch(engine::PrefillRequest& request);

 private:
  static constexpr int kMaxPending = 2;  // exact runs that wait or run; further ones are skipped and counted
  struct State {
    State(engine::PrefillEngine& engine, Metrics& metrics) : engine(engine), metrics(metrics, "prefill") {}
    engine::PrefillEngine& engine;
    wire::FidelityMetrics metrics;
    std::atomic<int> pending{0};
  };
  static void Compare(const std::shared_ptr<State>& state, engine::PrefillRequest exact, const std::string& method,
                      std::vector<float> approximate);

  const std::shared_ptr<State> state_;
  const double share_;
  std::mutex mutex_;  // guards random_
  std::mt19937_64 random_;
};

}  // namespace spl::prefill
