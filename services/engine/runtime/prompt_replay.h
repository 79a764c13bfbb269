// Runs rows of a prompt through the model once more, over its KV, to let a selector that chooses once see what they
// attend to (selection/prompt_selector.h). The KV is not changed.
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

// The positions of a prompt that a selector keeps.
struct PromptKept {
  KeptPositions positions;
  // Attention that each of them received, if the selector accumulates (PromptSelector::accumulates); else empty.
  // Streams that do not choose have none.
  std::vector<std::vector<float>> attention;
};

// Chooses the positions of a prompt that a selector keeps.
//
// If tokens of the prompt were left out, the remaining tokens count as the prompt. Rows are those that every layer
// keeps, and see what their layer keeps. Chosen positions are indices into the remaining tokens. Layers that choose
// nothing keep everything they have.
//
// `kv` has the KV of `prompt`, and of tokens generated after it if the sequence began on another worker. Those are all
// kept, so that the choice is the same wherever the sequence continues; a selector that accumulates chooses among them,
// too, and what they attended to does not count. Rows are written to pages of their own: the
// sequence's pages may be shared, and a method may have changed their contents. The logits and rows of the executor's
// last pass are lost.
// InvalidArgument: prompt is empty or longer than kv. ResourceExhausted: no pages for the rows, or no device memory.
// Cost: a pass of the selector's rows over the prompt, 4 · prompt.size() bytes of scores for each head stream on the
// device and the host, and a choice for each head on the host, about 0.3 ms for 32K. If layers keep different tokens,
// each layer that differs from the one before it costs a pass through the layers up to it.
absl::StatusOr<PromptKept> ChooseOfPrompt(ParallelExecutor& executor, std::span<const int32_t> prompt,
                                          const SequenceKv& kv, const PromptSelector& selector);

// The same in slices, so that other sequences can take steps in between. The choice does not depend on them. One
// thread. Holds pages for the rows until it is destroyed.
class PromptChoice {
 public:
  // All four outlive this. Errors as ChooseOfPrompt.
  static absl::StatusOr<std::unique_ptr<PromptChoice>> Begin(ParallelExecutor& executor,
                                                             std::span<const int32_t> prompt, const SequenceKv& kv,
                                                             const PromptSelector& selector);
  ~PromptChoice();
  bool done() const;
  // Runs one pass of at most executor.max_rows() rows. After the last pass of a layer it chooses for the layer's heads.
  // After an error the choice cannot continue. REQUIRES: !done().
  absl::Status RunSlice();
  // REQUIRES: done(); at most once.
  PromptKept Take();

 private:
  struct State;
  explicit PromptChoice(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// Lets all steps after position `num_tokens` - 1 attend to these positions, in the order of KeptPositions, and to
// generated tokens. Errors are those of copies. REQUIRES: `compact` is the selector's, with its pages, and no pass uses
// it.
absl::Status KeepPositions(const Model& model, PagePool& pool, const PromptKept& kept, int64_t num_tokens,
                           PromptSelector& selector, const CompactPages& compact);

}  // namespace spl::engine
