// A form of an answer as a part of a structural tag, so that something may stand in front of it.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "absl/status/statusor.h"
#include "services/grammar/token_grammar.h"

namespace spl::grammar {

// The part of a structural tag (GrammarKind::kStructuralTag) that the same texts fit as the whole of `spec`.
// InvalidArgument: CheckGrammarSpec refuses the spec. REQUIRES: it is no structural tag itself.
absl::StatusOr<nlohmann::ordered_json> TagPartOf(const GrammarSpec& spec);

}  // namespace spl::grammar
