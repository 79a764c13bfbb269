// Lets the sequences of a decode step choose on the device which tokens they attend to. It has the memory for lists and
// scores, and calls the operations that fill them (kernels/selection). The selector gives the data to choose by
// (selection/token_selector.h). A step may have several ways to choose; each is called once for all of its sequences.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/attention/attention.h"
#include "kernels/backend/backend.h"
#include "kernels/common/token_selection.h"
#include "services/engine/execution/decode_row.h"
#include "services/engine/model/model.h"

namespace spl::engine {

// Belongs to one rank. Used by the rank's thread only.
class TokenChoices {
 public:
  // `max_rows`: rows of a step. `model` and `session` outlive this.
  TokenChoices(const Model& model, int rank, const kernels::KvPoolView& pool, int32_t max_rows,
               kernels::Session& session);

  // Says what the sequences of a step choose with, and where their lists go; called before the step is staged.
  // REQUIRES: the rows use at most kSelectionPlansMax ways to choose (ScoringPlan::SharesStep), rows that choose have
  // compact pages, and `rows` stay valid until the next call.
  absl::Status Prepare(std::span<const DecodeRow> rows);

  // Selection of a row of the prepared step. Null: this row chooses nothing and has no lists.
  const kernels::SequenceSelection* selection(size_t row) const {
    return sequences_[row].layers.empty() ? nullptr : &sequences_[row];
  }
  bool any() const { return !plans_.empty() || listed_; }
  // Whether some stream may attend to a list in this layer.
  bool any(int32_t layer) const;
  const kernels::TokenLists& lists() const { return lists_; }
  // Device memory for the estimates of the prepared step, f32 [num_layers, rows, num_kv_heads of the rank]. Null: no
  // row asks for them.
  const float* kept_mass() const { return estimates_ ? static_cast<const float*>(kept_mass_->data()) : nullptr; }
  // A hash of everything that a recording of the step holds. Steps with equal keys launch the same operations on the
  // same memory.
  uint64_t key() const;

  // Runs the operations that read the queries of a layer, [rows][num_qo_heads][head_dim] with `q_row_stride` elements
  // from row to row. Errors are those of the operations. REQUIRES: any(layer).
  absl::Status Choose(const kernels::KernelContext& context, const kernels::AttentionShape& shape,
                      kernels::ConstActivations q, int64_t q_row_stride, int32_t layer);
  // The rest of the choices, by packed keys, and attention to what they choose: the streams of rule kElsewhere. Rows
  // that are in host memory come to the device in between. out,
  // lse: as in DecodeAttentionArgs. Called behind Choose.
  absl::Status ChooseAndAttend(const kernels::KernelContext& context, const kernels::AttentionShape& shape,
                               kernels::ConstActivations q, int64_t q_row_stride, kernels::Activations out, float* lse,
                               int32_t layer);

 private:
  // One way to choose, shared by some of the rows.
  struct Plan {
    ScoringPlan scoring;  // its first layer is the lowest of any of these rows
    // Layers in which rows choose anew, a bit each; empty: none. Rows that do so in different layers make it all
    // layers: there are fewer kinds of steps to record then, and a choice that no row makes costs launches only.
    std::vector<bool> refreshes;
    int64_t longest = 0;        // positions of the longest of these rows
    int64_t scores_stride = 0;  // elements of a stream's scores; 0: no scores are written
    bool refreshes_in(int32_t layer) const { return !refreshes.empty() && refreshes[static_cast<size_t>(layer)]; }
    bool scores(int32_t layer) const { return layer >= scoring.first_layer; }
    bool hot = false;  // some of these rows have a hot buffer
    bool attends() const { return scoring.scoring == TokenScoring::kPackedKeys; }  // in the operation that chooses
  };
  void CollectPlans();
  void AddPlan(const ScoringPlan& scoring, int64_t kv_len);
  Plan* PlanOf(const ScoringPlan& scoring);  // null: nothing is chosen that way in this step
  void TakeSelection(const DecodeRow& row, const ScoringPlan& scoring, std::span<const kernels::LayerSelection> layers,
                     kernels::SequenceSelection& selection);
  void ViewLayer(int32_t layer, bool outer);
  void TakePlan(size_t plan, int32_t layer);
  absl::Status RefillAndAttend(size_t plan, const kernels::KernelContext& context, const kernels::AttentionShape& shape,
                               kernels::ConstActivations q, int64_t q_row_stride, kernels::Activations out, float* lse,
                               int32_t layer);
  absl::Status ChooseBy(size_t plan, const kernels::KernelContext& context, const kernels::AttentionShape& shape,
                        kernels::ConstActivations q, int64_t q_row_stride, int32_t layer);

  const Model& whole_;
  const ModelShard& model_;  // the part of this rank
  const int rank_;
  const kernels::KvPoolView pool_;
  const size_t max_streams_;
  kernels::Session& session_;

  std::span<const DecodeRow> rows_;
  // Outer choices first; otherwise their order depends on which plans there are, not on the order of the rows.
  std::vector<Plan> plans_;
  bool listed_ = false;     // some row has lists of candidates
  bool estimates_ = false;  // some row asks for estimates
  kernels::TokenLists lists_;
  std::vector<kernels::SequenceSelection> sequences_;  // [rows]
  std::vector<kernels::SequenceSelection> outer_;      // [rows]; without layers where there is no outer choice
  std::vector<kernels::SelectingSequence> of_layer_;   // [rows]; rows of other plans do nothing
  std::vector<std::span<const int32_t>> pages_, compact_, lists_of_;  // [rows, num_kv_heads], for one layer
  std::unique_ptr<kernels::Buffer> list_memory_;                      // int32 [max_streams, stride] and [max_streams]
  std::unique_ptr<kernels::Buffer> kept_mass_;                        // f32 [num_layers, max_streams]
  std::unique_ptr<kernels::Buffer> scores_;                           // f32 [max_streams, largest scores_stride]
};

}  // namespace spl::engine
