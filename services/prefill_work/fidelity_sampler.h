// Computes a share of the prompts a second time, exactly and at low priority, and compares the logits of the first
// token. The comparisons become the record by which methods are chosen. A prompt that was computed exactly because a
// method's record forbids it, or says too little, is computed a second time by that method.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "services/engine/engine.h"
#include "services/prefill_work/agreement_records.h"
#include "services/wire/fidelity_metrics.h"

namespace spl::prefill {

// Shares of the requests that are compared.
struct FidelityShares {
  double approximate = 0;  // for requests whose policy is not exact
  // For those with a contract (MethodTerms::quality), if that is more. Twenty requests pay for one comparison, and 0.99
  // takes 352 of these.
  double contract = 0.05;
};

// Any thread may call. Watched requests outlive the sampler and refer to the engine: Stop() the engine before it goes.
class FidelitySampler {
 public:
  FidelitySampler(engine::PrefillEngine& engine, FidelityShares shares, Metrics& metrics)
      : state_(std::make_shared<State>(engine, metrics)), shares_(shares), random_(std::random_device{}()) {}

  // Call before Submit. Gives the request the records. For a random share of requests, on_done also orders the other
  // run; the request's own result is unchanged.
  void Watch(engine::PrefillRequest& request);
  const AgreementRecords& records() const { return *state_->records; }

 private:
  static constexpr int kMaxPending = 2;  // prompts whose other runs wait or run; further ones are skipped and counted
  struct State {
    State(engine::PrefillEngine& engine, Metrics& metrics) : engine(engine), metrics(metrics, "prefill") {}
    engine::PrefillEngine& engine;
    wire::FidelityMetrics metrics;
    const std::shared_ptr<AgreementRecords> records = std::make_shared<AgreementRecords>();
    std::atomic<int> pending{0};
  };
  class Comparison;

  bool Draws(double share);

  const std::shared_ptr<State> state_;
  const FidelityShares shares_;
  std::mutex mutex_;  // guards random_
  std::mt19937_64 random_;
};

}  // namespace spl::prefill
