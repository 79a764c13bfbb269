// Work of a sequence before its first step: choosing from its prompt, replaying tokens, making its continuations.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "services/engine/cache/page_pool.h"
#include "services/engine/execution/parallel_executor.h"
#include "services/engine/runtime/decode_fidelity.h"
#include "services/engine/runtime/decode_sequence.h"

namespace spl::engine {

// Engine thread. All errors except ResourceExhausted end the sequence.
class DecodeStart {
 public:
  // All outlive it.
  DecodeStart(ParallelExecutor& executor, PagePool& pool, DecodeFidelity& fidelity)
      : model_(executor.model()), executor_(executor), pool_(pool), fidelity_(fidelity) {}

  // Whether slices must run before the sequence can start.
  static bool HasSlices(const DecodeSequence& sequence) { return sequence.has_to_choose() || sequence.has_to_replay(); }
  // Runs the next slice: of the choice of prompt tokens, or of the replay. Replayed tokens share a step if a step's
  // attention does not depend on the steps before it; otherwise they are replayed in steps of the batch.
  // ResourceExhausted: no free pages. REQUIRES: HasSlices.
  absl::Status RunSlice(DecodeSequence& sequence);

  // Whether there are free pages for the continuations, besides those of the sequence.
  bool HasRoom(const DecodeSequence& sequence) const;
  // Makes the continuations, which take over everything that the sequence owns. ResourceExhausted: no free pages; the
  // sequence is unchanged. REQUIRES: !HasSlices.
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
