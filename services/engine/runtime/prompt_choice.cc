#include "services/engine/runtime/prompt_choice.h"

#include <algorithm>
#include <utility>

#include "services/base/status.h"
#include "services/engine/methods/recovery_methods.h"
#include "services/engine/model/prefill_cost.h"
#include "services/engine/runtime/prompt_layout.h"
#include "services/methods/methods.h"

namespace spl::engine {
namespace {

bool AllSame(const ReuseLayout& layout) {
  return !layout.reused.empty() && std::all_of(layout.contexts.begin(), layout.contexts.end(),
                                               [](CopyContext context) { return context == CopyContext::kSame; });
}

// Predicted work of `rows` as a share of exact's. Rows of a recovery may stand anywhere, so each is taken to see the
// whole prompt, which is the most that it can.
double WorkOf(double rows, const ReuseLayout& layout, const ModelConfig& config) {
  const PrefillCost cost(config);
  const double pair = cost.PerPair() / cost.PerToken();
  const double all = layout.num_tokens, own = layout.active().size();
  return rows * (1 + pair * all) / (own * (1 + pair * (all - own / 2)));
}

absl::StatusOr<std::unique_ptr<RecoveryPolicy>> PolicyWith(const ReuseOptions& options, const Model& model) {
  return MakeRecoveryPolicy(options, model.config(), model.head_classes().get(), model.recovery_profile());
}

class Candidates {
 public:
  Candidates(const PrefillJob& job, const Model& model, const ReuseLayout& layout)
      : job_(job), model_(model), layout_(layout) {}

  // In the order of preference.
  absl::StatusOr<std::vector<Candidate>> All() const {
    SPLICE_ASSIGN_OR_RETURN(const Candidate own, Make(job_.request.reuse.policy));
    const absl::StatusOr<Candidate> fewer = ManyDocuments(own);
    if (!fewer.ok()) return std::vector<Candidate>{own};
    return std::vector<Candidate>{*fewer, own};
  }

  absl::StatusOr<Candidate> Make(std::string_view policy) const {
    ReuseOptions options = job_.request.reuse;
    options.policy = policy;
    SPLICE_ASSIGN_OR_RETURN(const auto made, PolicyWith(options, model_));
    ReuseOptions compared = options;
    compared.full_kv = false;  // for decoding: the first token, which is compared, does not depend on it
    Candidate candidate{.policy = options.policy, .record = MethodOf(compared)};
    const double rows = made->PredictedRows(layout_);
    candidate.work = WorkOf(rows, layout_, model_.config());
    // Options that say how much is recomputed hold for these copies, too.
    candidate.same_context = AllSame(layout_) && rows <= static_cast<double>(CountOf(layout_.fresh())) + 1;
    if (candidate.same_context) candidate.record = "same_context " + candidate.record;
    return candidate;
  }

 private:
  // `samkv`, for a prompt that it pays for. NotFound: it does not.
  absl::StatusOr<Candidate> ManyDocuments(const Candidate& own) const {
    constexpr std::string_view kSamKv = "samkv";
    const absl::Status unfit = absl::NotFoundError("samkv does not pay for this prompt");
    const auto apart =
        layout_.contexts.size() -
        static_cast<size_t>(std::count(layout_.contexts.begin(), layout_.contexts.end(), CopyContext::kSame));
    if (own.policy != methods::kSparseX || apart < kManyDocuments || !job_.request.session.empty()) return unfit;
    ReuseOptions options = job_.request.reuse;
    options.policy = kSamKv;
    SPLICE_ASSIGN_OR_RETURN(const auto policy, PolicyWith(options, model_));
    if (job_.request.segments.size() > static_cast<size_t>(policy->max_segments())) return unfit;
    const double kept = policy->PredictedKept(layout_);
    SPLICE_ASSIGN_OR_RETURN(Candidate candidate, Make(kSamKv));
    // A row that is not computed and a row whose KV is neither sent nor held count alike: nobody has measured what a
    // byte costs the decode worker of this prompt.
    const double saved_kv = (1 - kept) * static_cast<double>(CountOf(layout_.reused)) / layout_.num_tokens;
    if (kept > kKeptShareMax || candidate.work - saved_kv >= own.work) return unfit;
    candidate.needs_record = true;
    return candidate;
  }

  const PrefillJob& job_;
  const Model& model_;
  const ReuseLayout& layout_;
};

absl::StatusOr<MethodChoice> Choose(const PrefillJob& job, const Model& model, const ReuseLayout& layout) {
  const PrefillRequest& request = job.request;
  const Candidates candidates(job, model, layout);
  const bool copies = !layout.reused.empty();
  if (request.terms.choose) {
    std::vector<Candidate> all;
    if (copies) {
      SPLICE_ASSIGN_OR_RETURN(all, candidates.All());
    }
    MethodChoice choice = ChooseMethod(all, request.terms, request.namespace_key);
    // A worker that may not compute so much uses the copies, or the prompt would have to go elsewhere.
    const bool too_much = request.max_computed_tokens > 0 && layout.active().size() > request.max_computed_tokens;
    if (choice.why != ChoiceReason::kLittleToGain || !too_much || request.terms.quality > 0) return choice;
    choice.why = ChoiceReason::kDefault;
    choice.policy = all.back().policy;
    choice.record = all.back().record;
    return choice;
  }
  SPLICE_ASSIGN_OR_RETURN(const Candidate named, candidates.Make(request.reuse.policy));
  if (request.terms.quality > 0 && (copies || !job.policy->is_exact(layout)))
    return HoldToContract(named, request.terms, request.namespace_key);
  MethodChoice choice{.policy = named.policy, .record = named.record, .judged = named.policy};
  if (request.terms.quality > 0) choice.why = ChoiceReason::kNothingToCopy;
  choice.quality = request.terms.quality;
  return choice;
}

}  // namespace

absl::Status ChooseMethodOf(PrefillJob& job, const Model& model, std::vector<SegmentHit>& hits, ReuseLayout& layout) {
  PrefillRequest& request = job.request;
  // Nothing is to be decided, and nothing can differ from exact.
  if (job.publish || (request.reuse.policy == methods::kExact && !request.terms.choose)) return absl::OkStatus();
  SPLICE_ASSIGN_OR_RETURN(MethodChoice choice, Choose(job, model, layout));
  choice.copies = CountOf(layout.reused);
  if (!request.session.empty()) choice.measure.clear();  // its KV is wanted for the next turn
  if (choice.policy != request.reuse.policy) {
    request.reuse.policy = choice.policy;
    SPLICE_ASSIGN_OR_RETURN(job.policy, PolicyWith(request.reuse, model));
  }
  if (choice.policy == methods::kExact) {
    hits.clear();
    layout = LayoutOf(request.tokens, job.cached(), {});
    if (!choice.measure.empty()) request.publish = false;
  }
  job.stats.policy = std::string(job.policy->name());
  job.stats.choice = std::move(choice);
  return absl::OkStatus();
}

}  // namespace spl::engine
