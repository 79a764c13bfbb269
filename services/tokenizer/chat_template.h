// Chat templates, in the subset of Jinja that published templates use. Parse refuses any other construct with an
// InvalidArgument that names it and its line, so that no prompt is silently wrong.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace spl::tokenizer {

struct ChatMessage {
  std::string role;                    // "developer" is "system" to a template that does not name it
  std::optional<std::string> content;  // nullopt: None to a template that asks for it, and else an empty text
  // A JSON object with further members of the message (tool_calls, tool_call_id, name, reasoning_content, …), which the
  // template sees as they are; empty: none. The arguments of a tool call may be an object or its text: the template
  // gets the object, or the text if it cannot render an object.
  std::string extra_json = {};
};

struct RenderOptions {
  bool add_generation_prompt = true;
  // A JSON object whose members become template variables (tools, enable_thinking, date_string, …); empty: none.
  std::string extra_json;
  // The prompt ends with the content of the last message, which the model goes on with. Excludes add_generation_prompt.
  bool continue_final_message = false;
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

  // The template's text. A word that does not stand in it ("tools", "enable_thinking") has no effect on a prompt.
  virtual const std::string& source() const = 0;
  bool Mentions(std::string_view word) const { return source().find(word) != std::string::npos; }
};

}  // namespace spl::tokenizer
