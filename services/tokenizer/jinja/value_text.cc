// Values as text: str, repr and json.dumps.
#include <algorithm>
#include <cmath>

#include "services/base/status.h"
#include "services/tokenizer/jinja/limits.h"
#include "services/tokenizer/jinja/text.h"
#include "services/tokenizer/jinja/value.h"

namespace spl::tokenizer::jinja {

absl::StatusOr<std::string> ToText(const Value& value) {
  if (value.is_undefined()) return std::string();
  if (value.is_string()) return value.AsString();
  return ToRepr(value);
}

namespace {

absl::Status CheckSize(const std::string& out) {
  if (out.size() > kTextBytesMax) return InvalidArgument("the text of a value has more than {} bytes", kTextBytesMax);
  return absl::OkStatus();
}

absl::StatusOr<std::string> SequenceRepr(const Value& value) {
  const bool is_tuple = value.kind() == Value::Kind::kTuple;
  std::string out = is_tuple ? "(" : "[";
  for (const Value& item : value.AsList()) {
    if (out.size() > 1) out += ", ";
    SPLICE_ASSIGN_OR_RETURN(const std::string text, ToRepr(item));
    out += text;
    SPLICE_RETURN_IF_ERROR(CheckSize(out));
  }
  if (is_tuple && value.AsList().size() == 1) out += ",";
  return out + (is_tuple ? ")" : "]");
}

absl::StatusOr<std::string> DictRepr(const Value& value) {
  std::string out = "{";
  for (const auto& item : value.AsDict().items) {
    if (out.size() > 1) out += ", ";
    SPLICE_ASSIGN_OR_RETURN(const std::string text, ToRepr(item.second));
    out += QuotePython(item.first) + ": " + text;
    SPLICE_RETURN_IF_ERROR(CheckSize(out));
  }
  return out + "}";
}

}  // namespace

absl::StatusOr<std::string> ToRepr(const Value& value) {
  switch (value.kind()) {
    case Value::Kind::kUndefined:
      return std::string("Undefined");
    case Value::Kind::kNone:
      return std::string("None");
    case Value::Kind::kBool:
      return std::string(value.AsInt() != 0 ? "True" : "False");
    case Value::Kind::kInt:
      return std::to_string(value.AsInt());
    case Value::Kind::kFloat:
      return FloatText(value.AsNumber());
    case Value::Kind::kString:
      return QuotePython(value.AsString());
    case Value::Kind::kList:
    case Value::Kind::kTuple:
      return SequenceRepr(value);
    case Value::Kind::kDict:
      return DictRepr(value);
    default:
      return InvalidArgument("a {} cannot be printed", value.TypeName());
  }
}

namespace {

class JsonWriter {
 public:
  explicit JsonWriter(const JsonOptions& options) : options_(options) {}

  absl::Status Write(const Value& value, int level) {
    SPLICE_RETURN_IF_ERROR(CheckSize(out_));
    switch (value.kind()) {
      case Value::Kind::kNone:
        out_ += "null";
        return absl::OkStatus();
      case Value::Kind::kBool:
        out_ += value.AsInt() != 0 ? "true" : "false";
        return absl::OkStatus();
      case Value::Kind::kInt:
        out_ += std::to_string(value.AsInt());
        return absl::OkStatus();
      case Value::Kind::kFloat:
        out_ += FloatJson(value.AsNumber());
        return absl::OkStatus();
      case Value::Kind::kString:
        out_ += QuoteJson(value.AsString(), options_.ensure_ascii);
        return absl::OkStatus();
      case Value::Kind::kList:
      case Value::Kind::kTuple:
        return WriteList(value.AsList(), level);
      case Value::Kind::kDict:
        return WriteDict(value.AsDict(), level);
      default:
        return InvalidArgument("Object of type {} is not JSON serializable", value.TypeName());
    }
  }
  std::string Take() { return std::move(out_); }

 private:
  static std::string FloatJson(double value) {
    if (std::isnan(value)) return "NaN";
    if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
    return FloatText(value);
  }

  void NewLine(int level) {
    if (options_.indent) out_ += "\n" + std::string(static_cast<size_t>(*options_.indent) * level, ' ');
  }

  // Writes the text in front of item `idx` of a container at `level`.
  void Separate(size_t idx, int level) {
    if (idx > 0) out_ += options_.indent ? "," : ", ";
    NewLine(level + 1);
  }

  absl::Status WriteList(const List& list, int level) {
    out_ += '[';
    for (size_t i = 0; i < list.size(); ++i) {
      Separate(i, level);
      SPLICE_RETURN_IF_ERROR(Write(list[i], level + 1));
    }
    if (!list.empty()) NewLine(level);
    out_ += ']';
    return absl::OkStatus();
  }

  absl::Status WriteDict(const Dict& dict, int level) {
    std::vector<const std::pair<std::string, Value>*> items;
    for (const auto& item : dict.items) items.push_back(&item);
    if (options_.sort_keys) {
      std::sort(items.begin(), items.end(), [](const auto* a, const auto* b) { return a->first < b->first; });
    }
    out_ += '{';
    for (size_t i = 0; i < items.size(); ++i) {
      Separate(i, level);
      out_ += QuoteJson(items[i]->first, options_.ensure_ascii) + ": ";
      SPLICE_RETURN_IF_ERROR(Write(items[i]->second, level + 1));
    }
    if (!items.empty()) NewLine(level);
    out_ += '}';
    return absl::OkStatus();
  }

  const JsonOptions& options_;
  std::string out_;
};

}  // namespace

absl::StatusOr<std::string> ToJson(const Value& value, const JsonOptions& options) {
  JsonWriter writer(options);
  SPLICE_RETURN_IF_ERROR(writer.Write(value, 0));
  return writer.Take();
}

}  // namespace spl::tokenizer::jinja
