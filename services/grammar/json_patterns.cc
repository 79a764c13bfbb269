#include "services/grammar/json_patterns.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

namespace spl::grammar {
namespace {

using Json = nlohmann::ordered_json;

// Words with values that are no schemas.
constexpr std::array<std::string_view, 4> kValues = {"enum", "const", "default", "examples"};

template <class Call>
void ForEachPattern(Json& part, const Call& call) {
  if (part.is_array()) {
    for (Json& inner : part) ForEachPattern(inner, call);
  }
  if (!part.is_object()) return;
  for (auto& [name, inner] : part.items()) {
    if (name == "pattern" && inner.is_string()) call(inner.template get_ref<std::string&>());
    if (std::find(kValues.begin(), kValues.end(), name) == kValues.end()) ForEachPattern(inner, call);
  }
}

Json Parsed(const GrammarSpec& spec) {
  const bool has_schemas = spec.kind == GrammarKind::kJsonSchema || spec.kind == GrammarKind::kStructuralTag;
  return has_schemas ? Json::parse(spec.text, nullptr, false) : Json();
}

// Characters of three bytes at most become \uXXXX.
std::string Ascii(const std::string& pattern) {
  std::string out;
  for (size_t at = 0; at < pattern.size();) {
    const auto first = static_cast<unsigned char>(pattern[at]);
    const size_t length = first < 0xC0 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
    if (length == 1 || length == 4 || at + length > pattern.size()) {
      out += pattern.substr(at, length);
    } else {
      uint32_t code = first & (length == 2 ? 0x1Fu : 0x0Fu);
      for (size_t i = 1; i < length; ++i) code = code << 6 | (static_cast<unsigned char>(pattern[at + i]) & 0x3Fu);
      out += fmt::format("\\u{:04x}", code);
    }
    at += length;
  }
  return out;
}

}  // namespace

GrammarSpec WithAsciiPatterns(const GrammarSpec& spec) {
  Json json = Parsed(spec);
  bool changed = false;
  ForEachPattern(json, [&](std::string& pattern) {
    std::string ascii = Ascii(pattern);
    changed = changed || ascii != pattern;
    pattern = std::move(ascii);
  });
  if (!changed) return spec;
  GrammarSpec out = spec;
  out.text = json.dump(-1, ' ', false, Json::error_handler_t::replace);
  return out;
}

std::vector<std::string> PatternsIn(const GrammarSpec& spec) {
  Json json = Parsed(spec);
  std::vector<std::string> patterns;
  ForEachPattern(json, [&](std::string& pattern) { patterns.push_back(pattern); });
  return patterns;
}

}  // namespace spl::grammar
