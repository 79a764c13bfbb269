// Measures the perplexity of decode methods. One exact prefill computes the context. The tokens behind it are decoded
// one by one, and each step gets the true token: a prefill alone would not use the decode method.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/engine/engine.h"
#include "services/tokenizer/tokenizer.h"
#include "tools/cli/eval_method.h"

namespace spl::cli {

struct PerplexityWindow {
  std::string name;  // its source
  std::vector<int32_t> context, continuation;
  // [continuation.size()]: tokens of the continuation that belong to an answer of a sample. Empty: plain text.
  std::vector<bool> is_answer;
};

struct PerplexityOptions {
  int64_t context_tokens = 4096;  // including the begin token
  int64_t scored_tokens = 256;
  int64_t num_windows = 4;
};

// Loads num_windows windows from a file. InvalidArgument: there is not a single window.
//
// From a text: windows of context and scored tokens, spread evenly over the text, without overlap; fewer if it is too
// short. Each begins with the begin token, if the tokenizer has one.
//
// From a .jsonl or .jsonl.xz evaluation set: samples, spread over the set, whose text in front of the first answer has
// between context_tokens / 2 and context_tokens tokens. Scoring begins with that answer and continues through later
// turns, for at most scored_tokens.
absl::StatusOr<std::vector<PerplexityWindow>> LoadPerplexityWindows(const std::string& path,
                                                                    const tokenizer::Tokenizer& tokenizer,
                                                                    const PerplexityOptions& options);

// The engine's options for a method. InvalidArgument names an unknown option.
absl::StatusOr<engine::DecodeOptions> EngineDecodeOptions(const EvalMethod& method);

// [window][scored token]: ln p.
using WindowScores = std::vector<std::vector<double>>;

struct PerplexityResult {
  std::string decode;  // label in the user's spelling
  WindowScores scores;
  double seconds = 0;  // including prefills
};

// Calls on_window after each window. Errors are those of the engine.
absl::StatusOr<PerplexityResult> MeasurePerplexity(const std::shared_ptr<const engine::Model>& model,
                                                   std::span<const PerplexityWindow> windows, const EvalMethod& method,
                                                   int32_t num_threads, const std::function<void()>& on_window);

// exp(- mean score of all tokens, or of the answers' only). 0: there are no such tokens.
double Perplexity(const PerplexityResult& result, std::span<const PerplexityWindow> windows, bool answers_only);

// Prints a line for each method: perplexity and its ratio to the first dense method; both again for answers, if there
// are any.
void PrintPerplexityTable(std::span<const PerplexityResult> results, std::span<const PerplexityWindow> windows);
nlohmann::json PerplexityJson(std::span<const PerplexityResult> results, std::span<const PerplexityWindow> windows);

}  // namespace spl::cli
