// Reads the members of a JSON object by name and type. services/base/json_field.h has the wording of errors.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "services/base/json_field.h"

namespace spl {

// Reads the members of one object and remembers the first error, so that a caller reads all members and checks once.
// Each reader marks its name as known. Borrows the object. One thread.
template <typename Json>
class JsonObjectReader {
 public:
  // `prefix` stands before names in messages: "", "FILE: ", "messages[2]." or "FILE: rope_scaling.".
  JsonObjectReader(const Json& object, std::string prefix);
  JsonObjectReader(Json&&, std::string) = delete;  // would borrow a temporary

  // An absent member leaves `out` as it is.
  void Bool(const char* name, bool* out);
  void Bool(const char* name, std::optional<bool>* out);
  void String(const char* name, std::string* out);
  void Uint(const char* name, uint64_t max, std::optional<uint64_t>* out);
  void Uint64(const char* name, uint64_t* out);
  void Uint32(const char* name, uint32_t* out);
  void Uint32(const char* name, std::optional<uint32_t>* out);
  void Float(const char* name, float* out);
  void Number(const char* name, std::optional<double>* out);  // in [-1e30, 1e30]
  // Any 64-bit integer; negative ones wrap (OpenAI's seed is signed).
  void Seed(const char* name, std::optional<uint64_t>* out);
  void TokenIds(const char* name, std::vector<uint32_t>* out);
  // One string or a list of strings.
  void StringOrList(const char* name, std::vector<std::string>* out);

  // The value, or `fallback` if the member is absent.
  bool BoolOr(const char* name, bool fallback);
  std::string StringOr(const char* name, std::string fallback);
  double PositiveOr(const char* name, double fallback);
  // REQUIRES: low and high are in int32. `low` after an error.
  int32_t IntOr(const char* name, int64_t low, int64_t high, int32_t fallback);
  int32_t RequireInt(const char* name, int64_t low, int64_t high);

  const Json* Raw(const char* name);     // null: absent
  const Json* List(const char* name);    // null: absent, or not a list, which is an error
  const Json* Object(const char* name);  // the same

  // Marks members as known; they have no effect, whatever their value.
  void Ignore(std::initializer_list<const char*> names);
  // Refuses members that clients know but this server does not support, unless null, false, or an empty list or object.
  void Refuse(std::initializer_list<const char*> names);
  // Refuses such members unless null: an empty value asks for something, too.
  void RefuseAny(std::initializer_list<const char*> names);

  bool Has(const char* name) const;  // present and not null
  void Fail(absl::Status status);    // kept if it is the first
  void Fail(const char* name, std::string_view message);
  const std::string& path() const { return prefix_; }
  const absl::Status& status() const { return status_; }
  // The first error, or one that names the first unknown member, with the error code unknown_field.
  absl::Status Finish() const;
  // Returns the first error. Unknown members are no error: null ones have no effect, and the paths of others are
  // appended to `ignored`, which may be null.
  absl::Status FinishIgnoring(std::vector<std::string>* ignored) const;

 private:
  std::optional<BasicJsonField<Json>> Field(const char* name);
  template <typename T, typename Out>
  void Keep(absl::StatusOr<T> value, Out* out);

  const Json& object_;
  std::string prefix_;
  std::set<std::string, std::less<>> known_;
  absl::Status status_;
};

}  // namespace spl
