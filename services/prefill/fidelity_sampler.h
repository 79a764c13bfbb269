// Computes a share of the prompts exactly, too, behind everything else, and compares the logits of the first token.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <random>

#include "services/engine/engine.h"
#include "services/wire/fidelity_metrics.h"

namespace spl::prefill {

// Any thread. The engine outlives what was watched: Stop() it first.
class FidelitySampler {
 public:
  // `share`: of the prompts whose policy is not exact.
  FidelitySampler(engine::PrefillEngine& engine, double share, Metrics& metrics)
      : state_(std::make_shared<State>(engine, metrics)), share_(share), random_(std::random_device{}()) {}

  // Before Submit. By lot the request's on_done also orders the exact run; what the request itself gets is unchanged.
  void Watch(engine::PrefillRequest& request);

 private:
  static constexpr int kMaxPending = 2;  // exact runs that wait or run: more are skipped, and counted
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
