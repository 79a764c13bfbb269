// splice chat: a conversation on the terminal.
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <iostream>
#include <memory>

#include "services/base/ids.h"
#include "services/base/status.h"
#include "tools/cli/command.h"
#include "tools/cli/model_fetch.h"
#include "tools/cli/source_flags.h"

namespace spl::cli {
namespace {

using nlohmann::json;

struct Flags {
  SourceFlags source;
  std::string system = "You are a helpful assistant.";
  int64_t max_tokens = 512;
  std::optional<double> temperature;
};

std::atomic<bool> interrupted{false};
static_assert(std::atomic<bool>::is_always_lock_free);  // set by a signal handler

// Ctrl-C ends the answer; at the prompt it ends the program.
void OnInterrupt(int) { interrupted.store(true); }

absl::Status RunChat(const Flags& flags) {
  SPLICE_ASSIGN_OR_RETURN(auto generator, MakeTextGenerator(flags.source));
  const bool terminal = ::isatty(STDIN_FILENO) != 0;
  if (terminal)
    fmt::print(stderr, "Talking to {}. Empty line or Ctrl-D ends, /new forgets, Ctrl-C stops an answer.\n",
               generator->description());
  struct sigaction action {};
  action.sa_handler = OnInterrupt;
  ::sigaction(SIGINT, &action, nullptr);  // without SA_RESTART: a read at the prompt ends too
  const json first =
      flags.system.empty() ? json::array() : json::array({{{"role", "system"}, {"content", flags.system}}});
  json messages = first;
  // The server keeps the conversation's KV from turn to turn.
  std::string session = RandomId::Make().ToHex();
  std::string line;
  while (true) {
    if (terminal) fmt::print("\n> ");
    std::fflush(stdout);
    interrupted = false;
    if (!std::getline(std::cin, line) || line.empty() || interrupted) break;
    if (line == "/new") {
      messages = first;
      session = RandomId::Make().ToHex();
      continue;
    }
    messages.push_back({{"role", "user"}, {"content", line}});
    TextRequest request{
        .messages = messages, .max_tokens = flags.max_tokens, .temperature = flags.temperature, .model_sampling = true};
    request.reuse_options = {{"session", session}};
    const auto result = generator->Generate(request, [](const std::string& piece) {
      std::fwrite(piece.data(), 1, piece.size(), stdout);
      std::fflush(stdout);
      return !interrupted.load();
    });
    if (!result.ok()) {
      messages.erase(messages.size() - 1);
      if (!terminal) return result.status();
      fmt::print(stderr, "\n{}\n", MessageOf(result.status()));
      continue;
    }
    fmt::print("\n");
    messages.push_back({{"role", "assistant"}, {"content", result->text}});
    if (terminal)
      fmt::print(stderr, "[TTFT {:.0f} ms, {:.1f} tokens/s, {} of {} prompt tokens cached]\n", result->ttft_s * 1e3,
                 result->tokens_per_s(), result->cached_tokens, result->prompt_tokens);
  }
  return absl::OkStatus();
}

}  // namespace

Command MakeChatCommand(CLI::App& root) {
  auto flags = std::make_shared<Flags>();
  CLI::App& app = *root.add_subcommand("chat", "Talk to a server (--endpoint) or to a model in this process (--model)");
  app.footer(
      "Example:\n  splice chat --endpoint http://127.0.0.1:8000\n"
      "Shows the time to the first token, tokens per second and how much of the prompt was cached.");
  AddSourceFlags(app, flags->source);
  AddPromptFlags(app, flags->source);
  app.add_option("--system", flags->system, "system message; empty: none")->capture_default_str();
  app.add_option("--max-tokens", flags->max_tokens, "tokens of an answer at most")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--temperature", flags->temperature, "0: greedy; default: the model's, otherwise 1")
      ->check(CLI::NonNegativeNumber);
  return {&app, [flags]() -> absl::Status {
            SPLICE_RETURN_IF_ERROR(ResolveModel(flags->source.model.dir));
            return RunChat(*flags);
          }};
}

}  // namespace spl::cli
