// What `splice eval` compares: a prefill method with its options, where the reused KV comes from, a decode method.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "services/methods/methods.h"

namespace spl::cli {

// Where the KV of the reusable segments was computed (docs/segments.md).
enum class Provenance {
  kContext,   // in an earlier prompt with the same segments in the same order, behind other instructions
  kIsolated,  // each segment by itself
};

struct EvalMethod {
  std::string label;  // as the user wrote it
  std::string reuse;
  nlohmann::json options = nlohmann::json::object();  // members of the API's "splice" object
  std::string decode_label;
  std::string decode;
  // Above 0: decode_budget is this share of the sample's nominal length, in whole 16 tokens.
  double decode_context_share = 0;
  Provenance provenance = Provenance::kContext;

  // The others compute everything behind the exact prefix.
  bool reuses_segments() const { return methods::ReusesSegments(reuse); }
};

// Both "NAME[:OPTION=NUMBER]…", such as "sparsex:dense_layers=2:recompute_share=0.1" and "sparcas:budget=1024" (which
// sets decode_budget); "sparcas:context_share=0.0625" sets decode_context_share. InvalidArgument names what is wrong.
absl::StatusOr<EvalMethod> ParseEvalMethod(const std::string& reuse, const std::string& decode,
                                           const std::string& provenance);
const char* ProvenanceName(Provenance provenance);
// Of the API's "splice" object, for a sample of this nominal length.
nlohmann::json OptionsFor(const EvalMethod& method, int64_t length);

}  // namespace spl::cli
