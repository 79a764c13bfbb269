// Decodes for one model on one device: sequences with KV in, token streams out. Continuous batching: a sequence can
// join or leave between any two steps. No network.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/engine/execution/parallel_executor.h"
#include "services/engine/runtime/adaptive_decoding.h"
#include "services/engine/runtime/decode_admission.h"
#include "services/engine/runtime/decode_batch.h"
#include "services/engine/runtime/decode_fidelity.h"
#include "services/engine/runtime/decode_preemption.h"
#include "services/engine/runtime/decode_request.h"
#include "services/engine/runtime/decode_start.h"
#include "services/engine/runtime/decode_step.h"
#include "services/engine/runtime/device_lost.h"
#include "services/engine/runtime/host_tier.h"
#include "services/engine/runtime/on_pass.h"
#include "services/engine/runtime/shared_pool.h"
#include "services/engine/runtime/token_delivery.h"

namespace spl::engine {

struct DecodeEngineOptions {
  ExecutorOptions executor{.max_rows = 64};  // most rows of a step, which are running forks
  size_t max_queued = 256;                   // capacity of the waiting queue
  size_t parked_bytes = 4ull << 30;          // host memory for the KV of preempted sequences
  HostTierOptions host_tier;                 // KV of sequences that choose tokens, in host memory
  // Limit for sequences that score their keys: their first step gathers all keys. Such sequences join the same step
  // only up to this many positions together (one always may). Other sequences then wait for the gathering no longer
  // than for a slice of a prompt.
  int64_t gathered_tokens = 1 << 18;
  // Tokens and other events that may wait for their callbacks (TokenDelivery), about 100 bytes each. Above this the
  // next step waits.
  size_t max_undelivered = 1 << 16;
  // Costs of steps by which the method `adaptive` decides. Unset: see measure_step_costs.
  std::optional<StepCosts> step_costs;
  // Measures them when the engine is made, which takes up to step_costs_limit and needs the pool's free pages. False,
  // or an error while measuring: StepCosts::BuiltIn. Unset: enabled on devices.
  std::optional<bool> measure_step_costs;
  std::chrono::milliseconds step_costs_limit{2000};
  DecodeFidelityOptions fidelity;  // fidelity.report must be set if fidelity.share is above 0
  // Starts the next step before the tokens of the last one are on the host (DecodeStep). Never with `turns`.
  // Unset: enabled on devices, with one rank.
  std::optional<bool> async_scheduling;
  std::shared_ptr<StepTurns> turns;    // if the device is shared with another engine; else null
  std::shared_ptr<SharedPool> shared;  // if others cache or compute KV in the pool; else null
  OnPass on_pass;                      // decode steps that no pass of prompts carried; may be null
  OnDeviceLost on_device_lost = EndProcessOnDeviceLost;
};

struct DecodeLoad {
  size_t running = 0;  // forks in the batch
  size_t waiting = 0;  // sequences in the waiting queue
  size_t parked = 0;   // those of them that were preempted: new reservations would keep them waiting
  size_t parked_bytes = 0;
  uint64_t preemptions = 0;  // sequences so far that were preempted, or ended because they could not be
  size_t host_kv_bytes = 0;  // host memory with KV of sequences that choose tokens
  HostKv::Counts host_rows;  // rows of theirs that steps have listed; of sequences that have ended
  double step_s = 0;         // smoothed duration of a step
  uint64_t num_steps = 0;    // so far: passes of the model, including passes of prompts that carried a step
  // CPU time so far of the engine thread between two of its passes: from the tokens of one to the start of the next.
  double host_s = 0;
};

// Owns one engine thread, and one that runs the callbacks of requests (TokenDelivery). DecodeAdmission decides who
// joins the batch and when, DecodeStep runs a step, DecodePreemption chooses who is preempted. Submit, Wake and load
// may be called from any thread. A step that fails ends its own sequences only: with Internal, or with Unavailable if
// the device is lost.
//
// If the pool is full, the youngest sequence is preempted: its pages (blocks) move to host memory. It continues with
// the same tokens once older sequences have made room. Sequences start and continue in order of arrival. A sequence
// ends with Unavailable ("preempted") only if host memory for preempted KV is used up, or if the pool is too small for
// it alone. Its caller then starts it elsewhere, with the tokens that it already has.
class DecodeEngine {
 public:
  // `pool` outlives the engine. Reservations for prompts that have not landed yet take pages from it, too.
  static absl::StatusOr<std::unique_ptr<DecodeEngine>> Create(std::shared_ptr<const Model> model, PagePool& pool,
                                                              const DecodeEngineOptions& options);
  ~DecodeEngine();  // Stop() must have been called

  // InvalidArgument: options out of range, or a token outside the vocabulary. ResourceExhausted: the waiting queue is
  // full. Unavailable: the engine is stopping. on_done does not run if Submit fails.
  absl::Status Submit(DecodeRequest request);
  void Wake();  // tells the engine that a request was cancelled
  DecodeLoad load() const;
  const StepCosts& step_costs() const { return adaptive_.costs(); }  // by which the method `adaptive` decides
  const Model& model() const { return executor_->model(); }

  // Ends every sequence with Unavailable, waits until all callbacks have run, and joins the threads. Idempotent. Not
  // from a callback.
  void Stop();

 private:
  DecodeEngine(PagePool& pool, const DecodeEngineOptions& options, std::unique_ptr<ParallelExecutor> executor);
  absl::Status WarmUp();
  absl::Status MakeHostTier();
  absl::Status ChooseStepCosts();
  void RunLoop();
  void CollectInbox();
  void DropDead();
  void TakeUnderWay();          // DecodeStep::TakeUnderWay, if a step is under way
  void MoveToHost();            // HostTier::MoveSome, if there is a host tier
  int64_t GrowthPages() const;  // SharedPool::Decoder
  // Whether a waiting sequence runs the model, or works on device memory, before its first step.
  bool StartsOnDevice() const;
  void RunStep(StepTurns::Turn turn);
  void TellDeviceLost(const absl::Status& status);
  // Makes changes visible: load() to callers, tokens and ends to their listeners.
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
  std::unique_ptr<HostTier> host_tier_;  // null: there is none. Outlives the sequences
  DecodeBatch batch_;
  AdaptiveDecoding adaptive_;
  DecodePreemption preemption_;
  DecodeStart start_;
  DecodeAdmission admission_;
  DecodeStep step_;
  uint64_t next_order_ = 0;
  std::thread thread_;
};

}  // namespace spl::engine
