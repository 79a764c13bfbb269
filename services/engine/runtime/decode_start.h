// Work of a sequence before its first step: choices of its prompt, tokens that are replayed, its continuations.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "services/engine/cache/page_pool.h"
#include "services/engine/execution/parallel_executor.h"
#include "services/engine/runtime/decode_fidelity.h"
#include "services/engine/runtime/decode_sequence.h"

namespace spl::engine {

// Engine thread. All errors but ResourceExhausted end the sequence.
class DecodeStart {
 public:
  // All outlive it.
  DecodeStart(ParallelExecutor& executor, PagePool& pool, DecodeFidelity& fidelity)
      : model_(executor.model()), executor_(executor), pool_(pool), fidelity_(fidelity) {}

  // Whether slices have to run before the sequence can start.
  static bool HasSlices(const DecodeSequence& sequence) { return sequence.has_to_choose() || sequence.has_to_replay(); }
  // Runs the next of them: of the choice of what to keep of the prompt, or of the tokens that are replayed. Many of
  // these share a step where what a step attends to does not depend on the steps before it (others replay in the steps
  // of the batch). ResourceExhausted: no pages are free for it. REQUIRES: HasSlices.
  absl::Status RunSlice(DecodeSequence& sequence);

  // Whether the pages are free that the continuations take at most beside those of the sequence.
  bool HasRoom(const DecodeSequence& sequence) const;
  // Makes the continuations, which take over all that the sequence holds. ResourceExhausted: no pages are free, and the
  // sequence is as it was. REQUIRES: !HasSlices.
  absl::Status Start(DecodeSequence& sequence);

 private:
  absl::Status ChooseSlice(DecodeSequence& sequence);
  absl::Status ReplaySlice(DecodeSequence& sequence);
  absl::Status MakeForks(DecodeSequence& sequence);
  absl::Status MakeFork(DecodeSequence& sequence, DecodeFork& fork);
  absl::Status TakeCompactPages(DecodeSequence& sequence, DecodeFork& fork);

  const Model& model_;
  ParallelExecutor& executor_;
  PagePool& pool_;
  DecodeFidelity& fidelity_;
};

}  // namespace spl::engine
