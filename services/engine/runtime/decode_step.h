// Runs one step of a decode engine's batch: every active continuation gets its next token. On a device the next step
// starts before the host has the tokens of the last one (docs/decisions/0009-the-next-step-before-the-tokens.md).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/engine/cache/page_pool.h"
#include "services/engine/execution/parallel_executor.h"
#include "services/engine/execution/pending_sample.h"
#include "services/engine/runtime/adaptive_decoding.h"
#include "services/engine/runtime/decode_batch.h"
#include "services/engine/runtime/decode_fidelity.h"
#include "services/engine/runtime/on_pass.h"
#include "services/engine/runtime/sample_rows.h"
#include "services/engine/runtime/step_offer.h"
#include "services/engine/runtime/token_delivery.h"

namespace spl::engine {

// Engine thread.
class DecodeStep {
 public:
  // All outlive it. `async`: a step may start before the tokens of the last one are taken. `on_pass` hears of passes
  // that no prompts carried.
  DecodeStep(ParallelExecutor& executor, DecodeBatch& batch, AdaptiveDecoding& adaptive, DecodeFidelity& fidelity,
             TokenDelivery& delivery, bool async, OnPass on_pass);

  // Runs the batch in one pass of the model, or in several if its continuations choose tokens in too many ways for one.
  // A pass that fails ends its own sequences with Internal. DataLoss: the device is lost, and every sequence has ended
  // with Unavailable. REQUIRES: each active continuation has room for its next position.
  //
  // If possible (async, and no row needs the host in front of its layers), it starts the layers of the batch's step,
  // takes the tokens of the step under way, and then starts to sample, so that penalties and masks know these tokens. A
  // stop token is found while the new step already has a row of its continuation. The token of that row is dropped, and
  // the sequence ends, with its pages, when the new step is taken.
  absl::Status Run();
  // Whether a step runs whose tokens have not been taken. They must be taken before one of its sequences ends or its
  // pages move.
  bool under_way() const { return !flight_.rows.empty(); }
  // Waits for the step under way and takes its tokens. Errors as Run.
  absl::Status TakeUnderWay();

  // The batch as a step that a pass of prompts may carry. Valid until the next call of any function. Null: the step
  // must run by itself.
  StepOffer* Offer();
  // Takes the results of a step that was carried. Errors as Run.
  absl::Status Land();

  uint64_t num_steps() const { return num_steps_; }  // passes of the model, including those that carried the batch
  double host_s() const { return host_s_; }          // DecodeLoad::host_s

 private:
  struct Row {
    DecodeSequence* sequence;
    DecodeFork* fork;
    StepKind kind;  // what its selector was told
  };
  // Continuations that share one pass.
  struct Group {
    std::vector<ScoringPlan> plans;  // the different ways to choose tokens
    std::vector<Row> rows;           // rows of one sequence are adjacent
    bool Has(const ScoringPlan& plan) const;
    void Add(const ScoringPlan& plan);
    bool Fits(const TokenSelector& selector) const;  // whether a row with this selector may join
  };

  // A step that was started and whose tokens were not taken.
  struct Flight {
    std::vector<Row> rows;
    PendingSample sample;
    PendingMass mass;
  };

  void MakeGroups();  // decides for each row what the step attends to, if its method leaves that open
  bool MayRunAhead() const;
  // Row of the step whose attention is measured for its guard; -1: none.
  int64_t RowToMeasure(std::span<const Row> rows) const;
  absl::Status RunAhead();
  absl::Status StartLayers(std::span<const Row> rows, Flight& flight);
  absl::Status StartSampling(Flight& flight);
  // Waits for the tokens of a step, and what it estimates, and takes them.
  absl::Status Take(Flight& flight);
  void TakeMass(std::span<const Row> rows, const KeptMass& mass);
  void TakeTokens(std::span<const Row> rows, const SampledBatch& batch);
  absl::Status RunTogether(std::span<const Row> rows);
  void DescribeRows(std::span<const Row> rows);
  absl::StatusOr<std::vector<SampledToken>> RunModel(std::span<const Row> rows);
  // `sampled`: the token of each row; nullopt: its continuation had ended before.
  void TakeTokens(std::span<const Row> rows, std::vector<std::optional<SampledToken>> sampled);
  static StepChoice DescribeStep(const Row& row);
  // Takes the sampled token of a continuation, or its next replayed token instead.
  static void TakeToken(DecodeFork& fork, SampledToken& sampled);
  // Ends the sequences of a failed pass. DataLoss as Run.
  absl::Status Fail(std::span<const Row> rows, const absl::Status& status);

  const Model& model_;
  ParallelExecutor& executor_;
  DecodeBatch& batch_;
  AdaptiveDecoding& adaptive_;
  DecodeFidelity& fidelity_;
  TokenDelivery& delivery_;
  RowSampler row_sampler_;
  const bool async_;
  const OnPass on_pass_;
  Flight flight_;  // without rows: no step is under way
  uint64_t num_steps_ = 0;
  uint64_t measured_step_ = 0;  // the last one that was measured for a guard, from 1; 0: none
  double host_s_ = 0;
  double model_ended_s_ = 0;  // when the last pass had its tokens; 0: it failed

  // Scratch for the current step; kept to avoid allocations.
  std::vector<Group> groups_;
  size_t num_groups_ = 0;
  std::vector<DecodeRow> decode_rows_;
  std::vector<Sampler*> samplers_;
  std::vector<WatchedSequence*> watched_;
  StepOffer offer_;
};

}  // namespace spl::engine
