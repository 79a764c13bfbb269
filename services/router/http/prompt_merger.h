// Several prompts of one request, answered as one.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "services/router/dispatch/generation.h"

namespace spl::router {

// Puts the outputs of one generation for each prompt together for one sink: continuation i of prompt p has the index
// p * n + i there. The sink's end is that of the last prompt, with sums of tokens and a receipt for each. If a prompt
// fails, the sink gets its error, and the others are cancelled. Thread-safe; keeps no generation alive.
class PromptMerger : public std::enable_shared_from_this<PromptMerger> {
 public:
  PromptMerger(std::shared_ptr<GenerationSink> sink, size_t num_prompts, uint32_t num_continuations)
      : sink_(std::move(sink)), num_continuations_(num_continuations), finals_(num_prompts), num_open_(num_prompts) {}

  // The sink of one prompt's generation.
  std::shared_ptr<GenerationSink> SinkOf(size_t prompt);
  // Call once, before any generation is started.
  void SetGenerations(std::vector<std::weak_ptr<Generation>> generations);
  void Cancel(const absl::Status& reason);
  void Resume();

 private:
  class Part;
  std::vector<std::weak_ptr<Generation>> Generations();
  void OnPrompt(uint32_t num_tokens, std::span<const TokenId> prompt);
  bool OnOutput(size_t prompt, std::span<const Delta> deltas, const FinalInfo* final);
  void OnError(const absl::Status& status);

  const std::shared_ptr<GenerationSink> sink_;
  const uint32_t num_continuations_;

  std::mutex mutex_;                                    // guards all below, and the calls of the sink
  std::vector<std::weak_ptr<Generation>> generations_;  // [prompt]
  std::vector<FinalInfo> finals_;                       // [prompt]
  size_t num_open_;                                     // prompts that have not ended
  uint32_t prompt_tokens_ = 0;                          // sum over the known prompts
  bool failed_ = false;
};

}  // namespace spl::router
