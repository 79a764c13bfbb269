// splice generate: one answer, from a running server or the plain in-process model.
#include <fmt/format.h>

#include <cstdio>
#include <memory>

#include "services/base/read_file.h"
#include "services/base/status.h"
#include "tools/cli/command.h"
#include "tools/cli/model_fetch.h"
#include "tools/cli/source_flags.h"
#include "tools/cli/text_generator.h"

namespace spl::cli {
namespace {

using nlohmann::json;

struct Flags {
  SourceFlags source;
  std::string prompt, prompt_file, messages_file;
  std::optional<int64_t> max_tokens;
  std::optional<double> temperature;
  std::string reuse, decode;
  bool json_output = false;
};

absl::StatusOr<TextRequest> MakeRequest(const Flags& flags) {
  TextRequest request{.max_tokens = flags.max_tokens,
                      .temperature = flags.temperature,
                      .model_sampling = true,
                      .reuse = flags.reuse,
                      .decode = flags.decode};
  if (!flags.messages_file.empty()) {
    SPLICE_ASSIGN_OR_RETURN(const std::string text, ReadFile(flags.messages_file));
    request.messages = json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (!request.messages.is_array()) return InvalidArgument("{}: not a JSON list of messages", flags.messages_file);
  } else if (!flags.prompt_file.empty()) {
    SPLICE_ASSIGN_OR_RETURN(request.text, ReadFile(flags.prompt_file));
  } else {
    request.text = flags.prompt;
  }
  return request;
}

json ToJson(const TextResult& r) {
  return {{"text", r.text},
          {"finish_reason", r.finish_reason},
          {"tokens", {{"prompt", r.prompt_tokens}, {"completion", r.completion_tokens}, {"cached", r.cached_tokens}}},
          {"ttft_ms", r.ttft_s * 1e3},
          {"total_ms", r.total_s * 1e3},
          {"tokens_per_s", r.tokens_per_s()},
          {"splice", r.receipt}};
}

absl::Status RunGenerate(const Flags& flags) {
  SPLICE_ASSIGN_OR_RETURN(const TextRequest request, MakeRequest(flags));
  SPLICE_ASSIGN_OR_RETURN(auto generator, MakeTextGenerator(flags.source));
  SPLICE_ASSIGN_OR_RETURN(const TextResult result, generator->Generate(request, [&](const std::string& piece) {
    if (!flags.json_output) {
      std::fwrite(piece.data(), 1, piece.size(), stdout);
      std::fflush(stdout);
    }
    return true;
  }));
  if (flags.json_output)
    fmt::print("{}\n", ToJson(result).dump());
  else
    fmt::print("\n");
  return absl::OkStatus();
}

}  // namespace

Command MakeGenerateCommand(CLI::App& root) {
  auto flags = std::make_shared<Flags>();
  CLI::App& app =
      *root.add_subcommand("generate", "One answer, from a server (--endpoint) or in this process (--model)");
  app.footer(
      "Example:\n"
      "  splice generate --endpoint http://127.0.0.1:8000 --prompt 'Once upon a time' --max-tokens 32\n"
      "  splice generate --model models/splice-tiny --messages chat.json --json\n"
      "chat.json: [{\"role\":\"user\",\"content\":\"Hello\"}]");
  AddSourceFlags(app, flags->source);
  AddPromptFlags(app, flags->source);
  auto* input = app.add_option_group("input");
  input->add_option("--prompt", flags->prompt, "text to continue; special tokens are parsed");
  input->add_option("--prompt-file", flags->prompt_file, "the same from a file");
  input->add_option("--messages", flags->messages_file, "JSON file with chat messages, rendered by the chat template");
  input->require_option(1);
  app.add_option("--max-tokens", flags->max_tokens, "tokens of the answer at most")->check(CLI::PositiveNumber);
  app.add_option("--temperature", flags->temperature, "0: greedy; default: the model's, otherwise 1")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--reuse", flags->reuse, "with --endpoint: prefill method, e.g. samkv; default: the server's choice");
  app.add_option("--decode", flags->decode,
                 "with --endpoint: decode method, e.g. sparcas; default: the server's choice");
  app.add_flag("--json", flags->json_output, "print one JSON object instead of text");
  return {&app, [flags]() -> absl::Status {
            SPLICE_RETURN_IF_ERROR(ResolveModel(flags->source.model.dir));
            return RunGenerate(*flags);
          }};
}

}  // namespace spl::cli
