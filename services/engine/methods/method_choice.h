// Chooses the method of a prompt whose copies are known (docs/decisions/0018-auto-and-the-quality-contract.md).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "services/engine/methods/agreement.h"

namespace spl::engine {

// Terms under which a request gets its method. The policy of its ReuseOptions is the method that it names, or the
// model's.
struct MethodTerms {
  bool choose = false;    // no method was named: another one may run
  double quality = 0;     // share of first tokens that must be exact's (methods::Quality::agreement); 0: no contract
  bool compares = false;  // drawn for a comparison: a method that may not run is to be measured beside
  std::shared_ptr<const AgreementSource> records;  // null: nothing is known
};

enum class ChoiceReason : uint8_t {
  kNamed,          // the request named the method
  kNothingToCopy,  // there are no copies, so that everything is computed
  kLittleToGain,   // no method saves kLeastSaving
  kSameContext,    // all copies stand behind the text that they were computed behind: nothing is recovered
  kDefault,        // the model's method
  kRecord,         // its record allows it
  kNoRecord,       // too few comparisons for the contract
  kBelowQuality,   // the record does not prove the contract
  kClearlyBad,     // the record proves that the method is bad
  kUnprovable,     // no record can prove the contract
};
std::string_view NameOf(ChoiceReason reason);  // as in the receipt

// A method that a prompt might get.
struct Candidate {
  std::string policy;
  std::string record;         // under which it is compared: MethodOf, and whether anything is recovered
  double work = 1;            // predicted rows times layers, as a share of exact's
  bool same_context = false;  // nothing is recovered
  bool needs_record = false;  // runs only with a record that speaks for it
};

struct MethodChoice {
  ChoiceReason why = ChoiceReason::kNamed;
  std::string policy;          // that runs
  std::string record;          // under which it is compared; empty: exact
  std::string judged;          // the method that `why`, `work` and `agreement` are about
  double work = 1;             // Candidate::work
  double quality = 0;          // MethodTerms::quality
  Agreement agreement;         // the record that decided; weight 0: none
  int64_t copies = 0;          // tokens that could be copied
  std::string measure;         // policy to be measured beside the one that runs; empty: none
  std::string measure_record;  // its record
};

// A tenth of exact's work is what the prediction may err by: a row behind a probe was measured at 1.14 to 1.4 rows
// where SparseXProbePolicy::kProbeRowCost says 1.2.
inline constexpr double kLeastSaving = 0.1;
// Without a contract a method is bad if fewer first tokens than this agree: the threshold of the alert
// SpliceFidelityLow.
inline constexpr double kAgreementFloor = 0.9;
// `samkv` leaves text out for good. It pays with many documents, of which it keeps at most half.
inline constexpr int kManyDocuments = 8;
inline constexpr double kKeptShareMax = 0.5;

// `candidates`: in the order of preference, the model's method last; empty: there is nothing to copy.
MethodChoice ChooseMethod(const std::vector<Candidate>& candidates, const MethodTerms& terms,
                          const chunk::Digest& namespace_key);
// The named method, or exact where its record does not prove the contract.
MethodChoice HoldToContract(const Candidate& named, const MethodTerms& terms, const chunk::Digest& namespace_key);

}  // namespace spl::engine
