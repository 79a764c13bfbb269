// The settings that `/set NAME VALUE` changes in `splice chat`.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "tools/cli/text_generator.h"

namespace spl::cli {

// Fields of the requests that a conversation sends, beside its messages.
class ChatSettings {
 public:
  // `in_process`: a model without a server, which has no options of reuse.
  explicit ChatSettings(bool in_process) : in_process_(in_process) {}

  // Sets a parameter of sampling (temperature, top_p, top_k, min_p, repetition_penalty, seed, max_tokens) or a member
  // of the API's "splice" object (reuse, decode, namespace, and the options of docs/options.md). Value "default":
  // unset. InvalidArgument names what is wrong, and the known parameters if the name is none.
  absl::Status Set(std::string_view name, std::string_view value);
  // "temperature 0.7, reuse samkv"; empty: everything is as the model or the server has it.
  std::string ToString() const;
  // Copies what is set into `request`; reuse_options gain members.
  void Apply(TextRequest& request) const;

  std::optional<int64_t>& max_tokens() { return values_.max_tokens; }
  std::optional<double>& temperature() { return values_.temperature; }

 private:
  struct Number;
  static std::span<const Number> Numbers();
  static const Number* Find(std::string_view name);
  absl::Status SetOption(const std::string& name, std::string_view value);

  const bool in_process_;
  TextRequest values_{.temperature = std::nullopt, .model_sampling = true};  // only the settable fields are used
  nlohmann::ordered_json options_ = nlohmann::ordered_json::object();        // members of the "splice" object
};

}  // namespace spl::cli
