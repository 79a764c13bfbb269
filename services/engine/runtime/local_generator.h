// Runs a model in the process: one sequence at a time, prefill then decode, one pool, no network. Every cluster result
// is compared with it, and the tools use it with --model.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/engine/execution/parallel_executor.h"
#include "services/engine/recovery/reuse_options.h"
#include "services/engine/runtime/sample_rows.h"
#include "services/engine/runtime/sampler.h"

namespace spl::engine {

struct LocalGeneratorOptions {
  ExecutorOptions executor;
  int64_t max_tokens = 0;                     // positions the pool holds; 0: the model's context
  std::string reuse;                          // recovery policy
  std::optional<ReuseOptions> reuse_options;  // policy and numbers, instead of `reuse`
  DecodeOptions decode;
  // Head classes to decode with: the model's if the recovery policy uses them, or these whatever the policy. After the
  // prompt a sequence keeps only their KV, or all KV with keep_all_kv: tokens and logits are the same.
  std::shared_ptr<const StreamClasses> decode_classes;
  bool keep_all_kv = false;
};

// One thread at a time.
class LocalGenerator {
 public:
  static absl::StatusOr<std::unique_ptr<LocalGenerator>> Create(std::shared_ptr<const Model> model,
                                                                const LocalGeneratorOptions& options);

  // Runs the prompt and streams the tokens of each fork to `on_token`; false from it stops that fork. Forks run one
  // after the other. InvalidArgument: empty prompt, prompt longer than the context, token outside the vocabulary.
  using OnToken = std::function<bool(int32_t fork, const SampledToken& token)>;
  absl::Status Generate(std::span<const int32_t> prompt, const SamplingParams& sampling, const OnToken& on_token);

  // ln p(continuation[i] | prompt, continuation[0, i)). [continuation.size()]
  // Runs the prompt in one prefill, then a decode step for each token with the options' selector. Each step gets the
  // true token instead of a sampled one ("teacher forcing"). The negated mean is the logarithm of the perplexity.
  // Errors: as Generate; also InvalidArgument for an empty continuation, both together longer than the context, or a
  // token outside the vocabulary. Cost: a prefill, and continuation.size() - 1 steps with all logits on the host.
  absl::StatusOr<std::vector<double>> ScoreContinuation(std::span<const int32_t> prompt,
                                                        std::span<const int32_t> continuation);

  // Logits of every position, f32 [tokens, vocab].
  absl::StatusOr<std::vector<float>> AllLogits(std::span<const int32_t> prompt);

  const Model& model() const { return *model_; }

 private:
  LocalGenerator() = default;
  // Runs the prompt slice by slice; `on_slice` is called with the executor after each.
  struct Prompt {
    std::unique_ptr<SequenceKv> kv;
    std::shared_ptr<const StreamClasses> classes;  // to decode with, restored heads are global; null: none
  };
  absl::StatusOr<Prompt> RunPrompt(std::span<const int32_t> prompt,
                                   const std::function<absl::Status(int32_t rows)>& on_slice);
  // The prompt and the logits after it, f32 [vocab], valid until the executor's next pass. KV that its classes leave
  // out is given back.
  struct FirstLogits {
    Prompt prompt;
    std::span<float> logits;
  };
  absl::StatusOr<FirstLogits> RunToFirstLogits(std::span<const int32_t> prompt);
  // A sequence after its prompt. Step appends one token; the executor then has the next logits.
  struct Decoding {
    Prompt prompt;
    std::unique_ptr<TokenSelector> selector;
    std::unique_ptr<CompactPages> compact;  // null: the selector needs none
  };
  absl::StatusOr<Decoding> BeginDecoding(Prompt prompt, std::span<const int32_t> tokens);
  absl::Status Step(Decoding& decoding, int32_t token);
  absl::Status RunFork(Prompt prompt, std::span<const int32_t> tokens, SampledToken token, Sampler& sampler,
                       int32_t fork, const OnToken& on_token);

  std::shared_ptr<const Model> model_;
  LocalGeneratorOptions options_;
  std::optional<KvMemory> memory_;
  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<ParallelExecutor> executor_;
  RowSampler row_sampler_;
  std::shared_ptr<const StreamClasses> classes_;  // to decode with; null: none
};

// Shape of the model's head streams (block tables).
KvShape KvShapeOf(const ModelConfig& config);
// Upper bound of the pages for sequences of `num_tokens` positions in total.
int64_t PagesForTokens(const ModelConfig& config, int64_t num_tokens);
// InvalidArgument names the first id that is outside the vocabulary. `what` names the ids in the message.
absl::Status ValidateTokens(std::span<const int32_t> tokens, const ModelConfig& config, std::string_view what);
// InvalidArgument: the prompt is empty, too long, or has an id outside the vocabulary.
absl::Status ValidatePrompt(std::span<const int32_t> prompt, const ModelConfig& config);

}  // namespace spl::engine
