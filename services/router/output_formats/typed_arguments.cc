#include "services/router/output_formats/typed_arguments.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "services/router/output_formats/tagged_calls.h"

namespace spl::router {
namespace {

using Json = nlohmann::json;

bool IsStringType(const GrammarPart& schema) {
  if (!schema.is_object()) return false;
  const auto type = schema.find("type");
  if (type == schema.end()) return false;
  return *type == "string" ||
         (type->is_array() && std::find(type->begin(), type->end(), GrammarPart("string")) != type->end());
}

// The member of an object; null: it is none, or has none.
GrammarPart Member(const GrammarPart& object, const char* name) {
  return object.is_object() ? object.value(name, GrammarPart()) : GrammarPart();
}

// The values that a schema names; none: it names none.
std::vector<GrammarPart> RawValues(const GrammarPart& schema) {
  if (schema.contains("const")) return {schema["const"]};
  const GrammarPart values = Member(schema, "enum");
  return {values.begin(), values.end()};
}

std::string TextJson(std::string_view text) { return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace); }

}  // namespace

bool IsRawText(const GrammarPart& schema) {
  if (!IsStringType(schema)) return false;
  for (const char* word :
       {"$ref", "allOf", "anyOf", "format", "if", "maxLength", "minLength", "not", "oneOf", "pattern"}) {
    if (schema.contains(word)) return false;
  }
  const std::vector<GrammarPart> values = RawValues(schema);
  return std::all_of(values.begin(), values.end(), [](const GrammarPart& value) {
    return value.is_string() && value.get<std::string>().find('<') == std::string::npos;
  });
}

GrammarPart TypedValuePart(const GrammarPart& schema, std::string_view end) {
  if (!IsRawText(schema)) return JsonPart(schema);
  const std::vector<GrammarPart> values = RawValues(schema);
  if (values.empty()) return TextWithoutPart({end, kCallEnd});
  std::vector<GrammarPart> parts;
  parts.reserve(values.size());
  for (const GrammarPart& value : values) parts.push_back(LiteralPart(value.get<std::string>()));
  return AnyOfPart(std::move(parts));
}

TypedArguments::TypedArguments(const CallableTools& callable) {
  const auto tools = GrammarPart::parse(callable.json, nullptr, /*allow_exceptions=*/false);
  if (!tools.is_array()) return;
  for (const GrammarPart& tool : tools) {
    const GrammarPart function = Member(tool, "function");
    const GrammarPart name = Member(function, "name");
    const GrammarPart properties = Member(Member(function, "parameters"), "properties");
    if (!name.is_string() || !properties.is_object()) continue;
    for (const auto& item : properties.items()) {
      if (callable.forced ? IsRawText(item.value()) : IsStringType(item.value()))
        strings_[name.get<std::string>()].insert(item.key());
    }
  }
}

bool TypedArguments::IsString(std::string_view function, std::string_view parameter) const {
  const auto found = strings_.find(function);
  return found != strings_.end() && found->second.find(parameter) != found->second.end();
}

bool ArgumentList::Take(std::string_view parameter, std::string_view* text, std::string_view end,
                        std::string_view* value) const {
  const bool is_text = types_.IsString(function_, parameter);
  for (size_t at = text->find(end); at != std::string_view::npos && !is_text; at = text->find(end, at + 1)) {
    *value = text->substr(0, at);
    if (!Json::accept(value->begin(), value->end())) continue;
    text->remove_prefix(at + end.size());
    return true;
  }
  return TakeUntil(text, end, value);
}

void ArgumentList::Set(std::string_view parameter, std::string_view value) {
  std::string json = TextJson(value);
  if (!types_.IsString(function_, parameter)) {
    if (value == "True") json = "true";
    if (value == "False") json = "false";
    if (value == "None") json = "null";
    if (Json::accept(value.begin(), value.end())) json = value;
  }
  std::string name = TextJson(parameter);
  std::erase_if(members_, [&](const auto& member) { return member.first == name; });
  members_.emplace_back(std::move(name), std::move(json));
}

ToolCallDelta ArgumentList::ToCall() const {
  ToolCallDelta call;
  call.name = function_;
  for (const auto& [name, value] : members_)
    call.arguments += (call.arguments.empty() ? "{" : ", ") + name + ": " + value;
  call.arguments += call.arguments.empty() ? "{}" : "}";
  return call;
}

bool SkipTag(std::string_view* text, std::string_view tag) {
  text->remove_prefix(std::min(text->find_first_not_of(kWhiteSpace), text->size()));
  if (text->substr(0, tag.size()) != tag) return false;
  text->remove_prefix(tag.size());
  return true;
}

bool TakeUntil(std::string_view* text, std::string_view end, std::string_view* out) {
  const size_t at = text->find(end);
  if (at == std::string_view::npos) return false;
  *out = text->substr(0, at);
  text->remove_prefix(at + end.size());
  return true;
}

}  // namespace spl::router
