// How the sequences of a decode step choose, on the device, the tokens they attend to: memory for lists and scores, and
// the operations that fill them (kernels/selection). What is chosen by is the selector's (selection/token_selector.h).
// The sequences of a step may choose in several ways: each way is called once for all of its sequences.
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

// Of one rank. Used by the rank's thread only.
class TokenChoices {
 public:
  // `max_rows`: of a step. `model`, `session` outlive this.
  TokenChoices(const Model& model, int rank, const kernels::KvPoolView& pool, int32_t max_rows,
               kernels::Session& session);

  // Before a step is staged: what its sequences choose with, and where the lists go. REQUIRES: those that choose do it
  // in at most kSelectionPlansMax ways (ScoringPlan::SharesStep) and have compact pages; `rows` stay valid until the
  // next call.
  absl::Status Prepare(std::span<const DecodeRow> rows);

  // Of the prepared step. Null: this row chooses nothing and has no lists.
  const kernels::SequenceSelection* selection(size_t row) const {
    return sequences_[row].layers.empty() ? nullptr : &sequences_[row];
  }
  bool any() const { return !plans_.empty() || listed_; }
  // In this layer some stream may attend to a list.
  bool any(int32_t layer) const;
  const kernels::TokenLists& lists() const { return lists_; }
  // Everything that a recording of the step holds: steps with equal keys launch the same operations on the same memory.
  uint64_t key() const;

  // What reads the queries of a layer, [rows][num_qo_heads][head_dim] with `q_row_stride` elements from row to row.
  // REQUIRES: any(layer). Errors are those of the operations.
  absl::Status Choose(const kernels::KernelContext& context, const kernels::AttentionShape& shape,
                      kernels::ConstActivations q, int64_t q_row_stride, int32_t layer);

 private:
  // A way in which some of the rows choose.
  struct Plan {
    ScoringPlan scoring;        // its first layer is the first of any of these rows
    bool refreshes = false;     // some row makes a choice anew, in some layer
    int64_t longest = 0;        // positions of the longest of these rows
    int64_t scores_stride = 0;  // elements of a stream's scores; 0: it writes none
    bool scores(int32_t layer) const { return layer >= scoring.first_layer; }
  };
  void CollectPlans();
  void ViewLayer(int32_t layer);
  absl::Status ChooseBy(size_t plan, const kernels::KernelContext& context, const kernels::AttentionShape& shape,
                        kernels::ConstActivations q, int64_t q_row_stride, int32_t layer);

  const Model& whole_;
  const ModelShard& model_;  // of this rank
  const int rank_;
  const kernels::KvPoolView pool_;
  const size_t max_streams_;
  kernels::Session& session_;

  std::span<const DecodeRow> rows_;
  std::vector<Plan> plans_;  // in an order that depends on which there are, and not on the rows'
  bool listed_ = false;      // some row has lists of what it may choose from
  kernels::TokenLists lists_;
  std::vector<kernels::SequenceSelection> sequences_;                 // [rows]
  std::vector<kernels::SelectingSequence> of_layer_;                  // [rows]; rows of other plans do nothing
  std::vector<std::span<const int32_t>> pages_, compact_, lists_of_;  // [rows, num_kv_heads], of the layer
  std::unique_ptr<kernels::Buffer> list_memory_;                      // int32 [max_streams, stride] and [max_streams]
  std::unique_ptr<kernels::Buffer> scores_;                           // f32 [max_streams, largest scores_stride]
};

}  // namespace spl::engine
