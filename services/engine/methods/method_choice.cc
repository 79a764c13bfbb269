#include "services/engine/methods/method_choice.h"

#include <algorithm>

#include "services/methods/methods.h"
#include "services/methods/quality.h"

namespace spl::engine {
namespace {

struct Verdict {
  bool may_run = false;
  ChoiceReason why = ChoiceReason::kDefault;
  Agreement agreement;
};

Verdict JudgeByContract(const Agreement& agreement, double quality, double provable) {
  if (agreement.low >= quality) return {true, ChoiceReason::kRecord, agreement};
  if (quality > provable) return {false, ChoiceReason::kUnprovable, agreement};
  // As many comparisons without a failure would not prove it either.
  const bool too_few = WilsonLow(1, agreement.weight) < quality;
  return {false, too_few ? ChoiceReason::kNoRecord : ChoiceReason::kBelowQuality, agreement};
}

Verdict Judge(const Candidate& candidate, const MethodTerms& terms, const chunk::Digest& namespace_key) {
  const bool known = terms.records != nullptr;
  const Agreement agreement = known ? terms.records->Of(namespace_key, candidate.record) : Agreement();
  if (terms.quality > 0) return JudgeByContract(agreement, terms.quality, known ? terms.records->provable() : 1);
  if (candidate.needs_record) return JudgeByContract(agreement, kAgreementFloor, 1);
  if (agreement.high < kAgreementFloor) return {false, ChoiceReason::kClearlyBad, agreement};
  return {true, candidate.same_context ? ChoiceReason::kSameContext : ChoiceReason::kDefault, agreement};
}

MethodChoice About(const Candidate& candidate, const Verdict& verdict, const MethodTerms& terms) {
  MethodChoice choice{.why = verdict.why,
                      .policy = std::string(methods::kExact),
                      .judged = candidate.policy,
                      .work = candidate.work,
                      .quality = terms.quality,
                      .agreement = verdict.agreement};
  if (!verdict.may_run) return choice;
  choice.policy = candidate.policy;
  choice.record = candidate.record;
  return choice;
}

void Measure(const Candidate& candidate, MethodChoice& choice) {
  choice.measure = candidate.policy;
  choice.measure_record = candidate.record;
}

}  // namespace

std::string_view NameOf(ChoiceReason reason) {
  switch (reason) {
    case ChoiceReason::kNamed:
      return "named";
    case ChoiceReason::kNothingToCopy:
      return methods::kNothingToCopy;
    case ChoiceReason::kLittleToGain:
      return methods::kLittleToGain;
    case ChoiceReason::kSameContext:
      return methods::kSameContext;
    case ChoiceReason::kDefault:
      return "default";
    case ChoiceReason::kRecord:
      return "record";
    case ChoiceReason::kNoRecord:
      return "no_record";
    case ChoiceReason::kBelowQuality:
      return "below_quality";
    case ChoiceReason::kClearlyBad:
      return methods::kClearlyBad;
    case ChoiceReason::kUnprovable:
      return "unprovable";
  }
  return "";
}

MethodChoice ChooseMethod(const std::vector<Candidate>& candidates, const MethodTerms& terms,
                          const chunk::Digest& namespace_key) {
  MethodChoice exact{.why = ChoiceReason::kNothingToCopy,
                     .policy = std::string(methods::kExact),
                     .judged = std::string(methods::kExact),
                     .quality = terms.quality};
  if (candidates.empty()) return exact;
  std::optional<MethodChoice> chosen;
  const Candidate* unproven = nullptr;  // with the fewest comparisons
  double fewest = 0;
  for (const Candidate& candidate : candidates) {
    if (candidate.work > 1 - kLeastSaving) continue;
    const Verdict verdict = Judge(candidate, terms, namespace_key);
    // The last word is that of the model's method, unless an earlier one may run.
    chosen = About(candidate, verdict, terms);
    if (verdict.may_run) break;
    if (unproven != nullptr && fewest <= verdict.agreement.weight) continue;
    unproven = &candidate;
    fewest = verdict.agreement.weight;
  }
  if (!chosen.has_value()) {
    exact.why = ChoiceReason::kLittleToGain;
    exact.judged = candidates.back().policy;
    exact.work = candidates.back().work;
    return exact;
  }
  if (terms.compares && unproven != nullptr && chosen->why != ChoiceReason::kUnprovable) Measure(*unproven, *chosen);
  return *chosen;
}

MethodChoice HoldToContract(const Candidate& named, const MethodTerms& terms, const chunk::Digest& namespace_key) {
  MethodChoice choice = About(named, Judge(named, terms, namespace_key), terms);
  if (terms.compares && choice.record.empty() && choice.why != ChoiceReason::kUnprovable) Measure(named, choice);
  return choice;
}

}  // namespace spl::engine
