// Which JSON schemas are kept to. A word that the compiler would ignore makes a weaker constraint than was asked for:
// it is refused by name instead.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "absl/status/status.h"

namespace spl::grammar {

inline constexpr int kMaxSchemas = 4096;     // schemas inside of one, each target of a $ref once
inline constexpr int kMaxProperties = 1024;  // those of one object
inline constexpr int kMaxEnumValues = 4096;  // those of one enum

// `strict`: objects have no properties but those that they name, where they do not say. Walks `root` and whatever its
// $refs reach; $defs that nothing refers to are not looked at. InvalidArgument names the place, the word and the
// reason. Cost: linear in the schema.
absl::Status CheckJsonSchema(const nlohmann::json& root, bool strict);

}  // namespace spl::grammar
