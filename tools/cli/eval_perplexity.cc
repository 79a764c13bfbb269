#include "tools/cli/eval_perplexity.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "services/base/status.h"
#include "services/methods/methods.h"
#include "services/router/request/reuse_json.h"
#include "services/wire/convert.h"
#include "spl/v1/common.pb.h"
#include "tools/cli/eval_data.h"

namespace spl::cli {
namespace {

using nlohmann::json;

absl::StatusOr<std::vector<PerplexityWindow>> TextWindows(const std::string& path,
                                                          const tokenizer::Tokenizer& tokenizer,
                                                          const PerplexityOptions& options) {
  SPLICE_ASSIGN_OR_RETURN(const std::string text, ReadMaybeXz(path));
  SPLICE_ASSIGN_OR_RETURN(const std::vector<int32_t> ids, tokenizer.Encode(text, {.parse_special_tokens = false}));
  const int64_t begin_tokens = tokenizer.bos_id().has_value() ? 1 : 0;
  const int64_t window = options.context_tokens - begin_tokens + options.scored_tokens;
  const auto num_ids = static_cast<int64_t>(ids.size());
  const int64_t num_windows = std::min(options.num_windows, num_ids / window);
  if (num_windows == 0)
    return InvalidArgument("{} has {} tokens; a window of --context {} and --tokens {} needs {}", path, num_ids,
                           options.context_tokens, options.scored_tokens, window);
  std::vector<PerplexityWindow> windows;
  for (int64_t i = 0; i < num_windows; ++i) {
    const int64_t begin = num_windows == 1 ? 0 : (num_ids - window) * i / (num_windows - 1);
    PerplexityWindow& one = windows.emplace_back();
    one.name = fmt::format("token {}", begin);
    if (begin_tokens > 0) one.context.push_back(*tokenizer.bos_id());
    const auto from = ids.begin() + begin, middle = from + options.context_tokens - begin_tokens;
    one.context.insert(one.context.end(), from, middle);
    one.continuation.assign(middle, middle + options.scored_tokens);
  }
  return windows;
}

// Makes a window from a sample, as a conversation that has already taken place.
absl::StatusOr<PerplexityWindow> SampleWindow(const EvalSample& sample, const tokenizer::Tokenizer& tokenizer) {
  PerplexityWindow window{.name = sample.id};
  std::vector<EvalSegment> segments = sample.segments;
  const bool in_turns = std::any_of(segments.begin(), segments.end(),
                                    [](const EvalSegment& s) { return s.kind == EvalSegment::Kind::kAnswer; });
  if (!in_turns) segments.push_back({EvalSegment::Kind::kAnswer, ""});
  size_t place = 0;
  for (const EvalSegment& segment : segments) {
    const bool is_answer = segment.kind == EvalSegment::Kind::kAnswer;
    const std::string text = is_answer ? sample.answers[place++] + "<|im_end|>" : segment.text;
    SPLICE_ASSIGN_OR_RETURN(const std::vector<int32_t> ids, tokenizer.Encode(text, {.parse_special_tokens = true}));
    std::vector<int32_t>& part = place == 0 ? window.context : window.continuation;
    part.insert(part.end(), ids.begin(), ids.end());
    if (place > 0) window.is_answer.insert(window.is_answer.end(), ids.size(), is_answer);
  }
  return window;
}

absl::StatusOr<std::vector<PerplexityWindow>> SampleWindows(const std::string& path,
                                                            const tokenizer::Tokenizer& tokenizer,
                                                            const PerplexityOptions& options) {
  SPLICE_ASSIGN_OR_RETURN(const std::vector<EvalSample> samples, LoadEvalData(path));
  std::vector<PerplexityWindow> fitting;
  for (const EvalSample& sample : samples) {
    SPLICE_ASSIGN_OR_RETURN(PerplexityWindow window, SampleWindow(sample, tokenizer));
    const auto context = static_cast<int64_t>(window.context.size());
    if (context > options.context_tokens || context < options.context_tokens / 2) continue;
    const size_t scored = std::min(window.continuation.size(), static_cast<size_t>(options.scored_tokens));
    window.continuation.resize(scored);
    window.is_answer.resize(scored);
    fitting.push_back(std::move(window));
  }
  if (fitting.empty())
    return InvalidArgument("{}: no sample has between {} and {} tokens in front of its first answer; set --context",
                           path, options.context_tokens / 2, options.context_tokens);
  // Spreads the samples over the set, because sets are often sorted by task.
  const auto num_fitting = static_cast<int64_t>(fitting.size());
  const int64_t num_windows = std::min(options.num_windows, num_fitting);
  std::vector<PerplexityWindow> windows;
  for (int64_t i = 0; i < num_windows; ++i) windows.push_back(std::move(fitting[i * num_fitting / num_windows]));
  return windows;
}

bool Counts(const PerplexityWindow& window, size_t token, bool answers_only) {
  return !answers_only || (!window.is_answer.empty() && window.is_answer[token]);
}

// Sum and count of the scores of one window. Count 0: no token counts.
struct Sum {
  double score = 0;
  int64_t tokens = 0;
};
Sum SumOf(const std::vector<double>& scores, const PerplexityWindow& window, bool answers_only) {
  Sum sum;
  for (size_t i = 0; i < scores.size(); ++i) {
    if (!Counts(window, i, answers_only)) continue;
    sum.score += scores[i];
    ++sum.tokens;
  }
  return sum;
}

const PerplexityResult* DenseOf(std::span<const PerplexityResult> results) {
  const auto dense = std::find_if(results.begin(), results.end(),
                                  [](const PerplexityResult& r) { return methods::IsDense(r.decode); });
  return dense == results.end() ? nullptr : &*dense;
}

// Smallest and largest ratio of a window's perplexity to that of the dense method in the same window.
std::pair<double, double> RatioRange(const PerplexityResult& result, const PerplexityResult& dense,
                                     std::span<const PerplexityWindow> windows, bool answers_only) {
  std::pair<double, double> range = {HUGE_VAL, 0};
  for (size_t w = 0; w < windows.size(); ++w) {
    const Sum own = SumOf(result.scores[w], windows[w], answers_only);
    if (own.tokens == 0) continue;
    const double ratio =
        std::exp((SumOf(dense.scores[w], windows[w], answers_only).score - own.score) / double(own.tokens));
    range = {std::min(range.first, ratio), std::max(range.second, ratio)};
  }
  return range;
}

int64_t NumTokens(std::span<const PerplexityWindow> windows, bool answers_only) {
  int64_t tokens = 0;
  for (const PerplexityWindow& window : windows) {
    for (size_t i = 0; i < window.continuation.size(); ++i) tokens += Counts(window, i, answers_only);
  }
  return tokens;
}

}  // namespace

absl::StatusOr<std::vector<PerplexityWindow>> LoadPerplexityWindows(const std::string& path,
                                                                    const tokenizer::Tokenizer& tokenizer,
                                                                    const PerplexityOptions& options) {
  if (options.context_tokens < 2 || options.scored_tokens < 1 || options.num_windows < 1)
    return InvalidArgument("--context {} must be at least 2, --tokens {} and --windows {} at least 1",
                           options.context_tokens, options.scored_tokens, options.num_windows);
  const bool is_set = path.ends_with(".jsonl") || path.ends_with(".jsonl.xz");
  return is_set ? SampleWindows(path, tokenizer, options) : TextWindows(path, tokenizer, options);
}

absl::StatusOr<engine::DecodeOptions> EngineDecodeOptions(const EvalMethod& method) {
  router::Json request = method.options;
  request["decode"] = method.decode;
  v1::ReuseOptions proto;
  router::ObjectReader reader(request, "");
  router::ReadReuseOptions(reader, proto);
  const absl::Status read = reader.Finish();
  if (!read.ok()) return Annotate(read, "--decode " + method.decode_label);
  return wire::DecodeOptionsOf(proto);
}

absl::StatusOr<PerplexityResult> MeasurePerplexity(const std::shared_ptr<const engine::Model>& model,
                                                   std::span<const PerplexityWindow> windows, const EvalMethod& method,
                                                   int32_t num_threads, const std::function<void()>& on_window) {
  engine::LocalGeneratorOptions options{.executor = {.num_threads = num_threads}, .reuse = "exact"};
  SPLICE_ASSIGN_OR_RETURN(options.decode, EngineDecodeOptions(method));
  SPLICE_RETURN_IF_ERROR(engine::ValidateDecodeOptions(options.decode, model->config()));
  for (const PerplexityWindow& window : windows)
    options.max_tokens =
        std::max(options.max_tokens, static_cast<int64_t>(window.context.size() + window.continuation.size()));
  // The pool needs room for compact pages, too.
  options.max_tokens *= 2;
  SPLICE_ASSIGN_OR_RETURN(const auto generator, engine::LocalGenerator::Create(model, options));
  PerplexityResult result{.decode = method.decode_label};
  const auto start = std::chrono::steady_clock::now();
  for (const PerplexityWindow& window : windows) {
    auto scores = generator->ScoreContinuation(window.context, window.continuation);
    if (!scores.ok()) return Annotate(scores.status(), "window " + window.name);
    result.scores.push_back(std::move(*scores));
    on_window();
  }
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

double Perplexity(const PerplexityResult& result, std::span<const PerplexityWindow> windows, bool answers_only) {
  Sum sum;
  for (size_t w = 0; w < windows.size(); ++w) {
    const Sum one = SumOf(result.scores[w], windows[w], answers_only);
    sum.score += one.score;
    sum.tokens += one.tokens;
  }
  return sum.tokens == 0 ? 0 : std::exp(-sum.score / double(sum.tokens));
}

void PrintPerplexityTable(std::span<const PerplexityResult> results, std::span<const PerplexityWindow> windows) {
  int64_t context = 0;
  for (const PerplexityWindow& window : windows)
    context = std::max(context, static_cast<int64_t>(window.context.size()));
  const int64_t answers = NumTokens(windows, true);
  fmt::print("{} windows, {} tokens behind contexts of up to {}", windows.size(), NumTokens(windows, false), context);
  if (answers > 0) fmt::print("; {} of them are answers", answers);
  fmt::print("\n{:<44} {:>10} {:>9} {:>17}", "decode", "perplexity", "to dense", "windows");
  if (answers > 0) fmt::print(" {:>10} {:>9} {:>17}", "of answers", "to dense", "windows");
  fmt::print(" {:>8}\n", "seconds");
  const PerplexityResult* const dense = DenseOf(results);
  for (const PerplexityResult& result : results) {
    fmt::print("{:<44}", result.decode);
    for (const bool answers_only : {false, true}) {
      if (answers_only && answers == 0) continue;
      const double perplexity = Perplexity(result, windows, answers_only);
      fmt::print(" {:>10.4f}", perplexity);
      if (dense == nullptr) {
        fmt::print(" {:>9} {:>17}", "-", "-");
        continue;
      }
      const auto [least, largest] = RatioRange(result, *dense, windows, answers_only);
      fmt::print(" {:>9.4f} {:>17}", perplexity / Perplexity(*dense, windows, answers_only),
                 fmt::format("{:.4f} – {:.4f}", least, largest));
    }
    fmt::print(" {:>8.1f}\n", result.seconds);
  }
}

json PerplexityJson(std::span<const PerplexityResult> results, std::span<const PerplexityWindow> windows) {
  const PerplexityResult* const dense = DenseOf(results);
  json methods = json::array();
  for (const PerplexityResult& result : results) {
    json method = {{"decode", result.decode}, {"seconds", result.seconds}};
    for (const bool answers_only : {false, true}) {
      if (NumTokens(windows, answers_only) == 0) continue;
      const double perplexity = Perplexity(result, windows, answers_only);
      json& entry = method[answers_only ? "answers" : "all"];
      entry = {{"perplexity", perplexity}, {"tokens", NumTokens(windows, answers_only)}};
      if (dense != nullptr) entry["to_dense"] = perplexity / Perplexity(*dense, windows, answers_only);
    }
    for (size_t w = 0; w < windows.size(); ++w) {
      const Sum sum = SumOf(result.scores[w], windows[w], false);
      method["windows"].push_back({{"name", windows[w].name},
                                   {"context_tokens", windows[w].context.size()},
                                   {"tokens", sum.tokens},
                                   {"perplexity", std::exp(-sum.score / double(sum.tokens))}});
    }
    methods.push_back(std::move(method));
  }
  return {{"perplexity", methods}};
}

}  // namespace spl::cli
