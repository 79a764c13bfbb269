// The sequences of a decode engine by their age: those that wait for a place in the batch, and those that have one.
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
  size_t waiting = 0;       // sequences that wait for a place
  size_t parked = 0;        // of these, the ones that gave way
  size_t parked_bytes = 0;  // host memory of their pages
  int64_t held_pages = 0;   // by all; a page that two share counts twice
};

// Owns the sequences. Engine thread.
class DecodeBatch {
 public:
  using Sequence = std::unique_ptr<DecodeSequence>;

  // Both outlive it. `shared` is told when pages were freed; null: nobody is.
  DecodeBatch(SharedPool* shared, TokenDelivery& delivery) : shared_(shared), delivery_(delivery) {}

  // Puts a sequence where it belongs by its age.
  void Wait(Sequence sequence);
  void Run(Sequence sequence);
  // Both oldest first. Whoever takes one out of them leaves no null behind.
  std::deque<Sequence>& waiting() { return waiting_; }
  const std::deque<Sequence>& waiting() const { return waiting_; }
  std::vector<Sequence>& running() { return running_; }
  bool empty() const { return waiting_.empty() && running_.empty(); }

  // Ends a sequence, unless it has ended; it is destroyed by RemoveFinished.
  void Finish(DecodeSequence& sequence, const absl::Status& status);
  void FinishAll(const absl::Status& status);
  void RemoveFinished();

  DecodeCounts counts() const;

  // Whether there is a reason to look at those that wait again, though nothing new has come: pages were freed, or the
  // start of one of them goes on.
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
