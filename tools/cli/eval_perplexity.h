// Perplexity of decode methods: the tokens of a text decoded one by one, each step fed the token that does come, behind
// a context that one exact prefill computed. Out of a prefill alone no decode method would ever be asked.
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
  std::string name;  // where it comes from
  std::vector<int32_t> context, continuation;
  // Of a sample: which tokens of the continuation are an answer's. Empty: it is plain text. [continuation.size()]
  std::vector<bool> is_answer;
};

struct PerplexityOptions {
  int64_t context_tokens = 4096;  // begin token included
  int64_t scored_tokens = 256;
  int64_t num_windows = 4;
};

// Of a text: that many windows of context and scored tokens, spread evenly over it, without overlap, fewer when it is
// too short; the begin token, where the tokenizer has one, stands in front of each. Of a .jsonl or .jsonl.xz evaluation
// set: as many samples, spread over the set, of those whose text in front of the first answer is between half of the
// context and the context; what is scored begins with that answer and goes on through later turns, at most the scored
// tokens. InvalidArgument: there is not one window.
absl::StatusOr<std::vector<PerplexityWindow>> LoadPerplexityWindows(const std::string& path,
                                                                    const tokenizer::Tokenizer& tokenizer,
                                                                    const PerplexityOptions& options);

// The engine's options for a method; InvalidArgument names an option that there is not.
absl::StatusOr<engine::DecodeOptions> EngineDecodeOptions(const EvalMethod& method);

// ln p of every scored token, by window.
using WindowScores = std::vector<std::vector<double>>;

struct PerplexityResult {
  std::string decode;  // label, as the user wrote it
  WindowScores scores;
  double seconds = 0;  // prefills included
};

// `on_window` is told after each window.
absl::StatusOr<PerplexityResult> MeasurePerplexity(const std::shared_ptr<const engine::Model>& model,
                                                   std::span<const PerplexityWindow> windows, const EvalMethod& method,
                                                   int32_t num_threads, const std::function<void()>& on_window);

// exp(- mean of the scores of the tokens that count); 0 where none does.
double Perplexity(const PerplexityResult& result, std::span<const PerplexityWindow> windows, bool answers_only);

// A line for each method: perplexity, ratio to the first dense method, and the same for answers where there are any.
void PrintPerplexityTable(std::span<const PerplexityResult> results, std::span<const PerplexityWindow> windows);
nlohmann::json PerplexityJson(std::span<const PerplexityResult> results, std::span<const PerplexityWindow> windows);

}  // namespace spl::cli
