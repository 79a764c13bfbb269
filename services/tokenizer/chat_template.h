// Chat templates: the Jinja subset that the templates of Llama 3, Qwen 2.5/3 and Mistral use. A construct outside the
// subset is an InvalidArgument that names it and its line, at Parse: never a silently wrong prompt.
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

// Immutable after Parse; Render may be called from any thread at once.
class ChatTemplate {
 public:
  // DIR/chat_template.jinja, else "chat_template" of tokenizer_config.json (a string, or the list form's "default").
  // NotFound when the model has none. bos_token and eos_token are taken from tokenizer_config.json.
  static absl::StatusOr<std::unique_ptr<ChatTemplate>> Load(const std::string& model_dir);
  static absl::StatusOr<std::unique_ptr<ChatTemplate>> Parse(std::string_view source, std::string_view bos_token,
                                                             std::string_view eos_token);
  virtual ~ChatTemplate() = default;

  // InvalidArgument: the template itself refused (raise_exception), or an operation on wrong types; the message is
  // the template's.
  virtual absl::StatusOr<std::string> Render(const std::vector<ChatMessage>& messages,
                                             const RenderOptions& options) const = 0;
};

}  // namespace spl::tokenizer
