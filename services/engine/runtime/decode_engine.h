// The decode side of one model on one device: sequences with KV in, token streams out. Continuous batching: a sequence
// joins and leaves between any two steps. No network.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/engine/execution/parallel_executor.h"
#include "services/engine/runtime/decode_admission.h"
#include "services/engine/runtime/decode_batch.h"
#include "services/engine/runtime/decode_fidelity.h"
#include "services/engine/runtime/decode_preemption.h"
#include "services/engine/runtime/decode_request.h"
#include "services/engine/runtime/decode_start.h"
#include "services/engine/runtime/decode_step.h"
#include "services/engine/runtime/device_lost.h"
#include "services/engine/runtime/shared_pool.h"
#include "services/engine/runtime/token_delivery.h"

namespace spl::engine {

struct DecodeEngineOptions {
  ExecutorOptions executor{.max_rows = 64};  // rows of one step: running forks at most
  size_t max_queued = 256;                   // sequences that wait for a place in the batch
  size_t parked_bytes = 4ull << 30;          // host memory for the KV of sequences that gave way
  // The first step of a sequence that scores its keys gathers all of them. Sequences with this many positions together
  // join in one step at most (one always does): others wait for the gathering no longer than for a slice of a prompt.
  int64_t gathered_tokens = 1 << 18;
  // Tokens and other events that may wait for their callbacks (TokenDelivery), about 100 bytes each: the next step
  // waits while there are more.
  size_t max_undelivered = 1 << 16;
  DecodeFidelityOptions fidelity;  // its report must be set where its share is above 0
  // The next step starts before the tokens of the last one are on the host (DecodeStep). Unset: on devices of one rank;
  // never with turns.
  std::optional<bool> async_scheduling;
  std::shared_ptr<StepTurns> turns;    // of a device that is shared with another engine; null: it is not
  std::shared_ptr<SharedPool> shared;  // the pool is shared with a prefill engine; null: it is not
  OnDeviceLost on_device_lost = EndProcessOnDeviceLost;
};

struct DecodeLoad {
  size_t running = 0;  // forks in the batch
  size_t waiting = 0;  // sequences that wait for a place
  size_t parked = 0;   // of these, the ones that gave way: who asks for pages now would keep them waiting
  size_t parked_bytes = 0;
  int64_t held_pages = 0;    // by sequences; a page that two share counts twice
  uint64_t preemptions = 0;  // sequences that gave way so far, or ended because they could not
  double step_s = 0;         // smoothed duration of a step
  uint64_t num_steps = 0;    // so far: passes of the model, those that took a step along included
  // CPU time so far of the engine thread from the tokens of a pass that it ran to the next one's beginning.
  double host_s = 0;
};

// Owns one engine thread, and one that runs the callbacks of requests (TokenDelivery). DecodeAdmission says who joins
// the batch and when, DecodeStep what a step is, DecodePreemption who gives way. Submit, Wake and load may be called
// from any thread. A step that fails ends its sequences with Internal, or Unavailable where the device is lost, and no
// others.
//
// When the pool runs out, the youngest sequence gives way: its pages go to host memory, and it goes on where it was,
// with the same tokens, once older ones have made room. Sequences begin and go on in the order in which they came. One
// ends with Unavailable ("preempted") only where host memory for such KV is used up, or where the pool is too small for
// it alone; its caller starts it again elsewhere with the tokens it already has.
class DecodeEngine {
 public:
  // `pool` outlives the engine and is shared with whoever reserves pages for prompts still to land.
  static absl::StatusOr<std::unique_ptr<DecodeEngine>> Create(std::shared_ptr<const Model> model, PagePool& pool,
                                                              const DecodeEngineOptions& options);
  ~DecodeEngine();  // Stop() must have been called

  // InvalidArgument: options out of range, or a token outside the vocabulary. ResourceExhausted: too many sequences
  // wait. Unavailable: stopping. on_done does not run when Submit fails.
  absl::Status Submit(DecodeRequest request);
  void Wake();  // a request was cancelled: look again
  DecodeLoad load() const;
  const Model& model() const { return executor_->model(); }

  // Ends every sequence with Unavailable and joins the threads, once all callbacks have run. Idempotent; not from a
  // callback.
  void Stop();

 private:
  DecodeEngine(PagePool& pool, const DecodeEngineOptions& options, std::unique_ptr<ParallelExecutor> executor);
  absl::Status WarmUp();
  void RunLoop();
  void CollectInbox();
  void DropDead();
  void TakeUnderWay();          // DecodeStep::TakeUnderWay, where a step is under way
  int64_t GrowthPages() const;  // SharedPool::Decoder
  // Whether a sequence that waits runs the model, or works on device memory, before its first step.
  bool StartsOnDevice() const;
  void RunStep(StepTurns::Turn turn);
  void TellDeviceLost(const absl::Status& status);
  // Makes known what has changed: load() to callers, tokens and ends to their listeners.
  void Publish();

  PagePool& pool_;
  const DecodeEngineOptions options_;
  const std::unique_ptr<ParallelExecutor> executor_;

  mutable std::mutex mutex_;  // guards all up to the next blank line
  std::condition_variable wake_;
  bool woken_ = false;
  bool stopping_ = false;
  std::vector<std::unique_ptr<DecodeSequence>> inbox_;
  DecodeLoad load_;

  // Engine thread only.
  TokenDelivery delivery_;
  DecodeFidelity fidelity_;
  DecodeBatch batch_;
  DecodePreemption preemption_;
  DecodeStart start_;
  DecodeAdmission admission_;
  DecodeStep step_;
  uint64_t next_order_ = 0;
  std::thread thread_;
};

}  // namespace spl::engine
