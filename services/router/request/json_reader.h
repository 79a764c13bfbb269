// Reads untrusted JSON: a bounded parser, and typed field readers that name the field in every error.
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

// Keeps the order of members: a chat template prints the tools of a request in the client's order.
using Json = nlohmann::ordered_json;

inline constexpr int kMaxJsonDepth = 32;

// Parses one JSON value. InvalidArgument: not JSON (with the byte offset), nested deeper than kMaxJsonDepth, a number
// that no double can hold, or an object that has a name twice (two readers could take different ones). Never throws.
// Cost: linear in the text, whatever its shape.
absl::StatusOr<Json> ParseJson(std::string_view text);

// Reads the members of one object. Each reader marks its name as known, takes an absent or null member as "not given",
// and remembers the first error. Finish returns that error, or an error that names the first unknown member. Borrows
// the object. One thread.
class ObjectReader {
 public:
  // `path` prefixes field names in messages: "" at the top, "messages[2]." inside.
  ObjectReader(const Json& object, std::string path);
  ObjectReader(Json&&, std::string) = delete;  // would borrow a temporary: another type of JSON is converted to one

  void Bool(const char* name, bool* out);
  void Bool(const char* name, std::optional<bool>* out);
  void String(const char* name, std::string* out);
  // An integer in [0, max]. 3.0 is accepted; a number with a fraction is refused.
  void Uint(const char* name, uint64_t max, std::optional<uint64_t>* out);
  void Uint32(const char* name, uint32_t* out);
  void Uint32(const char* name, std::optional<uint32_t>* out);
  void Float(const char* name, float* out);
  void Number(const char* name, std::optional<double>* out);
  // Any 64-bit integer; negative ones wrap (OpenAI's seed is signed).
  void Seed(const char* name, std::optional<uint64_t>* out);
  // A list of token ids: integers in [0, 2^31).
  void TokenIds(const char* name, std::vector<uint32_t>* out);
  // One string or a list of strings.
  void StringOrList(const char* name, std::vector<std::string>* out);
  // The raw member; null if it is absent or null.
  const Json* Raw(const char* name);
  // Marks members as known; they have no effect, whatever their value.
  void Ignore(std::initializer_list<const char*> names);
  // Refuses members that clients know but this server does not support, unless null, false, or an empty list or object.
  void Refuse(std::initializer_list<const char*> names);
  // Refuses such members unless null: an empty value asks for something, too.
  void RefuseAny(std::initializer_list<const char*> names);

  bool Has(const char* name) const;  // present and not null
  void Fail(absl::Status status);    // kept if it is the first
  const std::string& path() const { return path_; }
  absl::Status Finish() const;
  // Returns the first error. Unknown members are no error: null ones have no effect, and the paths of others are
  // appended to `ignored`, which may be null.
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
