#include "services/router/request/reuse_json.h"

#include <optional>
#include <string>
#include <utility>

#include "services/router/request/api_error.h"
#include "services/wire/request_options.h"

namespace spl::router {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// The field is set if the member is given.
void ReadField(ObjectReader& reader, const char* name, const FieldDescriptor* field, Message& message) {
  const auto& reflection = *message.GetReflection();
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_BOOL: {
      std::optional<bool> value;
      reader.Bool(name, &value);
      if (value.has_value()) reflection.SetBool(&message, field, *value);
      break;
    }
    case FieldDescriptor::CPPTYPE_UINT32: {
      std::optional<uint32_t> value;
      reader.Uint32(name, &value);
      if (value.has_value()) reflection.SetUInt32(&message, field, *value);
      break;
    }
    case FieldDescriptor::CPPTYPE_DOUBLE: {
      std::optional<double> value;
      reader.Number(name, &value);
      if (value.has_value()) reflection.SetDouble(&message, field, *value);
      break;
    }
    default: {  // a test holds that there are no others
      // quality is a word or a number: {"quality": 0.99}.
      const Json* const raw = reader.Raw(name);
      if (raw != nullptr && raw->is_number() && field->number() == v1::ReuseOptions::kQualityFieldNumber) {
        reflection.SetString(&message, field, raw->dump());
        break;
      }
      std::string value;
      reader.String(name, &value);
      if (!value.empty()) reflection.SetString(&message, field, std::move(value));
    }
  }
}

void ReadGroups(ObjectReader& reader, v1::ReuseOptions& reuse) {
  const auto& type = *reuse.GetDescriptor();
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor* const group = type.field(i);
    if (group->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) continue;
    const Json* const object = reader.Raw(group->name().c_str());
    if (object == nullptr) continue;
    Message& message = *reuse.GetReflection()->MutableMessage(&reuse, group);
    ObjectReader inner(*object, reader.path() + group->name() + ".");
    const auto& options = *group->message_type();
    for (int f = 0; f < options.field_count(); ++f)
      ReadField(inner, options.field(f)->name().c_str(), options.field(f), message);
    reader.Fail(inner.Finish());
  }
}

}  // namespace

void ReadReuseOptions(ObjectReader& reader, v1::ReuseOptions& reuse) {
  ReadGroups(reader, reuse);
  for (const wire::RequestOption& option : wire::RequestOptions()) {
    const char* const name = option.name().c_str();
    if (!reader.Has(name)) {
      reader.Ignore({name});  // null
      continue;
    }
    if (option.IsSet(reuse)) {
      reader.Fail(ParamError(reader.path() + name, "stands in {}{}, too", reader.path(), option.group->name()));
      continue;
    }
    ReadField(reader, name, option.field, option.In(reuse));
  }
}

}  // namespace spl::router
