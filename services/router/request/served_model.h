// The model as the router knows it: name, tokenizer and chat template. No weights.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "services/router/output_formats/registry.h"
#include "services/router/request/request.h"
#include "services/router/request/tool_documents.h"

namespace spl::router {

struct ServedModelOptions {
  std::string dir;           // Hugging Face folder; empty: a model without tokenizer
  std::string name;          // empty: the folder's name
  uint32_t max_context = 0;  // 0: config.json's
  // Parse special tokens in messages and segments, too. Clients that write there can then speak as the system.
  bool special_tokens_in_text = false;
  // "auto": requests without sampling parameters get those of generation_config.json (LoadSamplingDefaults). "none":
  // they get those of Sampling.
  std::string generation_config = "auto";
  OutputFormat output_format = {.tools = "auto", .reasoning = "auto"};  // see ChooseOutputFormat
  std::string tool_result_documents = "none";                           // see ParseToolDocumentRule
};

// Immutable after Load; any thread. In a chat without segments of its own, documents in the results of tools become
// segments by the rule of ServedModelOptions, if the template has each of them once and in their order.
class ServedModel {
 public:
  // InvalidArgument or NotFound names the file or flag that is wrong or missing. A model without a chat template loads,
  // but chat requests to it are refused.
  static absl::StatusOr<std::unique_ptr<ServedModel>> Load(const ServedModelOptions& options);
  // Makes a model of its parts (tests). `chat_template` may be null.
  ServedModel(std::string name, std::unique_ptr<tokenizer::Tokenizer> tokenizer,
              std::unique_ptr<tokenizer::ChatTemplate> chat_template, uint32_t max_context,
              bool special_tokens_in_text = false, const Sampling& default_sampling = {});

  const std::string& name() const { return name_; }
  const tokenizer::Tokenizer& tokenizer() const { return *tokenizer_; }
  uint32_t max_context() const { return max_context_; }  // config.json's; a limit that workers report goes before it
  // How its answers are parsed; everything is content if there is no chat template.
  const OutputFormat& output_format() const { return output_format_; }
  const Sampling& default_sampling() const { return default_sampling_; }  // for requests that name no parameter

  // NotFound unless `requested` is empty or this model's name.
  absl::Status CheckName(const std::string& requested) const;

  // Token ids of a prompt: template, then tokenizer. Costs about 10 ns a byte; not for I/O threads.
  // Each segment, and each text between segments, is tokenized by itself. Special tokens are parsed in text prompts and
  // in the template's own text, not in messages and segments.
  // InvalidArgument: text that is not UTF-8, a template that refuses the messages or loses a segment, ids outside the
  // vocabulary.
  absl::StatusOr<TokenizedPrompt> Tokenize(const Prompt& prompt, bool add_special_tokens) const;
  // Names of the chat's variables that have no effect, because the template does not mention them.
  std::vector<std::string> VariablesWithoutEffect(const ChatPrompt& chat) const;
  // Tokens of a prompt's first text, and of one segment, exactly as Tokenize computes them.
  absl::StatusOr<std::vector<TokenId>> EncodeStart(std::string_view text) const;
  absl::StatusOr<std::vector<TokenId>> EncodeSegment(std::string_view text) const;

 private:
  absl::Status CheckIds(const std::vector<TokenId>& ids) const;
  // `plain_mark` stands before special tokens that are plain text; empty: there are none.
  absl::StatusOr<TokenizedPrompt> EncodePieces(std::string_view text, const SegmentMarks& segments,
                                               bool add_special_tokens, const std::string& plain_mark) const;
  absl::StatusOr<TokenizedPrompt> TokenizeChat(const ChatPrompt& chat) const;
  // The chat with other messages, in which marks stand for `segments`.
  absl::StatusOr<TokenizedPrompt> EncodeChat(const ChatPrompt& chat, std::vector<tokenizer::ChatMessage> messages,
                                             const SegmentMarks& segments) const;

  const std::string name_;
  const std::unique_ptr<tokenizer::Tokenizer> tokenizer_;
  const std::unique_ptr<tokenizer::ChatTemplate> chat_template_;
  const uint32_t max_context_;
  const bool special_tokens_in_text_;
  const Sampling default_sampling_;
  OutputFormat output_format_;
  ToolDocumentRule tool_documents_;
};

}  // namespace spl::router
