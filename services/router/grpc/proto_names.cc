#include "services/router/grpc/proto_names.h"

#include <string>

#include "services/wire/request_options.h"
#include "spl/v1/common.pb.h"

namespace spl::router {
namespace {

FieldNames MakeNames(const std::string& segments) {
  FieldNames names;
  const auto* sampling = v1::SamplingParams::descriptor();
  for (int i = 0; i < sampling->field_count(); ++i)
    names.Add(sampling->field(i)->name(), "sampling." + sampling->field(i)->name());
  for (const wire::RequestOption& option : wire::RequestOptions()) {
    const std::string group = option.group == nullptr ? "" : option.group->name() + ".";
    names.Add("splice." + option.name(), "reuse." + group + option.field->name());
  }
  names.Add("splice.namespace", "namespace_name");
  names.Add("splice.segments", segments);
  names.Add("messages", "prompt.chat.messages");
  return names;
}

}  // namespace

const FieldNames& ProtoNames(v1::Prompt::KindCase kind) {
  static const FieldNames of_chat = MakeNames("prompt.chat.messages.parts");
  static const FieldNames of_parts = MakeNames("prompt.parts.parts");
  static const FieldNames of_tokens = MakeNames("prompt.tokens.segments");
  return kind == v1::Prompt::kChat ? of_chat : kind == v1::Prompt::kParts ? of_parts : of_tokens;
}

}  // namespace spl::router
