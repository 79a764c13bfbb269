// Whether bounded strings can be counted where several schemas of an anyOf could read the same text.
//
// The bounds are left out of the grammar and counted beside it (string_runs.h). Where a string is beyond the bound of
// one schema, only others read on, while the grammar without bounds still follows all of them. Its masks then have
// tokens too many. Those in a string are told by their lengths alone, which is right as long as no schema that could
// read there asks for certain characters. All others are few, and are tried one by one.
#pragma once

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace spl::grammar {

// Follows schemas to the places of a text that several of them may read. One thread at a time; borrows the root.
class StringOverlaps {
 public:
  using Json = nlohmann::ordered_json;

  // `root`: the schema that $refs refer to, which json_schema_check.h took. `strict`: objects and lists are closed
  // where they do not say.
  StringOverlaps(const Json& root, bool strict) : root_(root), strict_(strict) {}

  // True: where two of `alternatives` may read a string at one place, both read any characters, or both certain ones,
  // or both those of one pattern or format; or one reads certain strings and the other one any of any length. False
  // also where there are too many schemas to tell. Cost: some us a step, 20,000 steps in all calls together.
  bool CanCount(const Json& alternatives);

 private:
  using Leaves = std::vector<const Json*>;  // schemas without $ref, anyOf, oneOf and allOf

  bool CanMeet(const Json& a, const Json& b);
  bool BothCanMeet(const Json* a, const Json* b) { return a == nullptr || b == nullptr || CanMeet(*a, *b); }
  bool LeavesCanMeet(const Json& a, const Json& b);
  bool ObjectsCanMeet(const Json& a, const Json& b);
  bool ListsCanMeet(const Json& a, const Json& b);
  bool AddLeaves(const Json& schema, int depth, Leaves* out);
  // The schema of what `word`, additionalProperties or items, is about; null: there is none of it.
  const Json* Others(const Json& leaf, const char* word) const;
  const Json* Property(const Json& leaf, const std::string& name) const;
  Leaves ItemsOf(const Json& leaf) const;

  const Json& root_;
  const bool strict_;
  int num_steps_ = 0;
  std::set<std::pair<const Json*, const Json*>> seen_;  // pairs that can meet, or are being looked at
};

}  // namespace spl::grammar
