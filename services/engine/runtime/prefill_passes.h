// Runs the passes of a prefill engine: which slices of which prompts share a pass (chunked prefill), with which decode
// step, and which results follow.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "services/engine/execution/parallel_executor.h"
#include "services/engine/runtime/local_kv.h"
#include "services/engine/runtime/prefill_job.h"
#include "services/engine/runtime/prefill_meter.h"
#include "services/engine/runtime/prefill_options.h"
#include "services/engine/runtime/prompt_logprobs.h"
#include "services/engine/runtime/prompt_queue.h"
#include "services/engine/runtime/sample_rows.h"
#include "services/engine/runtime/step_offer.h"

namespace spl::engine {

// Engine thread.
class PrefillPasses {
 public:
  using Job = std::shared_ptr<PrefillJob>;
  // Prompts that ended together. OK: they are complete, and those with an answer have their first tokens.
  struct Ended {
    std::vector<Job> jobs;
    absl::Status status;
  };

  // All outlive it. `local` has the segments that prompts may use; `queue` has the prompts.
  PrefillPasses(ParallelExecutor& executor, LocalKv& local, const PromptQueue& queue, PrefillMeter& meter,
                const PrefillEngineOptions& options)
      : model_(executor.model()), executor_(executor), local_(local), queue_(queue), meter_(meter), options_(options) {}

  // Waits for the device's turn and runs the next pass of the running prompts: a slice of the first prompt in order,
  // and slices of following prompts that fit and run the same layers. A waiting decode step shares the pass if the pass
  // is plain. Returns the prompts that ended; they are still in the queue.
  std::vector<Ended> RunNext();

 private:
  // Slices of several prompts that run the same layers.
  struct Pass {
    std::vector<Job> jobs;
    std::vector<PrefillSlice> slices;  // [jobs.size()]
    PassLayers layers;
    StepOffer* riders = nullptr;  // a decode step that shares the pass; null: none
    int32_t num_prompt_rows() const;
    int32_t num_riders() const;
  };
  bool CanWait() const;
  Pass Choose(std::vector<Ended>& ended);
  bool IsPlain(const PassLayers& layers) const;
  int32_t RowsOfNext(bool plain) const;
  // Rows that the prompt may have in the pass, of `room`, while its start is arriving from the store.
  int32_t RowsBesideFetch(PrefillJob& job, int32_t room);
  void Board(Pass& pass);
  bool MayRunBehindHost(const Pass& pass) const;
  absl::Status Run(const Pass& pass);
  // Computes what prompts of the pass ask for of their own tokens, while the executor has their rows.
  absl::Status ScorePrompts(const Pass& pass);
  // Records the work of the pass and its consequences for each prompt.
  absl::Status Count(const Pass& pass, double& tokens, double& cost);
  void Finish(Pass& pass, std::vector<Ended>& ended);
  // Samples, all at once, the first tokens of prompts and the tokens of the decode step that shared the pass (null:
  // none did). The executor has their logits in this order.
  absl::Status SampleTokens(const std::vector<Job>& jobs, StepOffer* riders);
  absl::Status GiveFirstLogits(const std::vector<Job>& jobs);  // to those that asked for them
  // Gives the decode step that shared the pass its results.
  void Land(Pass& pass, const absl::Status& computed);

  const Model& model_;
  ParallelExecutor& executor_;
  LocalKv& local_;
  const PromptQueue& queue_;
  PrefillMeter& meter_;
  const PrefillEngineOptions& options_;
  std::chrono::nanoseconds shared_pass_time_{0};  // PassDemand::shared_pass_time
  RowSampler row_sampler_;
  PromptLogprobs prompt_logprobs_;
};

}  // namespace spl::engine
