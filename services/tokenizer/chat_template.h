// Chat templates, in the subset of Jinja that the templates of Llama 3, Qwen 2.5/3 and Mistral use. Parse refuses any
// other construct with an InvalidArgument that names it and its line, so that no prompt is silently wrong.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace spl::tokenizer {

struct ChatMessage {
  std::string role;
  std::string content;
};

struct RenderOptions {
  bool add_generation_prompt = true;
  // A JSON object whose members become template variables (tools, enable_thinking, date_string, …); empty: none.
  std::string extra_json;
};

// Immutable after Parse; any thread.
class ChatTemplate {
 public:
  // Reads DIR/chat_template.jinja, or else "chat_template" of tokenizer_config.json (a string, or the "default" of a
  // list). bos_token and eos_token are taken from tokenizer_config.json. NotFound: the model has no template.
  static absl::StatusOr<std::unique_ptr<ChatTemplate>> Load(const std::string& model_dir);
  static absl::StatusOr<std::unique_ptr<ChatTemplate>> Parse(std::string_view source, std::string_view bos_token,
                                                             std::string_view eos_token);
  virtual ~ChatTemplate() = default;

  // Renders the messages as a prompt. InvalidArgument: the template refused them (raise_exception; the message is the
  // template's), or an operation got values of wrong types.
  virtual absl::StatusOr<std::string> Render(const std::vector<ChatMessage>& messages,
                                             const RenderOptions& options) const = 0;
};

}  // namespace spl::tokenizer
