// splice chat: a conversation on the terminal.
#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <memory>

#include "services/base/status.h"
#include "tools/cli/chat_history.h"
#include "tools/cli/chat_session.h"
#include "tools/cli/command.h"
#include "tools/cli/model_fetch.h"
#include "tools/cli/source_flags.h"

namespace spl::cli {
namespace {

struct Flags {
  SourceFlags source;
  std::string system = "You are a helpful assistant.";
  int64_t max_tokens = 512;
  std::optional<double> temperature;
  bool no_history = false;
};

void Greet(const Flags& flags, const ModelFacts& model, Style style) {
  const std::string where = flags.source.endpoint.empty() ? "in this process" : "at " + flags.source.endpoint;
  const std::string context = model.max_context > 0 ? fmt::format(", context {} tokens", model.max_context) : "";
  fmt::print(stderr, "{} {}{}. {}\n", style.Bold(model.name), where, context,
             style.Dim("/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends."));
}

// The history of earlier runs, and whatever is typed in this one. Null: none is kept.
std::unique_ptr<ChatHistory> OpenHistory(const Flags& flags) {
  const std::string path = flags.no_history ? "" : ChatHistory::DefaultPath();
  if (path.empty()) return nullptr;
  auto history = ChatHistory::Open(path);
  if (history.ok()) return std::make_unique<ChatHistory>(*std::move(history));
  fmt::print(stderr, "no history is kept: {}\n", MessageOf(history.status()));
  return nullptr;
}

absl::Status RunChat(const Flags& flags) {
  SPLICE_ASSIGN_OR_RETURN(auto generator, MakeTextGenerator(flags.source));
  SPLICE_ASSIGN_OR_RETURN(const ModelFacts model, generator->DescribeModel());
  ChatSettings settings(/*in_process=*/flags.source.endpoint.empty());
  settings.max_tokens() = flags.max_tokens;
  settings.temperature() = flags.temperature;
  ChatSession::Options options{.system = flags.system,
                               .terminal = ::isatty(STDIN_FILENO) != 0,
                               .out = {.color = HasColor(STDOUT_FILENO)},
                               .err = {.color = HasColor(STDERR_FILENO)}};
  InterruptEvent interrupt;
  std::unique_ptr<LineReader> reader;
  std::unique_ptr<ChatHistory> history;
  if (options.terminal && ::isatty(STDOUT_FILENO) != 0 && !IsDumbTerminal())
    reader = MakeTerminalReader(interrupt, options.out);
  if (reader != nullptr) history = OpenHistory(flags);
  if (reader == nullptr) reader = MakePlainReader(interrupt, /*prompts=*/options.terminal);
  if (history != nullptr) {
    for (const std::string& entry : history->entries()) reader->AddToHistory(entry);
    options.on_typed = [&history](const std::string& text) { history->Add(text); };
  }
  if (options.terminal) Greet(flags, model, options.err);
  return ChatSession(*generator, *reader, interrupt, std::move(settings), std::move(options)).Run();
}

}  // namespace

Command MakeChatCommand(CLI::App& root) {
  auto flags = std::make_shared<Flags>();
  CLI::App& app = *root.add_subcommand("chat", "Talk to a server (--endpoint) or to a model in this process (--model)");
  app.footer(
      "Example:\n  splice chat --endpoint http://127.0.0.1:8000\n"
      "Shows the time to the first token, tokens per second and how much of the prompt was cached. /help lists what "
      "can\n"
      "be typed. On a terminal it keeps what was typed in $XDG_STATE_HOME/splice/chat_history (~/.local/state).");
  AddSourceFlags(app, flags->source);
  AddPromptFlags(app, flags->source);
  app.add_option("--system", flags->system, "system message; empty: none")->capture_default_str();
  app.add_option("--max-tokens", flags->max_tokens, "tokens of an answer at most")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--temperature", flags->temperature, "0: greedy; default: the model's, otherwise 1")
      ->check(CLI::NonNegativeNumber);
  app.add_flag("--no-history", flags->no_history, "neither read nor keep what was typed");
  return {&app, [flags]() -> absl::Status {
            SPLICE_RETURN_IF_ERROR(ResolveModel(flags->source.model.dir));
            return RunChat(*flags);
          }};
}

}  // namespace spl::cli
