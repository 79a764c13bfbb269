// The plain in-process model: one sequence at a time, prefill then decode, one pool, no network. The oracle that every
// cluster result is compared with, and what the tools run with --model.
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
  // Decoding with head classes: those of the model when the recovery policy uses them, or these whatever the policy.
  // Behind the prompt a sequence only keeps what they keep, or everything: tokens and logits are the same.
  std::shared_ptr<const StreamClasses> decode_classes;
  bool keep_all_kv = false;
};

// One thread at a time.
class LocalGenerator {
 public:
  static absl::StatusOr<std::unique_ptr<LocalGenerator>> Create(std::shared_ptr<const Model> model,
                                                                const LocalGeneratorOptions& options);

  // Runs the prompt and streams tokens of each fork to `on_token` (false from it stops that fork). Forks run one after
  // the other. InvalidArgument: empty prompt, prompt longer than the context, token outside the vocabulary.
  using OnToken = std::function<bool(int32_t fork, const SampledToken& token)>;
  absl::Status Generate(std::span<const int32_t> prompt, const SamplingParams& sampling, const OnToken& on_token);

  // ln p(continuation[i] | prompt, continuation[0, i)): the prompt in one prefill, then a decode step for each token
  // with the options' selector, whose input is the token that does come next instead of one drawn ("teacher forcing").
  // Their mean, negated, is the logarithm of the perplexity. [continuation.size()] Errors: as Generate; InvalidArgument
  // too: an empty continuation, both together longer than the context, a token outside the vocabulary. Cost: a prefill,
  // and continuation.size() - 1 steps with all logits on the host.
  absl::StatusOr<std::vector<double>> ScoreContinuation(std::span<const int32_t> prompt,
                                                        std::span<const int32_t> continuation);

  // Logits of every position, f32 [tokens, vocab].
  absl::StatusOr<std::vector<float>> AllLogits(std::span<const int32_t> prompt);

  const Model& model() const { return *model_; }

 private:
  LocalGenerator() = default;
  // Runs the prompt slice by slice; `on_slice` sees the executor after each.
  struct Prompt {
    std::unique_ptr<SequenceKv> kv;
    std::shared_ptr<const StreamClasses> classes;  // to decode with, restored heads global; null: none
  };
  absl::StatusOr<Prompt> RunPrompt(std::span<const int32_t> prompt,
                                   const std::function<absl::Status(int32_t rows)>& on_slice);
  // The prompt with the logits behind it, f32 [vocab]; valid until the executor's next pass. What its classes leave out
  // is given back.
  struct FirstLogits {
    Prompt prompt;
    std::span<float> logits;
  };
  absl::StatusOr<FirstLogits> RunToFirstLogits(std::span<const int32_t> prompt);
  // A sequence behind its prompt: one Step for each token that is put behind it; the executor then has the next logits.
  struct Decoding {
    Prompt prompt;
    std::unique_ptr<TokenSelector> selector;
    std::unique_ptr<CompactPages> compact;  // null: the selector keeps nothing
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

// Shape of the model's head streams.
KvShape KvShapeOf(const ModelConfig& config);
// Pages that sequences of `num_tokens` positions in total need at most.
int64_t PagesForTokens(const ModelConfig& config, int64_t num_tokens);
// InvalidArgument names the first id that is outside the vocabulary; `what` they are is for the message.
absl::Status ValidateTokens(std::span<const int32_t> tokens, const ModelConfig& config, std::string_view what);
// InvalidArgument when a prompt is empty, too long, or has an id outside the vocabulary.
absl::Status ValidatePrompt(std::span<const int32_t> prompt, const ModelConfig& config);

}  // namespace spl::engine
