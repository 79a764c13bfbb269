#include "services/prefill_work/fidelity_sampler.h"

#include <utility>

#include "services/methods/methods.h"

namespace spl::prefill {

void FidelitySampler::Watch(engine::PrefillRequest& request) {
  if (share_ <= 0 || request.reuse.policy == methods::kExact) return;
  {
    std::lock_guard lock(mutex_);
    if (std::uniform_real_distribution<>(0, 1)(random_) >= share_) return;
  }
  engine::PrefillRequest exact;
  exact.id = request.id + "/fidelity";
  exact.tokens = request.tokens;
  exact.sampling.temperature = 0;
  exact.reuse.policy = methods::kExact;
  exact.namespace_key = request.namespace_key;
  exact.publish = false;
  exact.background = true;
  exact.return_first_logits = true;
  const bool wanted = std::exchange(request.return_first_logits, true);
  request.on_done = [state = state_, wanted, exact = std::move(exact), on_done = std::move(request.on_done)](
                        const absl::Status& status, engine::PrefillOutcome outcome) mutable {
    const std::string method = outcome.stats.policy;
    const bool compare = status.ok() && !outcome.stats.exact;
    // For methods that select lines, attention itself measures this, on rows that took no part in the selection.
    if (compare && outcome.stats.lines.held_out_heads > 0)
      state->metrics.ObserveKeptMass(method, outcome.stats.lines.held_out_share());
    std::vector<float> logits;
    if (compare) logits = outcome.first_logits;
    if (!wanted) outcome.first_logits.clear();
    on_done(status, std::move(outcome));
    if (compare) Compare(state, std::move(exact), method, std::move(logits));
  };
}

void FidelitySampler::Compare(const std::shared_ptr<State>& state, engine::PrefillRequest exact,
                              const std::string& method, std::vector<float> approximate) {
  if (state->pending.fetch_add(1) >= kMaxPending) {
    state->pending.fetch_sub(1);
    state->metrics.Skip(method);
    return;
  }
  exact.on_done = [state, method, approximate = std::move(approximate)](const absl::Status& status,
                                                                        engine::PrefillOutcome outcome) {
    if (status.ok())
      state->metrics.Observe(method, engine::CompareLogits(approximate, outcome.first_logits));
    else
      state->metrics.Skip(method);
    state->pending.fetch_sub(1);
  };
  if (state->engine.Submit(std::move(exact)).ok()) return;
  state->pending.fetch_sub(1);  // on_done does not run then
  state->metrics.Skip(method);
}

}  // namespace spl::prefill
