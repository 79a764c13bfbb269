#include "services/router/output_formats/typed_arguments.h"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace spl::router {
namespace {

using Json = nlohmann::json;

bool IsStringType(const Json& schema) {
  if (!schema.is_object()) return false;
  const auto type = schema.find("type");
  if (type == schema.end()) return false;
  return *type == "string" ||
         (type->is_array() && std::find(type->begin(), type->end(), Json("string")) != type->end());
}

// The member of an object; null: it is none, or has none.
Json Member(const Json& object, const char* name) { return object.is_object() ? object.value(name, Json()) : Json(); }

std::string TextJson(std::string_view text) { return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace); }

}  // namespace

TypedArguments::TypedArguments(const std::string& tools_json) {
  const Json tools = Json::parse(tools_json, nullptr, /*allow_exceptions=*/false);
  if (!tools.is_array()) return;
  for (const Json& tool : tools) {
    const Json function = Member(tool, "function");
    const Json name = Member(function, "name");
    const Json properties = Member(Member(function, "parameters"), "properties");
    if (!name.is_string() || !properties.is_object()) continue;
    for (const auto& item : properties.items()) {
      if (IsStringType(item.value())) strings_[name.get<std::string>()].insert(item.key());
    }
  }
}

bool TypedArguments::IsString(std::string_view function, std::string_view parameter) const {
  const auto found = strings_.find(function);
  return found != strings_.end() && found->second.find(parameter) != found->second.end();
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
