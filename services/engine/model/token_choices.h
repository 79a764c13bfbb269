// How the sequences of a decode step choose, on the device, the tokens they attend to: memory for lists and scores, and
// the operations that fill them (kernels/selection). What is chosen by is the selector's (selection/token_selector.h).
// Sequences that score do so in one way; those that only have lists go along with any of them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/attention/attention.h"
#include "kernels/common/backend.h"
#include "kernels/common/token_selection.h"
#include "services/engine/model/decode_row.h"
#include "services/engine/model/model.h"

namespace spl::engine {

// Of one rank. Used by the rank's thread only.
class TokenChoices {
 public:
  // `max_rows`: of a step. `model`, `session` outlive this.
  TokenChoices(const Model& model, int rank, const kernels::KvPoolView& pool, int32_t max_rows,
               kernels::Session& session);

  // Before a step is staged: what its sequences choose with, and where the lists go. REQUIRES: those that choose do it
  // the same way (ScoringPlan::SharesStep) and have compact pages; `rows` stay valid until the next call.
  absl::Status Prepare(std::span<const DecodeRow> rows);

  // Of the prepared step. Null: this row chooses nothing and has no lists.
  const kernels::SequenceSelection* selection(size_t row) const {
    return sequences_[row].layers.empty() ? nullptr : &sequences_[row];
  }
  bool any() const { return scores() || listed_; }
  // In this layer some stream may attend to a list.
  bool any(int32_t layer) const { return listed_ || scores(layer); }
  const kernels::TokenLists& lists() const { return lists_; }
  // Everything that a recording of the step holds: steps with equal keys launch the same operations on the same memory.
  uint64_t key() const;

  // What reads the queries of a layer, [rows][num_qo_heads][head_dim] with `q_row_stride` elements from row to row.
  // REQUIRES: any(layer). Errors are those of the operations.
  absl::Status Choose(const kernels::KernelContext& context, const kernels::AttentionShape& shape,
                      kernels::ConstActivations q, int64_t q_row_stride, int32_t layer);

 private:
  bool scores() const { return plan_.scoring != TokenScoring::kNone; }
  bool scores(int32_t layer) const { return scores() && layer >= plan_.first_layer; }
  void ViewLayer(int32_t layer);

  const Model& whole_;
  const ModelShard& model_;  // of this rank
  const int rank_;
  const kernels::KvPoolView pool_;
  const size_t max_streams_;
  kernels::Session& session_;

  std::span<const DecodeRow> rows_;
  ScoringPlan plan_;        // what the rows that score share, from the first layer of any on; kNone: none does
  bool refreshes_ = false;  // some row makes a choice anew, in some layer
  bool listed_ = false;     // some row has lists of what it may choose from
  int64_t scores_stride_ = 0;
  kernels::TokenLists lists_;
  std::vector<kernels::SequenceSelection> sequences_;                 // [rows]
  std::vector<kernels::SelectingSequence> of_layer_;                  // [rows]
  std::vector<std::span<const int32_t>> pages_, compact_, lists_of_;  // [rows, num_kv_heads], of the layer
  std::unique_ptr<kernels::Buffer> list_memory_;                      // int32 [max_streams, stride] and [max_streams]
  std::unique_ptr<kernels::Buffer> scores_;                           // f32 [max_streams, scores_stride]
};

}  // namespace spl::engine
