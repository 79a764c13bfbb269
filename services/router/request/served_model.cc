#include "services/router/request/served_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "services/base/ids.h"
#include "services/base/read_file.h"
#include "services/hub/model_name.h"
#include "services/router/request/api_error.h"
#include "services/router/request/earlier_reasoning.h"
#include "services/router/request/json_reader.h"
#include "services/router/request/sampling_defaults.h"
#include "services/tokenizer/ids_only.h"
#include "services/tokenizer/prompt.h"

namespace spl::router {
namespace {

absl::StatusOr<uint32_t> ReadMaxContext(const std::string& dir) {
  const std::string path = dir + "/config.json";
  SPLICE_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  SPLICE_ASSIGN_OR_RETURN(const nlohmann::json config, ParseJsonObject(text, path));
  JsonObjectReader reader(config, path + ": ");
  const int32_t positions = reader.RequireInt("max_position_embeddings", 1, 1 << 30);
  SPLICE_RETURN_IF_ERROR(reader.status());
  return static_cast<uint32_t>(positions);
}

// Marks the special tokens that texts spell.
class SpecialTokenMarks {
 public:
  SpecialTokenMarks(const tokenizer::Tokenizer& tokenizer, const std::string& mark)
      : tokenizer_(tokenizer), mark_(mark) {}

  std::string In(std::string_view text) const { return tokenizer::MarkSpecialTokens(tokenizer_, text, mark_); }

  // In all texts and names of a JSON value; nothing if `json` is empty.
  absl::StatusOr<std::string> InJson(const std::string& json) const {
    if (json.empty()) return json;
    SPLICE_ASSIGN_OR_RETURN(const Json value, ParseJson(json));
    return Marked(value).dump(-1, ' ', false, Json::error_handler_t::replace);
  }

 private:
  Json Marked(const Json& value) const {
    if (value.is_string()) return In(*value.get_ptr<const std::string*>());
    if (value.is_array()) {
      Json list = Json::array();
      for (const Json& item : value) list.push_back(Marked(item));
      return list;
    }
    if (!value.is_object()) return value;
    Json object = Json::object();
    Json::object_t::Container& members = object.get_ref<Json::object_t&>();  // the names are known to be different
    for (const auto& item : value.items()) members.emplace_back(In(item.key()), Marked(item.value()));
    return object;
  }

  const tokenizer::Tokenizer& tokenizer_;
  const std::string& mark_;
};

// A template that has no place for tools, their calls or documents would leave them out without a word.
absl::Status CheckTemplateHas(const tokenizer::ChatTemplate& chat_template, const ChatPrompt& chat) {
  const auto missing = [](const std::string& field, const char* what) {
    return ParamError(field, "the model's chat template has no place for {}", what);
  };
  for (const char* name : {"tools", "documents"}) {
    const auto& names = chat.variable_names;
    const bool given = std::find(names.begin(), names.end(), name) != names.end();
    if (given && !chat_template.Mentions(name)) return missing(name, name);
  }
  if (chat_template.Mentions("tool_calls")) return absl::OkStatus();
  for (size_t i = 0; i < chat.messages.size(); ++i) {
    if (chat.messages[i].extra_json.find("\"tool_calls\":") != std::string::npos)
      return missing(fmt::format("messages[{}].tool_calls", i), "calls of tools");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<ServedModel>> ServedModel::Load(const ServedModelOptions& options) {
  const std::string& dir = options.dir;
  if (options.generation_config != "auto" && options.generation_config != "none")
    return InvalidArgument("--generation-config is '{}', not auto or none", options.generation_config);
  if (dir.empty()) {
    if (options.name.empty() || options.max_context == 0) {
      return absl::InvalidArgumentError("a model without a folder needs a name and a context length");
    }
    return std::make_unique<ServedModel>(options.name, tokenizer::MakeIdsOnlyTokenizer(), nullptr, options.max_context);
  }
  SPLICE_ASSIGN_OR_RETURN(std::unique_ptr<tokenizer::Tokenizer> tokenizer, tokenizer::Tokenizer::Load(dir));
  absl::StatusOr<std::unique_ptr<tokenizer::ChatTemplate>> chat_template = tokenizer::ChatTemplate::Load(dir);
  if (!chat_template.ok() && chat_template.status().code() != absl::StatusCode::kNotFound) {
    return chat_template.status();
  }
  uint32_t max_context = options.max_context;
  if (max_context == 0) {
    SPLICE_ASSIGN_OR_RETURN(max_context, ReadMaxContext(dir));
  }
  Sampling sampling;
  if (options.generation_config == "auto") {
    SPLICE_ASSIGN_OR_RETURN(sampling, LoadSamplingDefaults(dir));
  }
  SPLICE_ASSIGN_OR_RETURN(
      OutputFormat format,
      ChooseOutputFormat(options.output_format, chat_template.ok() ? (*chat_template)->source() : ""));
  auto model = std::make_unique<ServedModel>(
      options.name.empty() ? hub::FolderModelName(dir) : options.name, std::move(tokenizer),
      chat_template.ok() ? *std::move(chat_template) : nullptr, max_context, options.special_tokens_in_text, sampling);
  model->output_format_ = std::move(format);
  SPLICE_ASSIGN_OR_RETURN(model->tool_documents_, ParseToolDocumentRule(options.tool_result_documents));
  return model;
}

ServedModel::ServedModel(std::string name, std::unique_ptr<tokenizer::Tokenizer> tokenizer,
                         std::unique_ptr<tokenizer::ChatTemplate> chat_template, uint32_t max_context,
                         bool special_tokens_in_text, const Sampling& default_sampling)
    : name_(std::move(name)),
      tokenizer_(std::move(tokenizer)),
      chat_template_(std::move(chat_template)),
      max_context_(max_context),
      special_tokens_in_text_(special_tokens_in_text),
      default_sampling_(default_sampling) {}

absl::Status ServedModel::CheckName(const std::string& requested) const {
  if (requested.empty() || requested == name_) return absl::OkStatus();
  return SetErrorCode(SetParam(Errorf(absl::StatusCode::kNotFound,
                                      "model: \"{}\" is not served here; this cluster serves \"{}\"", requested, name_),
                               "model"),
                      "model_not_found");
}

absl::Status ServedModel::CheckIds(const std::vector<TokenId>& ids) const {
  for (size_t i = 0; i < ids.size(); ++i) {
    // Without a tokenizer only the worker knows the vocabulary, and checks.
    if (ids[i] >= 0 && (ids[i] < tokenizer_->vocab_size() || tokenizer_->vocab_size() == 0)) continue;
    return ParamError("prompt", "item {} is token id {}, but the vocabulary has {} ids", i, ids[i],
                      tokenizer_->vocab_size());
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<TokenId>> ServedModel::EncodeStart(std::string_view text) const {
  return tokenizer::EncodePrompt(*tokenizer_, text, true);
}

absl::StatusOr<std::vector<TokenId>> ServedModel::EncodeSegment(std::string_view text) const {
  return special_tokens_in_text_ ? tokenizer::EncodePrompt(*tokenizer_, text, false)
                                 : tokenizer::EncodeData(*tokenizer_, text);
}

absl::StatusOr<TokenizedPrompt> ServedModel::EncodePieces(std::string_view text, const SegmentMarks& segments,
                                                          bool add_special_tokens,
                                                          const std::string& plain_mark) const {
  SPLICE_ASSIGN_OR_RETURN(const std::vector<std::string_view> pieces, segments.Split(text));
  TokenizedPrompt prompt;
  const auto append = [&](const absl::StatusOr<std::vector<TokenId>>& ids) {
    if (ids.ok()) prompt.ids.insert(prompt.ids.end(), ids->begin(), ids->end());
    return ids.status();
  };
  const auto encode = [&](std::string_view piece, bool first) {
    if (plain_mark.empty()) return tokenizer::EncodePrompt(*tokenizer_, piece, first && add_special_tokens);
    const tokenizer::UnmarkedText unmarked = tokenizer::RemoveMarks(piece, plain_mark);
    return tokenizer::EncodePrompt(*tokenizer_, unmarked.text, first && add_special_tokens, unmarked.plain_at);
  };
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (i == 0 || !pieces[i].empty()) SPLICE_RETURN_IF_ERROR(append(encode(pieces[i], i == 0)));
    if (i == segments.size()) break;
    const auto begin = static_cast<uint32_t>(prompt.ids.size());
    SPLICE_RETURN_IF_ERROR(append(EncodeSegment(segments[i].text)));
    const auto end = static_cast<uint32_t>(prompt.ids.size());
    if (begin == end) continue;
    prompt.segments.push_back({begin, end, segments[i].namespace_name, segments[i].knowledge_base,
                               segments[i].namespace_key, segments[i].frozen});
  }
  return prompt;
}

absl::StatusOr<TokenizedPrompt> ServedModel::Tokenize(const Prompt& prompt, bool add_special_tokens) const {
  if (const auto* ids = std::get_if<std::vector<TokenId>>(&prompt)) {
    SPLICE_RETURN_IF_ERROR(CheckIds(*ids));
    return TokenizedPrompt{*ids, {}};
  }
  if (const auto* tokens = std::get_if<TokenizedPrompt>(&prompt)) {
    SPLICE_RETURN_IF_ERROR(CheckIds(tokens->ids));
    return *tokens;
  }
  const auto named = [](absl::StatusOr<TokenizedPrompt> tokens, const char* field) -> absl::StatusOr<TokenizedPrompt> {
    if (!tokens.ok()) return SetParam(Annotate(tokens.status(), field), field);
    return tokens;
  };
  if (const auto* text = std::get_if<std::string>(&prompt))
    return named(EncodePieces(*text, SegmentMarks(), add_special_tokens, ""), "prompt");
  if (const auto* text = std::get_if<SegmentedText>(&prompt))
    return named(EncodePieces(text->text, text->segments, add_special_tokens, ""), "prompt");
  const ChatPrompt& chat = std::get<ChatPrompt>(prompt);
  if (chat_template_ == nullptr) {
    return ParamError("messages", "the model has no chat template; use /v1/completions");
  }
  SPLICE_RETURN_IF_ERROR(CheckTemplateHas(*chat_template_, chat));
  return named(TokenizeChat(chat), "messages");
}

absl::StatusOr<TokenizedPrompt> ServedModel::TokenizeChat(const ChatPrompt& chat) const {
  if (tool_documents_.kind != ToolDocumentRule::Kind::kNone && chat.segments.empty()) {
    MarkedMessages marked = MarkToolDocuments(tool_documents_, chat.messages);
    absl::StatusOr<TokenizedPrompt> prompt = EncodeChat(chat, std::move(marked.messages), marked.segments);
    if (prompt.ok()) return prompt;
  }
  return EncodeChat(chat, chat.messages, chat.segments);
}

// A mark in front of each special token that a message, or a value for the template, spells goes through the template
// with it. It is drawn for the request, so that no message contains it.
absl::StatusOr<TokenizedPrompt> ServedModel::EncodeChat(const ChatPrompt& chat,
                                                        std::vector<tokenizer::ChatMessage> messages,
                                                        const SegmentMarks& segments) const {
  const std::string nonce = RandomId::Make().ToHex();
  const std::string mark = fmt::format("\uE000splice-plain-{}\uE001", nonce);
  std::string variables = chat.variables_json;
  NameReasoning(*chat_template_, &messages);
  if (!special_tokens_in_text_) {
    const SpecialTokenMarks marks(*tokenizer_, mark);
    for (tokenizer::ChatMessage& message : messages) {
      message.role = marks.In(message.role);
      if (message.content) message.content = marks.In(*message.content);
      SPLICE_ASSIGN_OR_RETURN(message.extra_json, marks.InJson(message.extra_json));
    }
    SPLICE_ASSIGN_OR_RETURN(variables, marks.InJson(variables));
  }
  const tokenizer::RenderOptions options{.add_generation_prompt = chat.add_generation_prompt,
                                         .extra_json = std::move(variables),
                                         .continue_final_message = chat.continue_final_message};
  SPLICE_ASSIGN_OR_RETURN(const std::string text, chat_template_->Render(messages, options));
  if (tokenizer::RemoveMarks(text, mark).text.find(nonce) != std::string::npos)
    return InvalidArgument("the chat template changes a message in the middle of a special token");
  return EncodePieces(text, segments, false, mark);
}

std::vector<std::string> ServedModel::VariablesWithoutEffect(const ChatPrompt& chat) const {
  std::vector<std::string> names;
  for (const std::string& name : chat.variable_names) {
    if (chat_template_ != nullptr && !chat_template_->Mentions(name)) names.push_back(name);
  }
  return names;
}

}  // namespace spl::router
