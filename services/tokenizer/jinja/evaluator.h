// Renders a parsed template.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "services/tokenizer/jinja/ast.h"

namespace spl::tokenizer::jinja {

// Variables of the template; the later of two with the same name counts.
using Variables = std::vector<std::pair<std::string, Value>>;

// InvalidArgument: the template's own message if it calls raise_exception; "line N: …" if an operation does not fit its
// values or exceeds the limits of limits.h. Any thread.
absl::StatusOr<std::string> Render(const Block& block, Variables variables);

}  // namespace spl::tokenizer::jinja
