// Answers that must be calls of tools, as grammars: for a tool_choice that is "required" or names a tool.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "services/router/output_formats/call_grammar.h"

namespace spl::router {

struct ForcedCalls {
  std::string name;  // the tool to be called; empty: any
  bool one = false;  // exactly one call; else at least one
};

// The structural tag (GrammarKind::kStructuralTag) of calls as the format `tools` of OutputFormat writes them, with
// arguments that keep to the parameters of `tools_json`, the request's "tools". InvalidArgument: there is no tool of
// that name; its name is no identifier; errors of MakeCallGrammar. Unimplemented: the model has no format of calls.
absl::StatusOr<std::string> ForcedCallsTag(const std::string& format, const std::string& tools_json,
                                           const ForcedCalls& calls, const SpecialTokenId& special);

}  // namespace spl::router
