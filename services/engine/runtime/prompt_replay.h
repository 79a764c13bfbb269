// What a selector that chooses once keeps of a prompt (selection/prompt_selector.h): rows of the prompt run through the
// model once more, over KV that is there, for what they attend to; the KV stays as it is.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/engine/cache/compact_pages.h"
#include "services/engine/cache/sequence_kv.h"
#include "services/engine/execution/parallel_executor.h"
#include "services/engine/selection/kept_positions.h"
#include "services/engine/selection/prompt_selector.h"

namespace spl::engine {

// Behind a prompt of which tokens were left out everything is as if the tokens that are there were the prompt: rows are
// those that every layer keeps, and see what their layer keeps; chosen is of that, by number. Layers that choose
// nothing keep all they have.
//
// `kv` has the KV of `prompt` and, where a sequence was begun elsewhere, of tokens generated behind it, which are all
// kept: what is kept is the same wherever it goes on. Rows are written to pages of their own: the sequence's may be
// shared, and hold what a method made of them. The logits and rows of the executor's last pass are lost.
// InvalidArgument: prompt is empty or longer than kv. ResourceExhausted: no pages for the rows, or no device memory.
// Cost: a pass of the selector's rows over the prompt (where layers keep different tokens, through the layers up to it
// for each layer that differs from the one in front), 4 · prompt.size() bytes of scores a head stream on the device
// and the host, and on the host a choice of each head, about 0.3 ms for 32K.
absl::StatusOr<KeptPositions> ChooseOfPrompt(ParallelExecutor& executor, std::span<const int32_t> prompt,
                                             const SequenceKv& kv, const PromptSelector& selector);

// The same in slices, so that other sequences take their steps in between; the choice does not depend on them. One
// thread. Holds pages for the rows until it is destroyed.
class PromptChoice {
 public:
  // All four outlive this. Errors as ChooseOfPrompt.
  static absl::StatusOr<std::unique_ptr<PromptChoice>> Begin(ParallelExecutor& executor,
                                                             std::span<const int32_t> prompt, const SequenceKv& kv,
                                                             const PromptSelector& selector);
  ~PromptChoice();
  bool done() const;
  // One pass of at most executor.max_rows() rows, and behind the last one of a layer the choice of its heads. After an
  // error the choice cannot go on. REQUIRES: !done().
  absl::Status RunSlice();
  // REQUIRES: done(); at most once.
  KeptPositions Take();

 private:
  struct State;
  explicit PromptChoice(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// Has the steps behind position `num_tokens` - 1 attend to these positions, in the order of KeptPositions, and what is
// generated. REQUIRES: `compact` is the selector's, with its pages, and no pass uses it. Errors are those of copies.
absl::Status KeepPositions(const Model& model, PagePool& pool, const KeptPositions& kept, int64_t num_tokens,
                           PromptSelector& selector, const CompactPages& compact);

}  // namespace spl::engine
