// Arguments that a model writes one by one, as text whose type the tool's schema tells: what several formats have in
// common.
#pragma once

#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "services/router/output_formats/output_parser.h"

namespace spl::router {

// Which parameters of which function are strings. Whatever is no schema of an object has none.
class TypedArguments {
 public:
  // `tools_json`: the request's "tools".
  explicit TypedArguments(const std::string& tools_json);
  bool IsString(std::string_view function, std::string_view parameter) const;

 private:
  std::map<std::string, std::set<std::string, std::less<>>, std::less<>> strings_;  // parameters by function
};

// The arguments of one call. Borrows both.
class ArgumentList {
 public:
  ArgumentList(const TypedArguments& types, std::string_view function) : types_(types), function_(function) {}
  // A value is text if the schema says string. Otherwise it is JSON, or True, False and None as in Python, and text if
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
