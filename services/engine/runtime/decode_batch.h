// The sequences of a decode engine by age: the waiting queue and the running batch.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "services/engine/runtime/decode_sequence.h"
#include "services/engine/runtime/shared_pool.h"

namespace spl::engine {

struct DecodeCounts {
  size_t running = 0;       // continuations in the batch
  size_t waiting = 0;       // sequences in the waiting queue
  size_t parked = 0;        // those of them that were preempted
  size_t parked_bytes = 0;  // host memory of the preempted sequences' pages
};

// Owns the sequences. Engine thread.
class DecodeBatch {
 public:
  using Sequence = std::unique_ptr<DecodeSequence>;

  // Both outlive it. `shared` is told when pages were freed; null: the pool is not shared.
  DecodeBatch(SharedPool* shared, TokenDelivery& delivery) : shared_(shared), delivery_(delivery) {}

  // Put a sequence into the waiting queue, or into the batch, in order of age.
  void Wait(Sequence sequence);
  void Run(Sequence sequence);
  // Both are ordered, oldest first. A caller that moves a sequence out must remove the null that it leaves.
  std::deque<Sequence>& waiting() { return waiting_; }
  const std::deque<Sequence>& waiting() const { return waiting_; }
  std::vector<Sequence>& running() { return running_; }
  const std::vector<Sequence>& running() const { return running_; }
  bool empty() const { return waiting_.empty() && running_.empty(); }

  // Ends a sequence unless it has ended. RemoveFinished destroys it.
  void Finish(DecodeSequence& sequence, const absl::Status& status);
  void FinishAll(const absl::Status& status);
  void RemoveFinished();

  DecodeCounts counts() const;

  // Asks for another look at the waiting queue although nothing new has arrived: pages were freed, or the start of a
  // waiting sequence continues.
  void LookAgain() { look_again_ = true; }
  bool TakeLookAgain() { return std::exchange(look_again_, false); }

 private:
  SharedPool* const shared_;
  TokenDelivery& delivery_;
  std::deque<Sequence> waiting_;
  std::vector<Sequence> running_;
  bool look_again_ = false;
};

}  // namespace spl::engine
