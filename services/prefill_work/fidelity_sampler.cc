#include "services/prefill_work/fidelity_sampler.h"

#include <algorithm>
#include <utility>

#include "services/base/fault_point.h"
#include "services/methods/methods.h"

namespace spl::prefill {
namespace {

// corrupt: the comparison finds another token.
FaultPoint compare_fault("prefill.fidelity.compare");

// The same prompt as a background request that leaves nothing behind.
engine::PrefillRequest AgainOf(const engine::PrefillRequest& request) {
  engine::PrefillRequest again;
  again.tokens = request.tokens;
  again.sampling.temperature = 0;
  again.reuse = request.reuse;
  again.namespace_key = request.namespace_key;
  again.publish = false;
  again.background = true;
  again.return_first_logits = true;
  return again;
}

}  // namespace

// The other runs of one prompt. It lives in the callback of the run that it waits for.
class FidelitySampler::Comparison : public std::enable_shared_from_this<Comparison> {
 public:
  Comparison(std::shared_ptr<State> state, const engine::PrefillRequest& request)
      : state_(std::move(state)),
        namespace_key_(request.namespace_key),
        exact_(AgainOf(request)),
        beside_(AgainOf(request)) {
    exact_.id = request.id + "/fidelity";
    exact_.reuse.policy = methods::kExact;
    beside_.id = request.id + "/beside";
    beside_.segments = request.segments;
    beside_.reuse_auto = request.reuse_auto;
  }
  ~Comparison() {
    if (counted_) state_->pending.fetch_sub(1);
  }

  // Called with what the request itself got.
  void Begin(const engine::PrefillStats& stats, std::vector<float> logits) {
    stats_ = stats;
    compares_ = !stats.exact && !stats.choice.record.empty();
    if (!compares_ && stats_.choice.measure.empty()) return;
    counted_ = true;
    if (state_->pending.fetch_add(1) >= kMaxPending) return Skip();
    if (!compares_) return RunBeside(std::move(logits));
    Run(std::move(exact_), [self = shared_from_this(), logits = std::move(logits)](engine::PrefillOutcome& outcome) {
      self->Observe(self->stats_.policy, self->stats_.choice.record, logits, outcome.first_logits);
      if (!self->stats_.choice.measure.empty()) self->RunBeside(std::move(outcome.first_logits));
    });
  }

 private:
  void Skip() { state_->metrics.Skip(compares_ ? stats_.policy : stats_.choice.measure); }

  void Run(engine::PrefillRequest request, std::function<void(engine::PrefillOutcome&)> then) {
    request.on_done = [self = shared_from_this(), then = std::move(then)](const absl::Status& status,
                                                                          engine::PrefillOutcome outcome) {
      status.ok() ? then(outcome) : self->Skip();
    };
    if (!state_->engine.Submit(std::move(request)).ok()) Skip();  // on_done does not run then
  }

  // The method must find what the request found: the prompt has run since.
  void RunBeside(std::vector<float> exact_logits) {
    beside_.reuse.policy = stats_.choice.measure;
    beside_.max_cached_tokens = stats_.cached_tokens;
    Run(std::move(beside_),
        [self = shared_from_this(), exact_logits = std::move(exact_logits)](engine::PrefillOutcome& outcome) {
          const engine::MethodChoice& choice = self->stats_.choice;
          if (outcome.stats.aligned_tokens != choice.copies || outcome.stats.choice.record != choice.measure_record)
            return self->Skip();
          self->Observe(choice.measure, choice.measure_record, outcome.first_logits, exact_logits);
        });
  }

  void Observe(const std::string& method, const std::string& record, std::span<const float> approximate,
               std::span<const float> exact) {
    engine::LogitAgreement agreement = engine::CompareLogits(approximate, exact);
    if (compare_fault.Hit().corrupt) agreement.top1 = false;
    state_->metrics.Observe(method, agreement);
    state_->records->Observe(namespace_key_, record, agreement.top1);
  }

  const std::shared_ptr<State> state_;
  const chunk::Digest namespace_key_;
  engine::PrefillRequest exact_, beside_;
  engine::PrefillStats stats_;
  bool compares_ = false;  // the request's own method
  bool counted_ = false;
};

bool FidelitySampler::Draws(double share) {
  if (share <= 0) return false;
  std::lock_guard lock(mutex_);
  return std::uniform_real_distribution<>(0, 1)(random_) < share;
}

void FidelitySampler::Watch(engine::PrefillRequest& request) {
  request.terms.records = state_->records;
  if (request.reuse.policy == methods::kExact) return;
  if (!Draws(request.terms.quality > 0 ? std::max(shares_.approximate, shares_.contract) : shares_.approximate)) return;
  request.terms.compares = true;
  const bool wanted = std::exchange(request.return_first_logits, true);
  request.on_done = [state = state_, comparison = std::make_shared<Comparison>(state_, request), wanted,
                     on_done = std::move(request.on_done)](const absl::Status& status, engine::PrefillOutcome outcome) {
    // For methods that select lines, attention itself measures this, on rows that took no part in the selection.
    if (status.ok() && !outcome.stats.exact && outcome.stats.lines.held_out_heads > 0)
      state->metrics.ObserveKeptMass(outcome.stats.policy, outcome.stats.lines.held_out_share());
    const engine::PrefillStats stats = outcome.stats;
    std::vector<float> logits = outcome.first_logits;
    if (!wanted) outcome.first_logits.clear();
    on_done(status, std::move(outcome));
    if (status.ok()) comparison->Begin(stats, std::move(logits));
  };
}

}  // namespace spl::prefill
