// Runs a model for an engine: one executor, or the executors of all ranks at once.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/common/thread_pool.h"
#include "services/engine/cache/kv_memory.h"
#include "services/engine/execution/executor.h"
#include "services/engine/execution/rank_team.h"

namespace spl::engine {

// Has the contract of Executor, for the whole model; one engine thread uses it. With one rank every call goes straight
// through. With several:
//  - Logits are gathered on the host in the order of ranks. The most likely token is chosen among the ranks' own.
//  - A cancelled pass ends on all ranks before the same layer, the first that no rank has begun.
//  - on_layer runs on the thread of the rank that reaches the layer last.
//  - If a rank fails, the pass fails with DataLoss, and the group cannot be used any more (device_lost.h).
//  - Hidden states are the same on all ranks; each rank keeps its own. Scores belong to a rank's heads. They are summed
//    on the host before the best are chosen, so that all ranks continue with the same rows.
//  - Unimplemented: a policy whose visibility lists blocks or tokens.
class ParallelExecutor {
 public:
  using RankScores = std::vector<std::unique_ptr<kernels::Buffer>>;

  static absl::StatusOr<std::unique_ptr<ParallelExecutor>> Create(std::shared_ptr<const Model> model,
                                                                  const KvPartitions& pool,
                                                                  const ExecutorOptions& options);

  using OnLayer = Executor::OnLayer;
  using Until = Executor::Until;
  // As Executor's. Several ranks always wait.
  absl::Status Prefill(std::span<const PrefillSlice> slices, const PassLayers& pass, const OnLayer& on_layer = nullptr,
                       std::span<const DecodeRow> riders = {}, Until until = Until::kDone);
  absl::Status Prefill(std::span<const PrefillSlice> slices, const OnLayer& on_layer = nullptr) {
    return Prefill(slices, PassLayers{{0, model_->config().num_layers}}, on_layer);
  }
  // Allocates memory for the reuse of segments: one buffer for each rank, on its device.
  absl::StatusOr<std::vector<HiddenStates>> AllocateHidden(PositionRange positions) const;
  absl::StatusOr<RankScores> TakeScores(int64_t count);  // zeros for what runs next
  // Sums the scores over all ranks, on the host. [num_scores]
  absl::StatusOr<std::vector<float>> ReadScores(const RankScores& scores, int64_t num_scores);
  // The indices of the k largest sums over the ranks, ascending, after the pooling of Executor::SelectTop. With several
  // ranks it moves all scores to the host, and uses rank 0's memory for the sums.
  absl::StatusOr<std::vector<int32_t>> SelectTop(const RankScores& scores, int64_t num_scores, int32_t pool_radius,
                                                 int64_t k);
  absl::Status AlignCopy(std::span<const AlignPlan> plans);  // [num_ranks]
  absl::Status Decode(std::span<const DecodeRow> rows);
  absl::StatusOr<PendingMass> BeginMass();  // with several ranks it waits for them
  absl::Status ComputeLogits(std::span<const int32_t> rows);
  absl::StatusOr<std::span<float>> Logits();
  absl::StatusOr<std::span<const int32_t>> Argmax();
  // With several ranks the logits move to the host and are sampled there. The tokens are the same.
  absl::StatusOr<SampledBatch> Sample(std::span<const kernels::SampleRow> rows);
  // Executor::BeginSample. REQUIRES: samples_later(), a model on one rank.
  absl::StatusOr<PendingSample> BeginSample(std::span<const kernels::SampleRow> rows) {
    return ranks_[0]->BeginSample(rows);
  }
  // Waits until all ranks are done. Returns the first error.
  absl::Status Synchronize();
  bool samples_later() const { return team_ == nullptr; }
  // Records a point after the layer's KV on every rank, while Prefill runs on_layer. Null if the KV is complete
  // already.
  std::shared_ptr<const kernels::Fence> RecordFence();
  // Records a point behind all that every rank was given, while no pass runs. Null if it has been done already.
  absl::StatusOr<std::shared_ptr<const kernels::Fence>> RecordFenceOfAll();

  const Model& model() const { return *model_; }
  int32_t max_rows() const { return options_.max_rows; }
  const kernels::KernelContext& context() const { return ranks_[0]->context(); }  // only while no pass runs

 private:
  ParallelExecutor(std::shared_ptr<const Model> model, const ExecutorOptions& options)
      : model_(std::move(model)), options_(options) {}
  // Finds errors that every rank would find, before any rank starts.
  absl::Status CheckPass(size_t num_rows, size_t num_sequences) const;
  absl::Status PlanPrefill(std::span<const PrefillSlice> slices);
  bool OnRankLayer(int rank, int32_t layer, const OnLayer& on_layer);

  const std::shared_ptr<const Model> model_;
  const ExecutorOptions options_;
  std::vector<std::unique_ptr<Executor>> ranks_;
  std::vector<kernels::Communicator*> communicators_;  // the executors'; empty with one rank
  std::vector<float> logits_;                          // [rows, vocab], with several ranks
  std::vector<int32_t> argmax_;
  std::vector<kernels::SampledRow> sampled_;
  std::vector<kernels::TopToken> top_;
  std::unique_ptr<kernels::ThreadPool> sampling_threads_;  // for GPU ranks; made once several rows are sampled

  // State of the running prefill.
  std::vector<kernels::HeadVisibility> plans_;       // [slices][layers][kv heads]
  std::vector<FfnPlan> ffn_plans_;                   // [slices][layers]
  std::vector<float> restore_above_;                 // as plans_
  std::vector<std::optional<LineTask>> line_tasks_;  // [slices][layers]
  struct Layer {
    int num_arrived = 0;
    std::vector<std::shared_ptr<const kernels::Fence>> fences;  // by rank
  };
  std::mutex mutex_;  // guards all up to the next blank line
  std::vector<Layer> layers_;
  int32_t furthest_ = -1;               // layer that a rank has begun
  std::optional<int32_t> stop_before_;  // once cancelled

  // Fences of the layer whose on_layer runs; only the thread that runs it uses them.
  std::vector<std::shared_ptr<const kernels::Fence>> layer_fences_;

  std::unique_ptr<RankTeam> team_;  // null with one rank; its threads end first
};

}  // namespace spl::engine
