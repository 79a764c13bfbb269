// Parses template source into a tree.
#pragma once

#include <string_view>

#include "absl/status/statusor.h"
#include "services/tokenizer/jinja/ast.h"

namespace spl::tokenizer::jinja {

// InvalidArgument names the line and the construct: wrong syntax, or a tag, filter, test, method or function outside
// the subset, even one that would never run.
absl::StatusOr<Block> ParseTemplate(std::string_view source);

}  // namespace spl::tokenizer::jinja
