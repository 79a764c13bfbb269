// JSON texts as values.
#include <nlohmann/json.hpp>

#include "services/base/status.h"
#include "services/tokenizer/jinja/value.h"

namespace spl::tokenizer::jinja {
namespace {

// Builds the value from parser events: the parser's own tree would look for each name among all names of its object.
class ValueBuilder {
 public:
  using Json = nlohmann::json;

  explicit ValueBuilder(const std::string& name) : name_(name) {}

  bool null() { return Add(Value::None()); }
  bool boolean(bool value) { return Add(Value::Bool(value)); }
  bool number_integer(int64_t value) { return Add(Value::Int(value)); }
  bool number_unsigned(uint64_t value) {
    if (value <= static_cast<uint64_t>(INT64_MAX)) return Add(Value::Int(static_cast<int64_t>(value)));
    return Fail(InvalidArgument("{} holds the number {}, which is too large", name_, value));
  }
  bool number_float(double value, const std::string&) { return Add(Value::Float(value)); }
  bool string(std::string& value) { return Add(Value::String(std::move(value))); }
  bool binary(Json::binary_t&) { return false; }
  bool start_object(size_t) { return Open(true); }
  bool start_array(size_t) { return Open(false); }
  bool key(std::string& name) {
    stack_.back().key = std::move(name);
    return true;
  }
  bool end_object() { return Close(); }
  bool end_array() { return Close(); }
  bool parse_error(size_t, const std::string&, const Json::exception& error) {
    return Fail(InvalidArgument("{} is not JSON: {}", name_, error.what()));
  }

  absl::StatusOr<Value> Take() {
    if (!status_.ok()) return status_;
    return std::move(root_);
  }

 private:
  struct Container {
    bool is_dict = false;
    Dict dict;
    List list;
    std::string key;
  };

  bool Fail(absl::Status status) {
    status_ = std::move(status);
    return false;
  }
  bool Add(Value value) {
    if (stack_.empty()) {
      root_ = std::move(value);
    } else if (stack_.back().is_dict) {
      stack_.back().dict.Set(stack_.back().key, std::move(value));
    } else {
      stack_.back().list.push_back(std::move(value));
    }
    return true;
  }
  bool Open(bool is_dict) {
    if (stack_.size() >= kValueDepthMax)
      return Fail(InvalidArgument("{} is nested more than {} deep", name_, kValueDepthMax));
    stack_.emplace_back().is_dict = is_dict;
    return true;
  }
  bool Close() {
    Container done = std::move(stack_.back());
    stack_.pop_back();
    absl::StatusOr<Value> value =
        done.is_dict ? Value::MakeDict(std::move(done.dict)) : Value::MakeList(std::move(done.list));
    return value.ok() ? Add(*std::move(value)) : Fail(value.status());
  }

  const std::string& name_;
  std::vector<Container> stack_;
  Value root_;
  absl::Status status_;
};

}  // namespace

absl::StatusOr<Value> FromJsonText(std::string_view text, const std::string& name) {
  ValueBuilder builder(name);
  nlohmann::json::sax_parse(text.begin(), text.end(), &builder);
  return builder.Take();
}

}  // namespace spl::tokenizer::jinja
