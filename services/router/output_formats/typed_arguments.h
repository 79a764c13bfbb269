// Arguments that a model writes one by one, as text whose type the tool's schema tells: what several formats have in
// common.
#pragma once

#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "services/router/output_formats/call_grammar.h"
#include "services/router/output_formats/output_parser.h"

namespace spl::router {

// Whether a forced call writes the values of this schema as they are, without quotes: texts that nothing is asked of,
// or that are some of a list without <.
bool IsRawText(const GrammarPart& schema);

// The values of this schema, in front of `end`: texts where IsRawText says so, without `end` and kCallEnd, else JSON.
GrammarPart TypedValuePart(const GrammarPart& schema, std::string_view end);

// Which parameters of which function are texts: where the schema says string, and in a forced call where IsRawText
// does. Whatever is no schema of an object has none.
class TypedArguments {
 public:
  explicit TypedArguments(const CallableTools& tools);
  bool IsString(std::string_view function, std::string_view parameter) const;

 private:
  std::map<std::string, std::set<std::string, std::less<>>, std::less<>> strings_;  // parameters by function
};

// The arguments of one call. Borrows both.
class ArgumentList {
 public:
  ArgumentList(const TypedArguments& types, std::string_view function) : types_(types), function_(function) {}
  // Takes a value that ends in front of `end`, and the end. `end` may stand in a text of a JSON value. False: there is
  // no end.
  bool Take(std::string_view parameter, std::string_view* text, std::string_view end, std::string_view* value) const;
  // A value is text if TypedArguments says so. Otherwise it is JSON, or True, False and None as in Python, and text if
  // it is none of these. The last value of a parameter counts.
  void Set(std::string_view parameter, std::string_view value);
  // The call, without an id and with the index 0.
  ToolCallDelta ToCall() const;

 private:
  const TypedArguments& types_;
  const std::string_view function_;
  std::vector<std::pair<std::string, std::string>> members_;  // names and values, both as JSON
};

// Takes `tag` from the beginning of `text`, with the white space in front of it. False: it is not there.
bool SkipTag(std::string_view* text, std::string_view tag);
// Takes the text in front of `end`, and the end. False: there is no end.
bool TakeUntil(std::string_view* text, std::string_view end, std::string_view* out);

}  // namespace spl::router
