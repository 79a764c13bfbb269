// splice tokenize: turns the texts and chats of a JSON Lines file into token ids.
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "services/base/status.h"
#include "services/tokenizer/chat_template.h"
#include "services/tokenizer/tokenizer.h"
#include "tools/cli/command.h"
#include "tools/cli/model_fetch.h"

namespace spl::cli {
namespace {

using Json = nlohmann::ordered_json;
using tokenizer::ChatMessage;
using tokenizer::ChatTemplate;
using tokenizer::RenderOptions;
using tokenizer::TokenId;
using tokenizer::Tokenizer;

constexpr char kFooter[] = R"(Each line of the input is one JSON object:
  {"text": "Hello"}                                     add "add_special_tokens": true for the begin token
  {"messages": [{"role": "user", "content": "Hi"}]}     rendered by the model's chat template; also
                                                        "add_generation_prompt" (default true) and
                                                        "chat_template_kwargs": {"enable_thinking": false}
Each line of the output: {"ids": [...], "text": "..."}. For a text, "text" is what the ids decode to; for messages it is
the rendered prompt. Special tokens in a text are tokens. Other members of a line are ignored.

Examples:
  splice tokenize --model models/splice-tiny --input texts.jsonl --output ids.jsonl
  echo '{"text": "Hello world"}' | splice tokenize --model models/splice-tiny --input - --output -)";

struct Options {
  std::string model;
  std::string input;
  std::string output;
};

struct Model {
  std::unique_ptr<Tokenizer> tokenizer;
  absl::StatusOr<std::unique_ptr<ChatTemplate>> chat_template;  // an error matters only for lines with messages
};

absl::StatusOr<bool> Flag(const Json& line, const char* key, bool fallback) {
  const auto it = line.find(key);
  if (it == line.end()) return fallback;
  if (!it->is_boolean()) return InvalidArgument("\"{}\" must be true or false", key);
  return it->get<bool>();
}

absl::StatusOr<std::vector<ChatMessage>> MessagesOf(const Json& list) {
  if (!list.is_array()) return InvalidArgument("\"messages\" must be a list");
  std::vector<ChatMessage> messages;
  for (size_t i = 0; i < list.size(); ++i) {
    if (!list[i].is_object()) return InvalidArgument("messages[{}] must be an object", i);
    ChatMessage message;
    Json further = Json::object();
    for (const auto& [key, value] : list[i].items()) {
      if (key != "role" && key != "content") {
        further[key] = value;
        continue;
      }
      if (key == "content" && value.is_null()) continue;
      if (!value.is_string()) return InvalidArgument("messages[{}].{} must be a string", i, key);
      if (key == "role") message.role = value.get<std::string>();
      if (key == "content") message.content = value.get<std::string>();
    }
    if (!list[i].contains("role") || (!list[i].contains("content") && !list[i].contains("tool_calls"))) {
      return InvalidArgument("messages[{}] needs \"role\" and \"content\"", i);
    }
    if (!further.empty()) message.extra_json = further.dump();
    messages.push_back(std::move(message));
  }
  return messages;
}

absl::StatusOr<Json> TokenizeMessages(const Model& model, const Json& line) {
  if (!model.chat_template.ok()) return model.chat_template.status();
  SPLICE_ASSIGN_OR_RETURN(const std::vector<ChatMessage> messages, MessagesOf(line["messages"]));
  RenderOptions options;
  SPLICE_ASSIGN_OR_RETURN(options.continue_final_message, Flag(line, "continue_final_message", false));
  SPLICE_ASSIGN_OR_RETURN(options.add_generation_prompt,
                          Flag(line, "add_generation_prompt", !options.continue_final_message));
  Json variables = line.value("chat_template_kwargs", Json::object());
  for (const char* name : {"tools", "documents", "reasoning_effort"}) {
    if (line.contains(name) && !line[name].is_null()) variables[name] = line[name];
  }
  if (!variables.empty()) options.extra_json = variables.dump();
  SPLICE_ASSIGN_OR_RETURN(const std::string prompt, (*model.chat_template)->Render(messages, options));
  SPLICE_ASSIGN_OR_RETURN(const std::vector<TokenId> ids, model.tokenizer->Encode(prompt, {}));
  return Json{{"ids", ids}, {"text", prompt}};
}

absl::StatusOr<Json> TokenizeText(const Model& model, const Json& line) {
  if (!line["text"].is_string()) return InvalidArgument("\"text\" must be a string");
  SPLICE_ASSIGN_OR_RETURN(const bool add_special_tokens, Flag(line, "add_special_tokens", false));
  SPLICE_ASSIGN_OR_RETURN(const std::vector<TokenId> ids,
                          model.tokenizer->Encode(line["text"].get<std::string>(), {add_special_tokens, true}));
  SPLICE_ASSIGN_OR_RETURN(const std::string text, model.tokenizer->Decode(ids, {.skip_special_tokens = false}));
  return Json{{"ids", ids}, {"text", text}};
}

absl::StatusOr<Json> TokenizeLine(const Model& model, const std::string& text) {
  Json line;
  try {
    line = Json::parse(text);
  } catch (const nlohmann::json::exception& error) {
    return InvalidArgument("not JSON: {}", error.what());
  }
  if (!line.is_object()) return InvalidArgument("must be an object, it is {}", line.type_name());
  if (line.contains("messages")) return TokenizeMessages(model, line);
  if (line.contains("text")) return TokenizeText(model, line);
  return InvalidArgument("needs \"text\" or \"messages\"");
}

absl::Status TokenizeStream(const Model& model, const Options& options, std::istream& in, std::ostream& out) {
  int line_number = 0;
  for (std::string text; std::getline(in, text);) {
    ++line_number;
    if (text.find_first_not_of(" \t\r") == std::string::npos) continue;
    const absl::StatusOr<Json> result = TokenizeLine(model, text);
    if (!result.ok()) return Annotate(result.status(), fmt::format("{}:{}", options.input, line_number));
    out << result->dump() << '\n';
  }
  if (in.bad()) return Errorf(absl::StatusCode::kDataLoss, "cannot read {}", options.input);
  out.flush();
  if (!out) return Errorf(absl::StatusCode::kDataLoss, "cannot write {}", options.output);
  return absl::OkStatus();
}

absl::Status RunTokenize(const Options& options) {
  Model model;
  SPLICE_ASSIGN_OR_RETURN(model.tokenizer, Tokenizer::Load(options.model));
  model.chat_template = ChatTemplate::Load(options.model);
  std::ifstream input_file;
  std::ofstream output_file;
  if (options.input != "-") {
    input_file.open(options.input, std::ios::binary);
    if (!input_file) return Errorf(absl::StatusCode::kNotFound, "cannot open {}", options.input);
  }
  if (options.output != "-") {
    output_file.open(options.output, std::ios::binary);
    if (!output_file) return Errorf(absl::StatusCode::kNotFound, "cannot write {}", options.output);
  }
  return TokenizeStream(model, options, options.input == "-" ? std::cin : input_file,
                        options.output == "-" ? std::cout : output_file);
}

}  // namespace

Command MakeTokenizeCommand(CLI::App& root) {
  CLI::App* app = root.add_subcommand("tokenize", "Turn texts and chats into token ids");
  const auto options = std::make_shared<Options>();
  app->add_option("--model", options->model, kModelHelp)->required()->type_name("DIR|ORG/NAME");
  app->add_option("--input", options->input, "JSON Lines to read; - is standard input")
      ->required()
      ->type_name("F.jsonl");
  app->add_option("--output", options->output, "JSON Lines to write; - is standard output")
      ->required()
      ->type_name("G.jsonl");
  app->footer(kFooter);
  return {app, [options]() -> absl::Status {
            SPLICE_RETURN_IF_ERROR(ResolveModel(options->model, hub::FolderUse::kTextOnly));
            return RunTokenize(*options);
          }};
}

}  // namespace spl::cli
