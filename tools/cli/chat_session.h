// The conversation of `splice chat`: reads what is typed, carries out its commands, and shows the answers.
#pragma once

#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/status.h"
#include "tools/cli/chat_settings.h"
#include "tools/cli/interrupt_event.h"
#include "tools/cli/line_reader.h"
#include "tools/cli/terminal.h"
#include "tools/cli/text_generator.h"

namespace spl::cli {

// One thread.
class ChatSession {
 public:
  struct Options {
    std::string system;  // system message; empty: none
    // A person types. Otherwise nothing is explained, and the first failed answer ends Run.
    bool terminal = false;
    Style out, err;                                                   // for standard output and standard error
    std::function<void(const std::string& text)> on_typed = nullptr;  // every message and command; may be null
  };

  // Borrows all of them.
  ChatSession(TextGenerator& generator, LineReader& reader, InterruptEvent& interrupt, ChatSettings settings,
              Options options);

  // Talks until the input ends, /quit, or Ctrl-C twice at the prompt. Without a terminal: the error of an answer, and
  // Cancelled after one Ctrl-C.
  absl::Status Run();

 private:
  enum class Input { kMessage, kInterrupted, kEnd };
  absl::StatusOr<Input> ReadMessage(std::string& message);
  // Reads on to the closing """. `message` begins with the text behind the opening one.
  absl::StatusOr<Input> ReadBlock(std::string& message);
  absl::StatusOr<bool> RunCommand(const std::string& line);  // false: the program ends
  absl::Status Answer(const std::string& message);
  absl::StatusOr<TextResult> Generate(const TextRequest& request, std::string& text);
  void Forget();
  void SetSystem(const std::string& text);
  void Note(const std::string& text) const;
  void ShowStatistics(const TextResult& result) const;

  TextGenerator& generator_;
  LineReader& reader_;
  InterruptEvent& interrupt_;
  ChatSettings settings_;
  Options options_;
  nlohmann::json messages_;
  nlohmann::json receipt_;  // the last answer's; null: it had none
  std::string session_;     // by which the server keeps the conversation's KV from turn to turn
  bool interrupted_once_ = false;
};

}  // namespace spl::cli
