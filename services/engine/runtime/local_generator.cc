#include "services/engine/runtime/local_generator.h"

#include <algorithm>
#include <cmath>

#include "services/base/status.h"
#include "services/engine/methods/recovery_methods.h"
#include "services/engine/methods/selection_methods.h"
#include "services/engine/recovery/reuse_options.h"
#include "services/engine/runtime/prompt_replay.h"
#include "services/engine/runtime/prompt_run.h"

namespace spl::engine {

namespace {

ReuseOptions ReuseOf(const LocalGeneratorOptions& options) {
  return options.reuse_options.value_or(ReuseOptions{.policy = options.reuse});
}

// Of a softmax over one row; the sum in double, so that a perplexity compares methods and not roundings.
double LogProbability(std::span<const float> logits, int32_t token) {
  const double top = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - top);
  return logits[token] - top - std::log(sum);
}

}  // namespace

KvShape KvShapeOf(const ModelConfig& config) { return {config.num_layers, config.num_kv_heads}; }

int64_t PagesForTokens(const ModelConfig& config, int64_t num_tokens) {
  return static_cast<int64_t>(PagesFor(num_tokens)) * KvShapeOf(config).num_streams();
}

absl::Status ValidateTokens(std::span<const int32_t> tokens, const ModelConfig& config, std::string_view what) {
  for (const int32_t token : tokens) {
    if (token < 0 || token >= config.vocab_size)
      return InvalidArgument("{} {} is outside the vocabulary of {}", what, token, config.vocab_size);
  }
  return absl::OkStatus();
}

absl::Status ValidatePrompt(std::span<const int32_t> prompt, const ModelConfig& config) {
  if (prompt.empty()) return InvalidArgument("the prompt has no tokens");
  if (prompt.size() >= static_cast<size_t>(config.max_positions))
    return InvalidArgument("the prompt has {} tokens; the model's context is {}, and one must be left for the answer",
                           prompt.size(), config.max_positions);
  return ValidateTokens(prompt, config, "prompt token");
}

absl::StatusOr<std::unique_ptr<LocalGenerator>> LocalGenerator::Create(std::shared_ptr<const Model> model,
                                                                       const LocalGeneratorOptions& options) {
  auto generator = std::unique_ptr<LocalGenerator>(new LocalGenerator);
  generator->model_ = std::move(model);
  generator->options_ = options;
  const ModelConfig& config = generator->model_->config();
  generator->classes_ = options.decode_classes;
  if (generator->classes_ == nullptr && generator->model_->head_classes() != nullptr &&
      UsesHeadClasses(ReuseOf(options)))
    generator->classes_ = ServedClasses(*generator->model_->head_classes());
  // One page a stream on top: a fork owns a copy of the unfinished page.
  const int64_t tokens = (options.max_tokens > 0 ? options.max_tokens : config.max_positions) + kernels::kPageTokens;
  const int64_t pages = PagesForTokens(config, tokens);
  SPLICE_ASSIGN_OR_RETURN(generator->memory_, AllocateKvMemory(*generator->model_, pages));
  generator->pool_ = std::make_unique<PagePool>(generator->memory_->pages, generator->model_->backends());
  ExecutorOptions executor = options.executor;
  if (RunsWholeSpans(ReuseOf(options))) executor.max_span_rows = static_cast<int32_t>(tokens);
  SPLICE_ASSIGN_OR_RETURN(generator->executor_,
                          ParallelExecutor::Create(generator->model_, generator->memory_->pages, executor));
  return generator;
}

absl::StatusOr<LocalGenerator::Prompt> LocalGenerator::RunPrompt(std::span<const int32_t> prompt,
                                                                 const std::function<absl::Status(int32_t)>& on_slice) {
  SPLICE_RETURN_IF_ERROR(ValidatePrompt(prompt, model_->config()));
  SPLICE_ASSIGN_OR_RETURN(auto policy,
                          MakeRecoveryPolicy(ReuseOf(options_), model_->config(), model_->head_classes().get()));
  auto kv = std::make_unique<SequenceKv>(*pool_, KvShapeOf(model_->config()));
  SPLICE_RETURN_IF_ERROR(kv->Reserve(static_cast<int64_t>(prompt.size())));
  PromptRun run(prompt, {}, *kv, *policy);
  SPLICE_RETURN_IF_ERROR(run.Begin(*executor_));
  while (!run.done()) {
    const PrefillSlice slice = run.Next(executor_->max_rows());
    SPLICE_RETURN_IF_ERROR(executor_->Prefill({&slice, 1}, run.layers()));
    SPLICE_RETURN_IF_ERROR(run.Finish(*executor_));
    SPLICE_RETURN_IF_ERROR(on_slice(static_cast<int32_t>(slice.tokens.size())));
  }
  return Prompt{std::move(kv), classes_ == nullptr ? nullptr : WithRestored(classes_, run.restored_heads())};
}

absl::StatusOr<LocalGenerator::FirstLogits> LocalGenerator::RunToFirstLogits(std::span<const int32_t> prompt) {
  int32_t last_rows = 0;
  SPLICE_ASSIGN_OR_RETURN(Prompt computed, RunPrompt(prompt, [&](int32_t rows) {
                            last_rows = rows;
                            return absl::OkStatus();
                          }));
  if (computed.classes != nullptr && !options_.keep_all_kv) computed.kv->Compress(computed.classes);
  const int32_t last_row = last_rows - 1;
  SPLICE_RETURN_IF_ERROR(executor_->ComputeLogits({&last_row, 1}));
  SPLICE_ASSIGN_OR_RETURN(const std::span<float> logits, executor_->Logits());
  return FirstLogits{std::move(computed), logits};
}

absl::Status LocalGenerator::Generate(std::span<const int32_t> prompt, const SamplingParams& sampling,
                                      const OnToken& on_token) {
  const ModelConfig& config = model_->config();
  SPLICE_RETURN_IF_ERROR(ValidateSampling(sampling, config.vocab_size));
  SPLICE_ASSIGN_OR_RETURN(FirstLogits behind, RunToFirstLogits(prompt));
  Prompt& computed = behind.prompt;
  std::vector<Sampler> samplers = ForkSamplers(sampling, config.eos_ids, prompt, {}, config.max_positions);
  std::vector<Sampler*> each;
  for (Sampler& sampler : samplers) each.push_back(&sampler);
  const std::vector<int32_t> rows(each.size(), 0);
  SPLICE_ASSIGN_OR_RETURN(const auto first, row_sampler_.Sample(*executor_, each, rows));
  for (int32_t fork = 0; fork < sampling.num_forks; ++fork) {
    Sampler& sampler = samplers[fork];
    const SampledToken& token = first[fork];
    const bool last_fork = fork + 1 == sampling.num_forks;
    Prompt own{nullptr, computed.classes};
    if (last_fork) {
      own.kv = std::move(computed.kv);
    } else {
      SPLICE_ASSIGN_OR_RETURN(own.kv, computed.kv->Fork());
    }
    SPLICE_RETURN_IF_ERROR(RunFork(std::move(own), prompt, token, sampler, fork, on_token));
  }
  return absl::OkStatus();
}

absl::StatusOr<LocalGenerator::Decoding> LocalGenerator::BeginDecoding(Prompt prompt, std::span<const int32_t> tokens) {
  Decoding decoding{.prompt = std::move(prompt)};
  SPLICE_ASSIGN_OR_RETURN(decoding.selector, MakeTokenSelector(WithKeys(options_.decode, *model_), model_->config(),
                                                               decoding.prompt.classes));
  SPLICE_ASSIGN_OR_RETURN(decoding.compact,
                          MakeCompactPages(*decoding.selector, *model_, *pool_, decoding.prompt.kv->num_tokens()));
  if (PromptSelector* const selector = decoding.selector->of_prompt(); selector != nullptr) {
    const SequenceKv& kv = *decoding.prompt.kv;
    SPLICE_RETURN_IF_ERROR(decoding.compact->Reserve(kv.num_tokens() + 1));
    SPLICE_ASSIGN_OR_RETURN(const PromptKept kept, ChooseOfPrompt(*executor_, tokens, kv, *selector));
    SPLICE_RETURN_IF_ERROR(KeepPositions(*model_, *pool_, kept, kv.num_tokens(), *selector, *decoding.compact));
  }
  return decoding;
}

absl::Status LocalGenerator::Step(Decoding& decoding, int32_t token) {
  SequenceKv* const kv = decoding.prompt.kv.get();
  SPLICE_RETURN_IF_ERROR(kv->Reserve(kv->num_tokens() + 1));
  if (decoding.compact != nullptr) SPLICE_RETURN_IF_ERROR(decoding.compact->Reserve(kv->num_tokens() + 1));
  const DecodeRow row{token, kv, decoding.selector.get(), decoding.compact.get()};
  SPLICE_RETURN_IF_ERROR(executor_->Decode({&row, 1}));
  kv->set_num_tokens(kv->num_tokens() + 1);
  return absl::OkStatus();
}

absl::Status LocalGenerator::RunFork(Prompt prompt, std::span<const int32_t> tokens, SampledToken token,
                                     Sampler& sampler, int32_t fork, const OnToken& on_token) {
  SPLICE_ASSIGN_OR_RETURN(Decoding decoding, BeginDecoding(std::move(prompt), tokens));
  while (on_token(fork, token) && token.finish == FinishReason::kNone) {
    SPLICE_RETURN_IF_ERROR(Step(decoding, token.token));
    Sampler* const samplers[] = {&sampler};
    SPLICE_ASSIGN_OR_RETURN(const std::vector<SampledToken> sampled, row_sampler_.Sample(*executor_, samplers));
    token = sampled[0];
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<double>> LocalGenerator::ScoreContinuation(std::span<const int32_t> prompt,
                                                                      std::span<const int32_t> continuation) {
  const ModelConfig& config = model_->config();
  if (continuation.empty()) return InvalidArgument("the continuation has no tokens");
  if (prompt.size() + continuation.size() > static_cast<size_t>(config.max_positions))
    return InvalidArgument("the prompt has {} tokens and its continuation {}; the model's context is {}", prompt.size(),
                           continuation.size(), config.max_positions);
  SPLICE_RETURN_IF_ERROR(ValidateTokens(continuation, config, "continuation token"));
  SPLICE_ASSIGN_OR_RETURN(FirstLogits behind, RunToFirstLogits(prompt));
  std::vector<double> scores = {LogProbability(behind.logits, continuation[0])};
  SPLICE_ASSIGN_OR_RETURN(Decoding decoding, BeginDecoding(std::move(behind.prompt), prompt));
  for (size_t i = 1; i < continuation.size(); ++i) {
    SPLICE_RETURN_IF_ERROR(Step(decoding, continuation[i - 1]));
    SPLICE_ASSIGN_OR_RETURN(const std::span<float> logits, executor_->Logits());
    scores.push_back(LogProbability(logits, continuation[i]));
  }
  return scores;
}

absl::StatusOr<std::vector<float>> LocalGenerator::AllLogits(std::span<const int32_t> prompt) {
  std::vector<float> all;
  const auto collect = [&](int32_t rows) -> absl::Status {
    std::vector<int32_t> indices(rows);
    for (int32_t i = 0; i < rows; ++i) indices[i] = i;
    SPLICE_RETURN_IF_ERROR(executor_->ComputeLogits(indices));
    SPLICE_ASSIGN_OR_RETURN(const std::span<float> logits, executor_->Logits());
    all.insert(all.end(), logits.begin(), logits.end());
    return absl::OkStatus();
  };
  SPLICE_RETURN_IF_ERROR(RunPrompt(prompt, collect).status());
  return all;
}

}  // namespace spl::engine
