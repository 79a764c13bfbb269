#include "services/tokenizer/chat_template.h"

#include <utility>

#include "services/base/status.h"
#include "services/tokenizer/jinja/evaluator.h"
#include "services/tokenizer/jinja/parser.h"
#include "services/tokenizer/model_files.h"
#include "services/tokenizer/utf8.h"

namespace spl::tokenizer {
namespace {

using jinja::Value;
using jinja::Variables;

// Owns the nodes of the template. Freeing them cannot exhaust the stack, because the parser bounds their depth.
class JinjaTemplate final : public ChatTemplate {
 public:
  JinjaTemplate(jinja::Block block, Variables tokens) : block_(std::move(block)), tokens_(std::move(tokens)) {}

  absl::StatusOr<std::string> Render(const std::vector<ChatMessage>& messages,
                                     const RenderOptions& options) const override {
    Variables variables = tokens_;
    // The reference always passes these two, None if the caller has none, so that "tools is defined" is true.
    variables.emplace_back("tools", Value::None());
    variables.emplace_back("documents", Value::None());
    SPLICE_ASSIGN_OR_RETURN(Value list, MessageList(messages));
    SPLICE_RETURN_IF_ERROR(AddExtra(options.extra_json, &variables));
    variables.emplace_back("messages", std::move(list));
    variables.emplace_back("add_generation_prompt", Value::Bool(options.add_generation_prompt));
    return jinja::Render(block_, std::move(variables));
  }

 private:
  static absl::StatusOr<Value> MessageList(const std::vector<ChatMessage>& messages) {
    jinja::List list;
    for (size_t i = 0; i < messages.size(); ++i) {
      const auto [role, content] =
          std::pair<const std::string&, const std::string&>(messages[i].role, messages[i].content);
      if (FindInvalidUtf8(role) != std::string_view::npos || FindInvalidUtf8(content) != std::string_view::npos) {
        return InvalidArgument("messages[{}] is not UTF-8", i);
      }
      jinja::Dict message;
      message.Set("role", Value::String(role));
      message.Set("content", Value::String(content));
      SPLICE_ASSIGN_OR_RETURN(Value value, Value::MakeDict(std::move(message)));
      list.push_back(std::move(value));
    }
    return Value::MakeList(std::move(list));
  }

  static absl::Status AddExtra(const std::string& json, Variables* variables) {
    if (json.empty()) return absl::OkStatus();
    SPLICE_ASSIGN_OR_RETURN(const Value extra, jinja::FromJsonText(json, "extra_json"));
    if (!extra.is_dict()) return InvalidArgument("extra_json must be an object, it is {}", extra.TypeName());
    for (const auto& member : extra.AsDict().items) {
      if (member.first == "messages" || member.first == "add_generation_prompt") {
        return InvalidArgument("extra_json must not set \"{}\"", member.first);
      }
      variables->emplace_back(member.first, member.second);
    }
    return absl::OkStatus();
  }

  jinja::Block block_;
  Variables tokens_;  // bos_token and the like
};

absl::StatusOr<std::unique_ptr<ChatTemplate>> Make(std::string_view source, Variables tokens) {
  if (const size_t offset = FindInvalidUtf8(source); offset != std::string_view::npos) {
    return InvalidArgument("the chat template is not UTF-8 at byte {}", offset);
  }
  absl::StatusOr<jinja::Block> block = jinja::ParseTemplate(source);
  if (!block.ok()) return Annotate(block.status(), "chat template");
  return std::make_unique<JinjaTemplate>(*std::move(block), std::move(tokens));
}

// The "chat_template" of tokenizer_config.json: a string, or a list of named ones.
absl::StatusOr<std::string> SourceIn(const JsonField& config) {
  const std::optional<JsonField> field = config.Find("chat_template");
  if (!field) return Errorf(absl::StatusCode::kNotFound, "{}no chat_template", config.where);
  if (field->value->is_string()) return field->value->get<std::string>();
  if (!field->value->is_array()) return WrongType(*field, "a string or a list of named templates");
  for (size_t i = 0; i < field->value->size(); ++i) {
    SPLICE_ASSIGN_OR_RETURN(const std::string name, RequireString(field->At(i), "name"));
    if (name == "default") return RequireString(field->At(i), "template");
  }
  return InvalidArgument("{} has no template named \"default\"", field->where);
}

// Every "…_token" of the model; the reference passes them all to the template.
absl::StatusOr<Variables> TokensOf(const JsonField& config) {
  Variables tokens;
  for (const char* key : {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}) {
    SPLICE_ASSIGN_OR_RETURN(const std::optional<std::string> content, TokenContent(config, key));
    if (content) tokens.emplace_back(key, Value::String(*content));
  }
  return tokens;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ChatTemplate>> ChatTemplate::Parse(std::string_view source, std::string_view bos_token,
                                                                  std::string_view eos_token) {
  // Empty: the model has no such token, and the reference leaves the variable undefined.
  Variables tokens;
  if (!bos_token.empty()) tokens.emplace_back("bos_token", Value::String(std::string(bos_token)));
  if (!eos_token.empty()) tokens.emplace_back("eos_token", Value::String(std::string(eos_token)));
  return Make(source, std::move(tokens));
}

absl::StatusOr<std::unique_ptr<ChatTemplate>> ChatTemplate::Load(const std::string& model_dir) {
  SPLICE_ASSIGN_OR_RETURN(const Json document, ReadOptionalJson(model_dir, "tokenizer_config.json"));
  const JsonField config{&document, model_dir + "/tokenizer_config.json: "};
  SPLICE_ASSIGN_OR_RETURN(Variables tokens, TokensOf(config));
  absl::StatusOr<std::string> source = ReadFile(model_dir + "/chat_template.jinja");
  std::string where = model_dir + "/chat_template.jinja";
  if (absl::IsNotFound(source.status())) {
    source = SourceIn(config);
    where = model_dir + "/tokenizer_config.json";
  }
  if (!source.ok()) return source.status();
  auto made = Make(*source, std::move(tokens));
  if (!made.ok()) return Annotate(made.status(), where);
  return made;
}

}  // namespace spl::tokenizer
