// The decode side of one model on one device: sequences with KV in, token streams out. Continuous batching: a sequence
// joins and leaves between any two steps. No network.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/engine/cache/sequence_kv.h"
#include "services/engine/execution/parallel_executor.h"
#include "services/engine/runtime/decode_fidelity.h"
#include "services/engine/runtime/head_restorer.h"
#include "services/engine/runtime/parked_pages.h"
#include "services/engine/runtime/prefill_engine.h"
#include "services/engine/runtime/sample_rows.h"
#include "services/engine/runtime/sampler.h"
#include "services/engine/runtime/step_turns.h"

namespace spl::engine {

struct DecodeToken {
  int32_t fork = 0;
  SampledToken token;
};

// A prefilled sequence. The first token of every fork was sampled by the prefill side and is not streamed again.
struct DecodeRequest {
  std::string id;
  std::unique_ptr<SequenceKv>
      kv;  // positions [0, num_tokens) of the prompt, or what its head classes or kept tokens leave
  SamplingParams sampling;
  DecodeOptions decode;
  // Room for what the selector keeps beside the KV, or at least as much for one of the same method
  // (MakeSelectorBehind); null: it is made when decoding begins.
  std::unique_ptr<CompactPages> compact;
  std::vector<int32_t> prompt;             // only read when sampling.needs_prompt(), or by a selector of_prompt()
  std::vector<int32_t> left_prompt;        // what `kv` has of it, where that is less (PrefillOutcome::only); else empty
  std::vector<int32_t> prior_output;       // tail of the prompt that was generated earlier
  std::vector<SampledToken> first_tokens;  // one per fork
  // Tokens of an answer that began elsewhere, from its first one on: they are run through decode steps, and what comes
  // behind them is streamed. So the KV is what it would be had the answer begun here. first_tokens and prior_output are
  // empty then, and there is one fork. Empty: the answer begins here.
  std::vector<int32_t> replay;
  SteadyTime deadline = SteadyTime::max();
  CancelFlag cancelled = std::make_shared<std::atomic<bool>>(false);
  // Who has what the holes of `kv` leave out; null: nobody, or nobody is asked. Needs the selector head_classes.
  std::shared_ptr<HeadSource> heads;
  HeadRestoreOptions restore;
  // All run on the engine thread and must not block; on_done exactly once and last. on_start when the sequence joins
  // the batch; may be null. on_restore with the sums so far, when they have changed and before the tokens that they
  // concern; may be null.
  std::function<void()> on_start;
  std::function<void(const HeadRestoreReport&)> on_restore;
  std::function<void(std::vector<DecodeToken>)> on_tokens;
  std::function<void(absl::Status)> on_done;
};

struct DecodeEngineOptions {
  ExecutorOptions executor{.max_rows = 64};  // rows of one step: running forks at most
  size_t max_queued = 256;                   // sequences that wait for a place in the batch
  size_t parked_bytes = 4ull << 30;          // host memory for the KV of sequences that gave way
  // The first step of a sequence that scores its keys gathers all of them. Sequences with this many positions together
  // join in one step at most (one always does): others wait for the gathering no longer than for a slice of a prompt.
  int64_t gathered_tokens = 1 << 18;
  DecodeFidelityOptions fidelity;    // its report must be set where its share is above 0
  std::shared_ptr<StepTurns> turns;  // of a device that is shared with another engine; null: it is not
  OnDeviceLost on_device_lost = EndProcessOnDeviceLost;
};

struct DecodeLoad {
  size_t running = 0;  // forks in the batch
  size_t waiting = 0;  // sequences that wait for a place
  size_t parked = 0;   // of these, the ones that gave way: who asks for pages now would keep them waiting
  size_t parked_bytes = 0;
  uint64_t preemptions = 0;  // sequences that gave way so far, or ended because they could not
  double step_s = 0;         // smoothed duration of a step
};

// Owns one engine thread. Submit, Wake and load may be called from any thread. A step that fails ends its sequences
// with Internal, or Unavailable where the device is lost, and no others.
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
  const Model& model() const { return *model_; }

  // Ends every sequence with Unavailable and joins the thread. Idempotent.
  void Stop();

 private:
  struct Fork;
  struct Sequence;
  struct Running {
    Sequence* sequence;
    Fork* fork;
  };

  DecodeEngine(std::shared_ptr<const Model> model, PagePool& pool, const DecodeEngineOptions& options);
  absl::Status WarmUp();
  void RunLoop();
  void CollectInbox();
  void DropDead();
  void AdmitWaiting();
  // One slice of the choice that a sequence makes of its prompt before it can start.
  absl::Status ChooseSlice(Sequence& sequence);
  // Runs some of what a sequence replays before it can start: many tokens in one step, where what a step attends to
  // does not depend on the steps before it (others replay in the steps of the batch).
  absl::Status ReplaySlice(Sequence& sequence);
  // ResourceExhausted: there are no pages, and the sequence is as it was.
  absl::Status Start(Sequence& sequence);
  absl::Status MakeForks(Sequence& sequence);
  bool HasRoomToStart(const Sequence& sequence) const;
  absl::Status TakeCompactPages(DecodeRequest& request, Fork& fork);
  void RestoreHeads(Sequence& sequence);
  void GrowOrPreempt();
  // A sequence that has pages gives them up, the youngest first, so that `needy` may have them; `needy` itself where
  // nobody is younger, if it runs. False: nobody is left to ask.
  bool FindRoomFor(Sequence& needy);
  // Whether nobody else has pages of the pool.
  bool IsAlone(const Sequence& sequence) const;
  void Park(Sequence& sequence);
  absl::Status Return(Sequence& sequence);
  // Where it belongs by its age.
  void Queue(std::unique_ptr<Sequence> sequence);
  void RunStep();
  // One step of these forks, whose selectors can share it.
  absl::Status RunTogether(std::span<const Running> forks);
  void Finish(Sequence& sequence, const absl::Status& status);
  void RemoveFinished();

  std::shared_ptr<const Model> model_;
  PagePool& pool_;
  const DecodeEngineOptions options_;
  std::unique_ptr<ParallelExecutor> executor_;

  mutable std::mutex mutex_;  // guards all up to the next blank line
  std::condition_variable wake_;
  bool woken_ = false;
  bool stopping_ = false;
  std::deque<std::unique_ptr<Sequence>> inbox_;
  DecodeLoad load_;

  // Engine thread only.
  std::deque<std::unique_ptr<Sequence>> waiting_;   // oldest first
  std::vector<std::unique_ptr<Sequence>> running_;  // likewise
  uint64_t next_order_ = 0;
  size_t parked_bytes_ = 0;
  bool freed_ = false;  // pages, since the thread last looked who may have them; or a choice goes on
  uint64_t preemptions_ = 0;
  DecodeFidelity fidelity_;
  RowSampler row_sampler_;
  std::thread thread_;
};

}  // namespace spl::engine
