#include "services/base/json_parser.h"

#include <unordered_set>
#include <utility>
#include <vector>

#include "services/base/field_error.h"
#include "services/base/json_field.h"
#include "services/base/status.h"

namespace spl {
namespace {

using Json = nlohmann::ordered_json;

// Builds the value from parser events, so that depth and duplicate names are seen while reading and not after.
class DomBuilder {
 public:
  using number_integer_t = Json::number_integer_t;
  using number_unsigned_t = Json::number_unsigned_t;
  using number_float_t = Json::number_float_t;
  using string_t = Json::string_t;
  using binary_t = Json::binary_t;

  bool null() { return Add(Json(nullptr)); }
  bool boolean(bool value) { return Add(Json(value)); }
  bool number_integer(number_integer_t value) { return Add(Json(value)); }
  bool number_unsigned(number_unsigned_t value) { return Add(Json(value)); }
  bool number_float(number_float_t value, const string_t&) { return Add(Json(value)); }
  bool string(string_t& value) { return Add(Json(std::move(value))); }
  bool binary(binary_t&) { return false; }
  bool start_object(size_t) { return Open(Json::object()); }
  bool start_array(size_t) { return Open(Json::array()); }
  bool end_object() { return Close(); }
  bool end_array() { return Close(); }

  bool key(string_t& name) {
    if (!names_.back().insert(name).second) {
      status_ = FieldError(name, "stands twice in one object");
      return false;
    }
    key_ = std::move(name);
    return true;
  }

  bool parse_error(size_t position, const std::string&, const Json::exception& error) {
    const bool overflow = error.id == 406;  // out_of_range.406: a number that no double holds
    status_ = overflow ? InvalidArgument("the body holds a number out of range near byte {}", position)
                       : InvalidArgument("the body is not valid JSON near byte {}", position);
    return false;
  }

  absl::StatusOr<Json> Take(bool complete) {
    if (!status_.ok()) return status_;
    if (!complete) return InvalidArgument("the body is not valid JSON");
    return std::move(root_);
  }

 private:
  Json* Place(Json value) {
    if (stack_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    Json& parent = *stack_.back();
    if (parent.is_array()) {
      parent.push_back(std::move(value));
      return &parent.back();
    }
    // Its own insertion looks at all members that it has; that the name is new is known already.
    Json::object_t::Container& members = parent.get_ref<Json::object_t&>();
    return &members.emplace_back(key_, std::move(value)).second;
  }
  bool Add(Json value) {
    Place(std::move(value));
    return true;
  }
  bool Open(Json value) {
    if (stack_.size() >= static_cast<size_t>(kMaxJsonDepth)) {
      status_ = InvalidArgument("the body is nested deeper than {} levels", kMaxJsonDepth);
      return false;
    }
    // Elements of a growing container move, but only the innermost one grows while it is on the stack's top.
    stack_.push_back(Place(std::move(value)));
    names_.emplace_back();
    return true;
  }
  bool Close() {
    stack_.pop_back();
    names_.pop_back();
    return true;
  }

  Json root_;
  std::vector<Json*> stack_;
  std::vector<std::unordered_set<std::string>> names_;  // [stack_]: of the members so far
  std::string key_;
  absl::Status status_;
};

}  // namespace

absl::StatusOr<nlohmann::ordered_json> ParseJson(std::string_view text) {
  DomBuilder builder;
  const bool complete = Json::sax_parse(text.begin(), text.end(), &builder);
  return builder.Take(complete);
}

absl::StatusOr<nlohmann::json> ParseJsonObject(std::string_view text, const std::string& source) {
  try {
    nlohmann::json root = nlohmann::json::parse(text);
    if (!root.is_object()) return JsonField{&root, source}.Wrong("an object");
    return root;
  } catch (const nlohmann::json::exception& error) {
    return InvalidArgument("{}: is not JSON: {}", source, error.what());
  }
}

}  // namespace spl
