#include "services/router/request/answer_json.h"

#include <map>
#include <utility>

#include "absl/strings/escaping.h"
#include "services/base/status.h"

namespace spl::router {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// REQUIRES: a type that Receipt has.
OrderedJson FieldJson(const Message& message, const FieldDescriptor& field) {
  const auto& reflection = *message.GetReflection();
  if (field.is_map()) {
    std::map<std::string, OrderedJson> out;  // a protobuf map has no order
    for (int i = 0; i < reflection.FieldSize(message, &field); ++i) {
      const Message& entry = reflection.GetRepeatedMessage(message, &field, i);
      out[entry.GetReflection()->GetString(entry, field.message_type()->map_key())] =
          FieldJson(entry, *field.message_type()->map_value());
    }
    return out;
  }
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return ReceiptJson(reflection.GetMessage(message, &field));
    case FieldDescriptor::CPPTYPE_BOOL:
      return reflection.GetBool(message, &field);
    case FieldDescriptor::CPPTYPE_UINT32:
      return reflection.GetUInt32(message, &field);
    case FieldDescriptor::CPPTYPE_UINT64:
      return reflection.GetUInt64(message, &field);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return reflection.GetDouble(message, &field);
    default: {
      std::string text = reflection.GetString(message, &field);
      return field.type() == FieldDescriptor::TYPE_BYTES ? absl::Base64Escape(text) : text;
    }
  }
}

}  // namespace

std::string Dump(const OrderedJson& json) { return json.dump(-1, ' ', false, OrderedJson::error_handler_t::replace); }

double Shortest(float value) { return std::stod(fmt::format("{}", value)); }

std::string SseEvent(const OrderedJson& json) { return "data: " + Dump(json) + "\n\n"; }

std::string NamedSseEvent(const OrderedJson& json) {
  return "event: " + json.at("type").get<std::string>() + "\n" + SseEvent(json);
}

OrderedJson UsageJson(const FinalInfo& final) {
  OrderedJson usage;
  usage["prompt_tokens"] = final.prompt_tokens;
  usage["completion_tokens"] = final.completion_tokens;
  usage["total_tokens"] = final.prompt_tokens + final.completion_tokens;
  usage["prompt_tokens_details"]["cached_tokens"] = final.receipt.cached_tokens();
  return usage;
}

OrderedJson ReceiptJson(const google::protobuf::Message& message) {
  OrderedJson out;
  const auto& reflection = *message.GetReflection();
  const auto& type = *message.GetDescriptor();
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor& field = *type.field(i);
    const bool absent = field.is_repeated() ? reflection.FieldSize(message, &field) == 0
                                            : field.has_presence() && !reflection.HasField(message, &field);
    if (absent) continue;
    const std::string& path = field.options().GetExtension(v1::path);
    const size_t dot = path.find('.');
    OrderedJson& place = out[path.empty() ? field.name() : path.substr(0, dot)];
    (dot == std::string::npos ? place : place[path.substr(dot + 1)]) = FieldJson(message, field);
  }
  return out;
}

OrderedJson ReceiptsJson(const FinalInfo& final) {
  if (final.more_receipts.empty()) return ReceiptJson(final.receipt);
  OrderedJson list = OrderedJson::array({ReceiptJson(final.receipt)});
  for (const v1::Receipt& receipt : final.more_receipts) list.push_back(ReceiptJson(receipt));
  return list;
}

}  // namespace spl::router
