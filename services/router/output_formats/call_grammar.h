// Forced calls as grammars: the pieces from which each format puts together how it writes them.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace spl::router {

// A part of a structural tag (GrammarKind::kStructuralTag), as xgrammar reads it.
using GrammarPart = nlohmann::ordered_json;

// The id of a special token by its text. Nothing: the text is none, and is spelt with other tokens. Null: there are
// none.
using SpecialTokenId = std::function<std::optional<int32_t>(std::string_view text)>;

struct ForcedTool {
  std::string name;        // letters, digits, _, - and .
  GrammarPart parameters;  // a JSON schema
};

// Tools one of which must be called, at least one of them there.
struct ForcedTools {
  std::vector<ForcedTool> tools;
  bool one = false;  // exactly one call; else at least one
  SpecialTokenId special;
};

// How a format writes the calls: each answer that fits is read as such calls by the format's parser, made for an answer
// that is forced (CallableTools). InvalidArgument: the format has no place for a name or a schema; says which.
using MakeCallGrammar = absl::StatusOr<GrammarPart> (*)(const ForcedTools& tools);

// The text itself.
GrammarPart LiteralPart(std::string_view text);
// A tag of the format: its token where it is a special one, else its text.
GrammarPart TagPart(const ForcedTools& tools, std::string_view tag);
GrammarPart SequencePart(std::vector<GrammarPart> parts);
GrammarPart AnyOfPart(std::vector<GrammarPart> parts);
GrammarPart OptionalPart(GrammarPart part);
// `part` once, or, unless `one`, any number of times.
GrammarPart RepeatedPart(GrammarPart part, bool one);
// JSON that is valid by `schema`, with little white space.
GrammarPart JsonPart(GrammarPart schema);
// Any text in which none of `tags` stands. REQUIRES: each begins with <, the only one in it, and ends with another
// letter than all others before it.
GrammarPart TextWithoutPart(const std::vector<std::string_view>& tags);

// A call of its own: what stands around its arguments.
struct CallFrame {
  GrammarPart begin, content, end;
};
// The calls with `separator` between them; only one of them with `one`. `begin` and `end` are a LiteralPart or a
// TagPart.
GrammarPart SeparatedPart(std::vector<CallFrame> calls, std::string_view separator, bool one);

// An argument of a tool, for formats that write arguments one by one.
struct ForcedArgument {
  std::string name;
  GrammarPart schema;  // complete: with the definitions that it refers to
  bool required = false;
};

// The properties of the tool's parameters, in their order. Further properties, which the schema may allow, are left
// out. InvalidArgument: something is asked of the arguments as a whole that cannot be kept to one by one; or a name has
// letters that `is_name` refuses.
absl::StatusOr<std::vector<ForcedArgument>> ForcedArguments(const ForcedTool& tool, bool (*is_name)(std::string_view));

}  // namespace spl::router
