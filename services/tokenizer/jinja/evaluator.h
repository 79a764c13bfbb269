// Renders a parsed template.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "services/tokenizer/jinja/ast.h"

namespace spl::tokenizer::jinja {

// Variables that the template sees; of two with one name the later counts.
using Variables = std::vector<std::pair<std::string, Value>>;

// InvalidArgument: the template's own message where it calls raise_exception; else "line N: …" for an operation that
// does not fit its values or that goes beyond the limits of limits.h. Reentrant.
absl::StatusOr<std::string> Render(const Block& block, Variables variables);

}  // namespace spl::tokenizer::jinja
