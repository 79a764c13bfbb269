// A method that `splice eval` compares: a prefill method with its options, the provenance of reused KV, a decode
// method.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "services/methods/methods.h"

namespace spl::cli {

// Context in which the KV of the reusable segments is computed (docs/segments.md).
enum class Provenance {
  kContext,   // an earlier prompt with the same segments in the same order, behind other instructions
  kIsolated,  // none: each segment by itself
  // Other text of the same length, behind the same instructions: what a cutter into chunks of one size leaves in a
  // cache when the chunks are asked for in other combinations.
  kForeign,
};

struct EvalMethod {
  std::string label;  // as the user wrote it
  std::string reuse;
  nlohmann::json options = nlohmann::json::object();  // members of the API's "splice" object
  std::string decode_label;
  std::string decode;
  // decode_budget as a share of the sample's nominal length, in whole 16 tokens; 0: decode_budget is not set by it.
  double decode_context_share = 0;
  // a-shape, tri-shape: the largest share of the sample's nominal length that band_sinks and band_window have together.
  // They are the published ones where these are no more, or else of the same proportions. 0: they are not set by it.
  double band_context_share = 0;
  Provenance provenance = Provenance::kContext;

  // True if the method reuses segments; the others compute everything behind the exact prefix.
  bool reuses_segments() const { return methods::ReusesSegments(reuse); }
};

// Parses a method. `reuse` and `decode` are "NAME[:OPTION=NUMBER]…", for example
// "sparsex:dense_layers=2:recompute_share=0.1" and "sparcas:budget=1024" (which sets decode_budget);
// "sparcas:context_share=0.0625" sets decode_context_share, "a-shape:context_share=0.5" band_context_share.
// InvalidArgument names the mistake.
absl::StatusOr<EvalMethod> ParseEvalMethod(const std::string& reuse, const std::string& decode,
                                           const std::string& provenance);
// "context", "isolated" or "foreign".
const char* ProvenanceName(Provenance provenance);
// "in context", "in isolation" or "behind other text", of ProvenanceName's name.
const char* ProvenancePhrase(const std::string& name);
// The API's "splice" object of a method, for a sample of this nominal length.
nlohmann::json OptionsFor(const EvalMethod& method, int64_t length);

}  // namespace spl::cli
