// Runs one rank's part of a model's layers over rows of one or more sequences, layer by layer. It is written once
// against kernels::Backend and knows no method: policies and selectors say what a row attends to, and observers do
// everything else that methods do to rows.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/engine/cache/align_plan.h"
#include "services/engine/cache/grow_buffer.h"
#include "services/engine/cache/sequence_kv.h"
#include "services/engine/execution/decode_row.h"
#include "services/engine/execution/line_attention.h"
#include "services/engine/execution/observers/layer_observer.h"
#include "services/engine/execution/pending_mass.h"
#include "services/engine/execution/pending_sample.h"
#include "services/engine/execution/score_memory.h"
#include "services/engine/execution/token_choices.h"
#include "services/engine/model/model.h"
#include "services/engine/recovery/recovery_policy.h"
#include "services/engine/selection/token_selector.h"

namespace spl::engine {

struct ExecutorOptions {
  int32_t num_threads = 0;     // 0: one per core
  int32_t max_rows = 512;      // rows of one forward pass; the workspace grows linearly with it
  int32_t max_sequences = 64;  // sequences in one forward pass
  // Rows of a pass that holds a whole span (PassLayers::whole). The matrix products of such a pass still run over
  // max_rows rows at a time. Its memory is allocated when it first runs. 0: max_rows.
  int32_t max_span_rows = 0;

  int32_t span_rows() const { return max_span_rows > max_rows ? max_span_rows : max_rows; }
  kernels::CpuIsa isa = kernels::DetectCpuIsa();
};

// Hidden states that are handed from one pass to a later one through other layers: f32 [num_rows, hidden_size] in
// device memory. Row r is position first_position + r.
struct HiddenStates {
  std::unique_ptr<kernels::Buffer> memory;
  int32_t first_position = 0;
};

// Rows of one prompt that run in one pass (chunked prefill). Their pages are reserved.
struct PrefillSlice {
  std::span<const int32_t> tokens;
  std::span<const int32_t> positions;  // [tokens.size()], ascending; with gaps if rows are left out
  const SequenceKv* kv = nullptr;
  RecoveryPolicy* policy = nullptr;
  // Read by a pass that begins above layer 0. Written by a pass with keep_hidden. In a
  // slice for a ParallelExecutor, `hidden`, `observers` and `lines` are arrays with an entry for each rank; an Executor
  // gets a pointer to its own.
  HiddenStates* hidden = nullptr;
  const ObserverList* observers = nullptr;  // called in this order; null: none
  LineReport* lines = nullptr;              // result of choosing lines; only for a whole pass
  // [tokens.size()]: positions in the text, by which rows are turned, if `kv` leaves out pages of the text. Empty:
  // `positions`. Otherwise the slice is alone in its pass.
  std::span<const int32_t> angles = {};
};

// The part of the model that a pass runs.
struct PassLayers {
  LayerRange layers;
  bool keys_only_last = false;  // computes only K and V of the last layer
  bool keep_hidden = false;     // writes the hidden states of the slices, which all have room for them
  // Ends the last layer after attention and its scores: nothing reads the layer's output.
  bool attention_only_last = false;
  // Runs one layer of one slice, which may have span_rows() rows (PrefillStage::whole). Logits are then available for
  // the last rows only, at most max_rows of them.
  bool whole = false;
  bool operator==(const PassLayers&) const = default;
};

// Gives what a layer does with the rows of one slice. The tables of a plan have an entry for each KV head of the model.
using PlanSlice = std::function<LayerPlan(size_t slice, int32_t layer)>;

// Owns the workspace; one thread at a time uses it. The caller updates num_tokens of each sequence after a pass. Rows
// do not influence each other: a sequence's results are the same alone and in a batch (attention.h, gemm.h). A model on
// several ranks has one executor for each rank, used by a thread of its own. All of them run the same passes and wait
// for each other in every layer; engines use parallel_executor.h.
class Executor {
 public:
  // `pool` is the rank's part of the pages. `communicator` is taken over; null with one rank.
  static absl::StatusOr<std::unique_ptr<Executor>> Create(
      std::shared_ptr<const Model> model, const kernels::KvPoolView& pool, const ExecutorOptions& options, int rank = 0,
      std::unique_ptr<kernels::Communicator> communicator = nullptr);

  // Called when K and V of the pass's rows are final in the pages of `layer`, before the layer's attention runs. If it
  // returns false, the pass ends early with Cancelled.
  using OnLayer = std::function<bool(int32_t layer)>;

  // When Prefill returns. kLaunched: the device may still be at it. Nobody else may have the pages before a sample of
  // the pass has been waited for, or Synchronize has. A pass that fails, or of a whole span, is complete either way.
  enum class Until : uint8_t { kDone, kLaunched };

  // ResourceExhausted: the slices together have more than max_rows tokens, or a whole one has more than span_rows().
  //
  // `riders`: decode rows of running sequences that share the pass, which adds only the reading of their KV. Their rows
  // follow those of the slices. REQUIRES: the pass runs all layers, no slice has observers, and every rider CanRide.
  absl::Status Prefill(std::span<const PrefillSlice> slices, const PassLayers& pass, const OnLayer& on_layer = nullptr,
                       std::span<const DecodeRow> riders = {}, Until until = Until::kDone);
  // The same, with plans that do not come from the slices' policies.
  absl::Status Prefill(std::span<const PrefillSlice> slices, const PassLayers& pass, const PlanSlice& plan,
                       const OnLayer& on_layer, std::span<const DecodeRow> riders = {}, Until until = Until::kDone);
  // Allocates the hidden states of a prompt: see PrefillSlice.
  absl::StatusOr<HiddenStates> AllocateHidden(PositionRange positions) const;
  // Memory for the scores of a prompt (ColumnScoring), zeros for what runs next (score_memory.h).
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> TakeScores(int64_t count);
  // The indices of the k largest scores, ascending (kernels/selection/top_k.h). Each score is first replaced by the
  // maximum within pool_radius of it (kernels/selection/sparsex/pool_scores.h).
  absl::StatusOr<std::vector<int32_t>> SelectTop(const kernels::Buffer& scores, int64_t num_scores, int32_t pool_radius,
                                                 int64_t k);
  // Copies cached tokens to their places, after all work so far (kernels/kv_copy/align_copy.h).
  absl::Status AlignCopy(const AlignPlan& plan);
  // Runs one decode step and computes the logits of every row. BeginStep of the selectors was called for it. Selectors
  // that choose tokens in it share a step (ScoringPlan::SharesStep).
  absl::Status Decode(std::span<const DecodeRow> rows);
  // Starts to read back what the last Decode estimates (DecodeRow::estimates), before the next Decode.
  absl::StatusOr<PendingMass> BeginMass();

  // Computes the logits of rows of the last prefill (row 0 is the first token of the first slice). FailedPrecondition:
  // the hidden state of a row of a whole span is gone.
  absl::Status ComputeLogits(std::span<const int32_t> rows);
  // The logits that were computed last, [rows, the rank's vocab().size()]. The host may change them. Valid until the
  // next call of the executor.
  absl::StatusOr<std::span<float>> Logits();
  // The most likely token of each row among the rank's logits; ties go to the lower id. Valid until the next call.
  absl::StatusOr<std::span<const int32_t>> Argmax();
  // The same with the logits of these tokens, by which ranks compare them.
  struct Best {
    std::span<const int32_t> tokens;  // counted from the rank's vocab().begin
    std::span<const float> logits;
  };
  absl::StatusOr<Best> ArgmaxWithLogits();
  // Samples tokens for rows of the rank's logits (kernels/sampling/sample_tokens.h). Valid until the next call.
  absl::StatusOr<SampledBatch> Sample(std::span<const kernels::SampleRow> rows);
  // The same without waiting. With at most max_rows rows, the next Decode may read the tokens (DecodeRow::token_of).
  absl::StatusOr<PendingSample> BeginSample(std::span<const kernels::SampleRow> rows);

  // Records a point after the layer's KV, while Prefill runs on_layer. Null if the KV is complete already.
  std::shared_ptr<const kernels::Fence> RecordFence() { return session_->RecordFence(); }

  const Model& model() const { return *whole_; }
  int32_t num_logit_rows() const { return static_cast<int32_t>(num_logit_rows_); }
  int32_t max_rows() const { return options_.max_rows; }
  const kernels::KernelContext& context() const { return session_->context(); }

 private:
  Executor(std::shared_ptr<const Model> model, const kernels::KvPoolView& pool, const ExecutorOptions& options,
           int rank, std::unique_ptr<kernels::Communicator> communicator);
  absl::Status AllocateWorkspace();
  // Checks the pass against the limits and copies its description to where the device reads it.
  absl::Status Stage(bool staged_plans = false);
  absl::Status StageBatch(bool staged_plans = false);
  // A pass of one layer over a span of any length; see executor_span.cc.
  struct SpanPass {
    const PrefillSlice& slice;
    LayerPlan plan;
    int32_t layer = 0;
    bool last_layer = false;
  };
  absl::Status PrefillSpan(const PrefillSlice& slice, const PassLayers& pass, const PlanSlice& plan,
                           const OnLayer& on_layer);
  absl::Status RunSpan(const SpanPass& pass, const OnLayer& on_layer);
  absl::Status SpanKeys(const SpanPass& pass, int32_t begin, int32_t end);
  absl::Status SpanAttention(const SpanPass& pass);
  absl::Status SpanFeedForward(const SpanPass& pass, int32_t begin, int32_t end);
  absl::StatusOr<LineFidelity> SpanFidelity(const SpanPass& pass, const kernels::PrefillAttentionArgs& seen);
  absl::Status StageSpan(const SpanPass& pass, int32_t begin, int32_t end, int64_t kv_len);
  absl::Status AllocateSpan(int64_t num_rows, bool wants_lse);
  // Steps of a pass, the same for prefill and decode.
  struct LayerHooks {
    std::function<absl::Status(int32_t layer)> before_kv;  // before the layer's K and V are written; may be null
    std::function<absl::Status(int32_t layer)> after_kv;   // after K and V of the rows are written; may be null
    OnLayer on_layer;                                      // may be null
    bool keys_only_last = false;
    bool attention_only_last = false;
    std::function<absl::Status(int32_t layer)> attend;
    // Chooses the rows that run through feed-forward (ffn_rows_). If it is null or returns false, all rows do.
    std::function<absl::StatusOr<bool>(int32_t layer)> choose_ffn_rows;
  };
  // `last_tokens`: tokens for the rows with DecodeRow::token_of. Null: no row has one.
  absl::Status Embed(const int32_t* last_tokens = nullptr);
  absl::Status RunLayers(LayerRange layers, const LayerHooks& hooks);
  absl::Status LoadHidden(std::span<const PrefillSlice> slices);
  absl::Status AddDelta(int32_t next_layer);
  absl::Status KeepHidden(std::span<const PrefillSlice> slices);
  kernels::RopeSequence RopeRows(size_t sequence) const;
  void ViewPageTables(int32_t layer);
  absl::Status Grow(std::unique_ptr<kernels::Buffer>& buffer, size_t bytes) {
    return GrowBuffer(model_->backend(), *session_, buffer, bytes);
  }
  // Calls the observers one after the other, slice by slice.
  absl::Status Observe(std::span<const PrefillSlice> slices, int32_t layer,
                       absl::Status (LayerObserver::*hook)(const LayerView&));
  LayerView View(size_t slice, int32_t layer);
  absl::StatusOr<bool> ChooseFfnRows(std::span<const PrefillSlice> slices, int32_t layer);
  absl::Status AttendPrefill(std::span<const PrefillSlice> slices, const PlanSlice& plan, int32_t layer);
  absl::Status AttendRiders(std::span<const DecodeRow> riders, int32_t layer);
  absl::Status AttendDecode(std::span<const DecodeRow> rows, int32_t layer, bool staged_plans);
  absl::Status MeasureEverything(std::span<const DecodeRow> rows, int32_t layer);
  absl::Status MeasureKept(std::span<const DecodeRow> rows, int32_t layer);
  float& MassOf(const DecodeRow& row, int32_t layer, size_t query_head) const;
  void AddPlans();
  absl::Status ReserveLogits(int64_t num_rows);
  absl::Status Project(kernels::Activations residual, kernels::ConstActivations delta, int64_t num_rows);
  absl::Status WriteKv(int32_t layer);
  absl::Status WriteKv(int32_t layer, float* qkv, kernels::Activations q_out);
  // Sums f32 [num_rows, hidden_size] over all ranks. Does nothing with one rank.
  absl::Status Reduce(float* partial, int64_t num_rows);
  // Runs the feed-forward part of `x` [num_rows, hidden_size], dense or with experts, and sums over the ranks.
  absl::Status RunFeedForward(const LayerWeights& weights, kernels::ConstActivations x, int64_t num_rows, float* out);
  absl::Status RunSparseFeedForward(const LayerWeights& weights);
  // Where the product of a weight goes.
  struct Output {
    float* to = nullptr;  // f32 [num_rows, hidden_size]
    bool add = false;     // adds it to what is there; writes to ws_.delta besides. REQUIRES: AddsProducts
  };
  absl::Status FeedForward(const LayerWeights& weights, kernels::ConstActivations x, int64_t num_rows,
                           const Output& out);
  absl::Status Multiply(const kernels::LinearWeight& weight, kernels::ConstActivations x, int64_t num_rows,
                        const Output& out);
  // Whether products of this weight may be added to the residual stream at once, and are faster so. With several ranks
  // they are parts of a sum. Null: they are not.
  bool AddsProducts(const kernels::LinearWeight* weight, int64_t num_rows) const {
    return communicator_ == nullptr && weight != nullptr && weight->PrefersAdd(num_rows);
  }
  kernels::ConstActivations Delta() const {
    return delta_pending_ ? kernels::ConstActivations(ws_.delta->data(), kernels::DType::kF32)
                          : kernels::ConstActivations();
  }
  absl::Status RunExperts(const LayerWeights& weights, kernels::ConstActivations x, int64_t num_rows, float* out);
  absl::Status AllocateExpertWorkspace();
  absl::Status Normalize(float* residual, kernels::ConstActivations delta, const kernels::Buffer& weight,
                         int64_t num_rows, kernels::Activations out);
  // Into ws_.delta, or added to ws_.residual.
  absl::Status ProjectAttention(const kernels::LinearWeight& weight, bool add);
  absl::Status GatherRows(const void* table, int64_t num_table_rows, std::span<const int32_t> ids, float* out);
  kernels::ConstActivations query() const {
    return ws_.q ? Act(ws_.q) : kernels::Activations(ws_.qkv->data(), kernels::DType::kF32);
  }
  int64_t query_stride() const {
    const ModelConfig& c = model_->config();
    return ws_.q ? c.q_size() : c.q_size() + 2ll * c.kv_size();
  }
  kernels::Activations Act(const std::unique_ptr<kernels::Buffer>& buffer) const {
    return {buffer->data(), activation_dtype_};
  }
  // Whether inputs of products with this weight are rounded to e4m3. Null: they are not.
  bool Quantizes(const kernels::LinearWeight* weight, int64_t num_rows) const {
    return weight != nullptr && whole_->quantizes_activations() && weight->PrefersE4M3(num_rows);
  }
  // The buffer as input of a product with `weight`. In e4m3 its scales are valid until the next such input is made.
  kernels::Activations InputOf(const kernels::LinearWeight* weight, const std::unique_ptr<kernels::Buffer>& buffer,
                               int64_t num_rows) const {
    if (!Quantizes(weight, num_rows)) return Act(buffer);
    return {buffer->data(), kernels::DType::kE4M3, static_cast<float*>(ws_.row_scales->data()), weight->e4m3_group()};
  }
  kernels::AttentionShape attention_shape() const;

  // The rows of one sequence in the current pass.
  struct RowSpan {
    int32_t begin = 0, end = 0;
    int64_t kv_len = 0;  // after the pass has written its rows
    const SequenceKv* kv = nullptr;
    TokenSelector* selector = nullptr;     // only in a decode step
    std::span<const int32_t> angles = {};  // PrefillSlice::angles
  };

  const std::shared_ptr<const Model> whole_;
  const ModelShard* const model_;  // the part of this rank
  const int rank_;
  const kernels::KvPoolView pool_;
  const ExecutorOptions options_;
  kernels::DType activation_dtype_ = kernels::DType::kF32;
  std::unique_ptr<kernels::Communicator> communicator_;  // null with one rank; outlives what the session recorded
  std::unique_ptr<kernels::Session> session_;
  ScoreMemory score_memory_;

  int32_t num_rows_ = 0;
  int32_t first_row_ = 0;  // first row of the pass that is still in the workspace, which has num_rows_ rows
  int64_t num_logit_rows_ = 0;
  bool delta_pending_ = false;  // ws_.delta is still to be added to ws_.residual
  std::vector<RowSpan> spans_;
  std::vector<int32_t> tokens_, positions_;
  // Scratch of WriteKv and attention, rebuilt per layer without allocating once warm.
  std::vector<std::span<const int32_t>> table_views_;
  std::vector<kernels::RopeSequence> rope_sequences_;
  std::vector<kernels::HeadStreamView> stream_views_;
  std::vector<kernels::PrefillSequence> prefill_sequences_;
  std::vector<kernels::BatchSequence> batch_sequences_;
  std::vector<kernels::HeadVisibility> plans_;  // the sequences whose plan the session lacks
  std::vector<int32_t> row_ids_;
  std::vector<LayerPlan> layer_plans_;       // the layer that runs, by slice
  kernels::PrefillAttentionArgs attention_;  // the layer that runs, for observers
  ObserverScratch scratch_;
  std::vector<int32_t> ffn_rows_;
  std::unique_ptr<TokenChoices> choices_;
  std::vector<float> host_logits_;        // if the host cannot change the device's memory
  std::unique_ptr<LineAttention> lines_;  // made when a span first chooses lines
  PendingSample last_sample_;             // the last Sample

  struct Workspace {
    // Inputs of matrix products (normed, q, attention, activated, expert_activated) have activation_dtype_, or are rows
    // in e4m3 (InputOf). Outputs of products and the residual stream stay f32: with every result rounded to bf16 the
    // logits of a small model were 4.8e-3 off, with these in f32 they are within 4e-3. Behind a gate and up of rows in
    // e4m3, whose rounding is ten times that of bf16, they are bf16.
    std::unique_ptr<kernels::Buffer> residual;        // [max_rows, hidden]
    std::unique_ptr<kernels::Buffer> delta;           // [max_rows, hidden]: see delta_pending_
    std::unique_ptr<kernels::Buffer> normed;          // [max_rows, hidden], or attention in e4m3 [max_rows, Hq d]
    std::unique_ptr<kernels::Buffer> row_scales;      // f32 [max_rows, groups], of the last input in e4m3
    std::unique_ptr<kernels::Buffer> qkv;             // [max_rows, (Hq + 2 Hk) d]
    std::unique_ptr<kernels::Buffer> q;               // [max_rows, Hq d]; null if attention reads q from qkv
    std::unique_ptr<kernels::Buffer> attention;       // [max_rows, Hq d]
    std::unique_ptr<kernels::Buffer> lse;             // f32 [max_rows, Hq], once an observer asked for it
    std::unique_ptr<kernels::Buffer> top;             // int32, grown on demand
    std::unique_ptr<kernels::Buffer> pooled;          // f32 scores, grown on demand
    std::unique_ptr<kernels::Buffer> gate_up;         // [max_rows, 2 ffn]
    std::unique_ptr<kernels::Buffer> activated;       // [max_rows, ffn]
    std::unique_ptr<kernels::Buffer> gathered;        // [max_rows, hidden]: feed-forward output of chosen rows
    std::unique_ptr<kernels::Buffer> gathered_delta;  // [max_rows, hidden]: feed-forward input of chosen rows
    std::unique_ptr<kernels::Buffer> logits;          // [rows, vocab part], grown on demand
    std::unique_ptr<kernels::Buffer> argmax;          // int32 [max_rows], f32 [max_rows]
    std::unique_ptr<kernels::Buffer> sampled;         // SampledRow, TopToken: for BeginSample, grown on demand
    std::unique_ptr<kernels::Buffer> tokens;          // int32 [max_rows]: for BeginSample
    // For a whole span, grown on demand. span_q: rotated queries [rows, Hq d]; all of qkv on a device that rotates in
    // place. span_attention: output of attention. span_lse: f32 [rows, Hq].
    std::unique_ptr<kernels::Buffer> span_q, span_attention, span_lse;
    // For models with experts. A place is a (row, chosen expert) pair; there are max_rows * experts per token.
    std::unique_ptr<kernels::Buffer> router_logits;     // f32 [max_rows, experts]
    std::unique_ptr<kernels::Buffer> expert_ids;        // int32 [places]
    std::unique_ptr<kernels::Buffer> expert_weights;    // f32 [places]
    std::unique_ptr<kernels::Buffer> expert_offsets;    // int32 [experts + 1]
    std::unique_ptr<kernels::Buffer> place_rows;        // int32 [places]
    std::unique_ptr<kernels::Buffer> row_places;        // int32 [places]
    std::unique_ptr<kernels::Buffer> expert_gate_up;    // [places, 2 expert ffn]
    std::unique_ptr<kernels::Buffer> expert_activated;  // [places, expert ffn]
    std::unique_ptr<kernels::Buffer> expert_out;        // [places, hidden]
  } ws_;
};

}  // namespace spl::engine
