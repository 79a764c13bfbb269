// The formats by name, and the choice among them.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "services/router/output_formats/call_grammar.h"
#include "services/router/output_formats/output_parser.h"

namespace spl::router {

// How a model writes what is not content. Names of this registry; "none": all of it is content.
struct OutputFormat {
  std::string tools = "none";      // "hermes", "mistral", …
  std::string reasoning = "none";  // "think", "harmony"
};

// "auto" becomes what the chat template asks for. InvalidArgument names the flag: there is no such format, or harmony
// stands beside another one.
absl::StatusOr<OutputFormat> ChooseOutputFormat(const OutputFormat& asked, std::string_view chat_template);

// True if a prompt with this end, white space left aside, makes the model begin with reasoning.
bool EndsInReasoning(const OutputFormat& format, std::string_view prompt);

// True if reasoning, or calls where they may be made, may be written with special tokens, which must then be in the
// text.
bool NeedsSpecialTokens(const OutputFormat& format, bool may_call);

// The calls as the format `tools` of OutputFormat writes them. Unimplemented: it is "none"; else see MakeCallGrammar.
absl::StatusOr<GrammarPart> CallGrammarOf(const std::string& format, const ForcedTools& tools);

// `tools`: null if none may be called. `in_reasoning`: see EndsInReasoning. Returns null if all is content.
std::unique_ptr<OutputParser> MakeOutputParser(const OutputFormat& format, const CallableTools* tools,
                                               bool in_reasoning);

}  // namespace spl::router
