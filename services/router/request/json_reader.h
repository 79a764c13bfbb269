// Reading untrusted JSON: a bounded parser and typed field readers that name the field in every complaint.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace spl::router {

// Keeps the order of members: a chat template prints the tools of a request as the client wrote them.
using Json = nlohmann::ordered_json;

inline constexpr int kMaxJsonDepth = 32;

// Parses one JSON value. InvalidArgument: not JSON (with the byte offset), nested deeper than kMaxJsonDepth, a number
// that no double holds, or an object with the same name twice (two readers could take different ones). Never throws.
// Cost: linear in the text, whatever its shape.
absl::StatusOr<Json> ParseJson(std::string_view text);

// Reads the members of one object. Each reader takes a member that is absent or null as "not given", marks the name as
// known, and remembers the first complaint; Finish returns it, or names the first member that nobody asked for.
// Borrows the object. One thread.
class ObjectReader {
 public:
  // `path` prefixes field names in messages: "" at the top, "messages[2]." inside.
  ObjectReader(const Json& object, std::string path);
  ObjectReader(Json&&, std::string) = delete;  // it would be gone: another type of JSON is converted to a temporary

  void Bool(const char* name, bool* out);
  void Bool(const char* name, std::optional<bool>* out);
  void String(const char* name, std::string* out);
  // An integer in [0, max]. A number with a fraction is refused, 3.0 is not.
  void Uint(const char* name, uint64_t max, std::optional<uint64_t>* out);
  void Uint32(const char* name, uint32_t* out);
  void Uint32(const char* name, std::optional<uint32_t>* out);
  void Float(const char* name, float* out);
  void Number(const char* name, std::optional<double>* out);
  // Any integer of 64 bits, negative ones wrapped (OpenAI's seed is signed).
  void Seed(const char* name, std::optional<uint64_t>* out);
  // A list of token ids: integers in [0, 2^31).
  void TokenIds(const char* name, std::vector<uint32_t>* out);
  // One string or a list of strings.
  void StringOrList(const char* name, std::vector<std::string>* out);
  // The raw member; null when absent or null.
  const Json* Raw(const char* name);
  // Accepted and without effect on the answer, whatever its value.
  void Ignore(std::initializer_list<const char*> names);
  // Known to clients but not served: refused unless null, false, or an empty list or object.
  void Refuse(std::initializer_list<const char*> names);
  // Known to clients but not served, and an empty value asks for something, too: refused unless null.
  void RefuseAny(std::initializer_list<const char*> names);

  bool Has(const char* name) const;  // present and not null
  void Fail(absl::Status status);    // kept when it is the first
  const std::string& path() const { return path_; }
  absl::Status Finish() const;
  // Returns the first complaint. Members that nobody asked for are none: null ones have no effect, the paths of others
  // are appended to `ignored`, which may be null.
  absl::Status FinishIgnoring(std::vector<std::string>* ignored) const;

 private:
  void FailType(const char* name, const char* expected, const Json& got);

  const Json& object_;
  std::string path_;
  std::set<std::string, std::less<>> known_;
  absl::Status status_;
};

// "an object", "a string", …: for messages.
const char* TypeName(const Json& value);

// Reads a token id list; `field` names it in messages.
absl::StatusOr<std::vector<uint32_t>> ReadTokenIds(const Json& value, const std::string& field);

}  // namespace spl::router
