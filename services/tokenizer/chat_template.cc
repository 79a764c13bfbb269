#include "services/tokenizer/chat_template.h"

#include <fmt/format.h>

#include <utility>

#include "services/base/read_file.h"
#include "services/base/status.h"
#include "services/text/utf8.h"
#include "services/tokenizer/jinja/evaluator.h"
#include "services/tokenizer/jinja/parser.h"
#include "services/tokenizer/model_files.h"

namespace spl::tokenizer {
namespace {

using jinja::Value;
using jinja::Variables;

// Ends the content of a message that the model is to go on with, while the template is rendered. The space shows
// whether the template trims what it prints.
constexpr std::string_view kContinueMark = "\uE000splice-continue\uE001";

// The text of the arguments of a call as the object that it spells; other values as they are.
Value ParsedArguments(const Value& arguments) {
  if (!arguments.is_string()) return arguments;
  absl::StatusOr<Value> parsed = jinja::FromJsonText(arguments.AsString(), "arguments");
  return parsed.ok() && parsed->is_dict() ? *std::move(parsed) : arguments;
}

absl::StatusOr<Value> ArgumentsText(const Value& arguments) {
  if (!arguments.is_dict()) return arguments;
  SPLICE_ASSIGN_OR_RETURN(std::string text, jinja::ToJson(arguments, {}));
  return Value::String(std::move(text));
}

// `calls` with the arguments of each function in the one form that the template takes.
absl::StatusOr<Value> ToolCalls(const Value& calls, bool as_text) {
  if (!calls.is_sequence()) return calls;
  jinja::List list;
  for (const Value& call : calls.AsList()) {
    const Value* const function = call.is_dict() ? call.AsDict().Find("function") : nullptr;
    const Value* const arguments =
        function != nullptr && function->is_dict() ? function->AsDict().Find("arguments") : nullptr;
    if (arguments == nullptr) {
      list.push_back(call);
      continue;
    }
    jinja::Dict changed = function->AsDict();
    SPLICE_ASSIGN_OR_RETURN(Value form, as_text ? ArgumentsText(*arguments) : ParsedArguments(*arguments));
    changed.Set("arguments", std::move(form));
    jinja::Dict whole = call.AsDict();
    SPLICE_ASSIGN_OR_RETURN(Value made, Value::MakeDict(std::move(changed)));
    whole.Set("function", std::move(made));
    SPLICE_ASSIGN_OR_RETURN(Value item, Value::MakeDict(std::move(whole)));
    list.push_back(std::move(item));
  }
  return Value::MakeList(std::move(list));
}

// Cuts the rendered text where the final message's content ends.
absl::StatusOr<std::string> CutAtMark(std::string text) {
  const size_t at = text.rfind(kContinueMark);
  if (at == std::string::npos) {
    return absl::InvalidArgumentError("the chat template does not print the final message, which is to be continued");
  }
  const bool keeps_spaces = text.substr(at + kContinueMark.size()).starts_with(' ');
  text.resize(at);
  if (!keeps_spaces) text.erase(text.find_last_not_of(" \t\n\r\f\v") + 1);
  return text;
}

// Owns the nodes of the template. Freeing them cannot exhaust the stack, because the parser bounds their depth.
class JinjaTemplate final : public ChatTemplate {
 public:
  JinjaTemplate(std::string source, jinja::Block block, Variables tokens)
      : source_(std::move(source)), block_(std::move(block)), tokens_(std::move(tokens)) {
    for (const char* test : {"content is none", "content'] is none", "content\"] is none", "content is not none",
                             "content'] is not none", "content\"] is not none"}) {
      content_may_be_none_ |= Mentions(test);
    }
    arguments_as_text_ = Mentions("tool_calls") && !RendersCall(false) && RendersCall(true);
  }

  const std::string& source() const override { return source_; }

  absl::StatusOr<std::string> Render(const std::vector<ChatMessage>& messages,
                                     const RenderOptions& options) const override {
    return RenderWith(messages, options, arguments_as_text_);
  }

 private:
  // True for a template that can render a call of a function with these arguments.
  bool RendersCall(bool as_text) const {
    const std::vector<ChatMessage> messages = {
        {"user", "a"},
        {"assistant", std::nullopt,
         R"({"tool_calls": [{"id": "call12345", "type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}]})"}};
    return RenderWith(messages, {}, as_text).ok();
  }

  absl::StatusOr<std::string> RenderWith(const std::vector<ChatMessage>& messages, const RenderOptions& options,
                                         bool arguments_as_text) const {
    if (options.continue_final_message && (options.add_generation_prompt || messages.empty())) {
      return absl::InvalidArgumentError("continue_final_message needs a message, and no add_generation_prompt");
    }
    Variables variables = tokens_;
    // The reference passes these two always, None if the caller has none, so that "tools is defined" is true. Templates
    // that ask just that mean tools by it.
    if (!Mentions("tools is defined") && !Mentions("tools is not defined")) {
      variables.emplace_back("tools", Value::None());
    }
    variables.emplace_back("documents", Value::None());
    SPLICE_ASSIGN_OR_RETURN(Value list, MessageList(messages, options, arguments_as_text));
    SPLICE_RETURN_IF_ERROR(AddExtra(options.extra_json, &variables));
    variables.emplace_back("messages", std::move(list));
    variables.emplace_back("add_generation_prompt", Value::Bool(options.add_generation_prompt));
    absl::StatusOr<std::string> text = jinja::Render(block_, std::move(variables));
    if (!text.ok() || !options.continue_final_message) return text;
    return CutAtMark(*std::move(text));
  }

  absl::StatusOr<Value> MessageList(const std::vector<ChatMessage>& messages, const RenderOptions& options,
                                    bool arguments_as_text) const {
    jinja::List list;
    for (size_t i = 0; i < messages.size(); ++i) {
      ChatMessage message = messages[i];
      if (message.role == "developer" && !Mentions("developer")) message.role = "system";
      if (options.continue_final_message && i + 1 == messages.size()) {
        if (!message.content) return InvalidArgument("messages[{}] has no content to be continued", i);
        *message.content += std::string(kContinueMark) + " ";
      }
      if (!message.content && !content_may_be_none_) message.content = "";
      absl::StatusOr<Value> value = MessageValue(message, arguments_as_text);
      if (!value.ok()) return Annotate(value.status(), fmt::format("messages[{}]", i));
      list.push_back(*std::move(value));
    }
    return Value::MakeList(std::move(list));
  }

  static absl::StatusOr<Value> MessageValue(const ChatMessage& message, bool arguments_as_text) {
    for (const std::string& text : {message.role, message.content.value_or(""), message.extra_json}) {
      if (text::FindInvalidUtf8(text) != std::string_view::npos)
        return absl::InvalidArgumentError("the text is not UTF-8");
    }
    jinja::Dict members;
    members.Set("role", Value::String(message.role));
    members.Set("content", message.content ? Value::String(*message.content) : Value::None());
    if (!message.extra_json.empty()) {
      SPLICE_ASSIGN_OR_RETURN(const Value extra, jinja::FromJsonText(message.extra_json, "extra_json"));
      if (!extra.is_dict()) return InvalidArgument("extra_json must be an object, it is {}", extra.TypeName());
      for (const auto& [name, value] : extra.AsDict().items) {
        if (name == "role" || name == "content") return InvalidArgument("extra_json must not set \"{}\"", name);
        SPLICE_ASSIGN_OR_RETURN(Value form, name == "tool_calls" ? ToolCalls(value, arguments_as_text) : value);
        members.Set(name, std::move(form));
      }
    }
    return Value::MakeDict(std::move(members));
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

  const std::string source_;
  const jinja::Block block_;
  const Variables tokens_;            // bos_token and the like
  bool content_may_be_none_ = false;  // it asks for that; others would print "None", or fail
  bool arguments_as_text_ = false;
};

absl::StatusOr<std::unique_ptr<ChatTemplate>> Make(std::string_view source, Variables tokens) {
  if (const size_t offset = text::FindInvalidUtf8(source); offset != std::string_view::npos) {
    return InvalidArgument("the chat template is not UTF-8 at byte {}", offset);
  }
  absl::StatusOr<jinja::Block> block = jinja::ParseTemplate(source);
  if (!block.ok()) return Annotate(block.status(), "chat template");
  return std::make_unique<JinjaTemplate>(std::string(source), *std::move(block), std::move(tokens));
}

// The "chat_template" of tokenizer_config.json: a string, or a list of named ones.
absl::StatusOr<std::string> SourceIn(const JsonField& config) {
  const std::optional<JsonField> field = config.Find("chat_template");
  if (!field) return Errorf(absl::StatusCode::kNotFound, "{}no chat_template", config.path);
  if (field->value->is_string()) return field->value->get<std::string>();
  if (!field->value->is_array()) return field->Wrong("a string or a list of named templates");
  for (size_t i = 0; i < field->value->size(); ++i) {
    SPLICE_ASSIGN_OR_RETURN(const std::string name, field->At(i).RequireString("name"));
    if (name == "default") return field->At(i).RequireString("template");
  }
  return InvalidArgument("{} has no template named \"default\"", field->path);
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
  SPLICE_ASSIGN_OR_RETURN(const nlohmann::json document, ReadOptionalJson(model_dir, "tokenizer_config.json"));
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
