#include "services/engine/execution/executor.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "services/base/check.h"
#include "services/base/status.h"

namespace spl::engine {
namespace {

float* F32(const std::unique_ptr<kernels::Buffer>& buffer) { return static_cast<float*>(buffer->data()); }

}  // namespace

Executor::Executor(std::shared_ptr<const Model> model, const kernels::KvPoolView& pool, const ExecutorOptions& options,
                   int rank, std::unique_ptr<kernels::Communicator> communicator)
    : whole_(std::move(model)),
      model_(&whole_->rank(rank)),
      rank_(rank),
      pool_(pool),
      options_(options),
      communicator_(std::move(communicator)) {}

absl::StatusOr<std::unique_ptr<Executor>> Executor::Create(std::shared_ptr<const Model> model,
                                                           const kernels::KvPoolView& pool,
                                                           const ExecutorOptions& options, int rank,
                                                           std::unique_ptr<kernels::Communicator> communicator) {
  const ModelShard& shard = model->rank(rank);
  const ModelConfig& c = shard.config();
  if (options.max_rows < 1) return InvalidArgument("executor: max_rows is {}, at least 1 is needed", options.max_rows);
  if (pool.head_dim != c.head_dim || pool.dtype != model->kv_dtype())
    return Errorf(absl::StatusCode::kFailedPrecondition, "executor: the KV pool's layout is not the model's");
  const int32_t table_kv_heads = model->config().num_kv_heads;
  auto executor =
      std::unique_ptr<Executor>(new Executor(std::move(model), pool, options, rank, std::move(communicator)));
  executor->activation_dtype_ = shard.backend().activation_dtype(c.dtype);
  // Of the longest sequence that the pool holds: local heads may leave most of their pages out.
  int32_t whole_streams = c.num_layers * c.num_kv_heads;
  if (const auto& map = executor->whole_->head_classes(); map != nullptr) {
    for (int32_t layer = 0; layer < c.num_layers; ++layer) {
      for (int32_t h = 0; h < c.num_kv_heads; ++h)
        whole_streams -= !map->served(layer, shard.first_kv_head() + h).is_global;
    }
  }
  SPLICE_ASSIGN_OR_RETURN(
      executor->session_,
      shard.backend().NewSession(
          {.num_threads = options.num_threads,
           .isa = options.isa,
           .max_rows = options.span_rows(),
           .max_sequences = std::min(options.max_sequences, options.max_rows),
           .num_layers = c.num_layers,
           .num_kv_heads = c.num_kv_heads,
           .max_pages_per_stream = std::min(PagesFor(c.max_positions), pool.num_pages / std::max(whole_streams, 1)),
           .first_kv_head = shard.first_kv_head(),
           .table_kv_heads = table_kv_heads,
           .first_page = pool.first_page}));
  executor->choices_ = std::make_unique<TokenChoices>(
      *executor->whole_, rank, pool, std::min(options.max_sequences, options.max_rows), *executor->session_);
  SPLICE_RETURN_IF_ERROR(executor->AllocateWorkspace());
  return executor;
}

absl::Status Executor::AllocateWorkspace() {
  const ModelConfig& c = model_->config();
  const auto allocate = [&](std::unique_ptr<kernels::Buffer>& buffer, int64_t width,
                            kernels::DType dtype) -> absl::Status {
    const auto rows = static_cast<size_t>(kernels::E4M3Rows(options_.max_rows));
    SPLICE_ASSIGN_OR_RETURN(buffer, model_->backend().Allocate(kernels::DTypeBytes(dtype) * rows * width));
    return absl::OkStatus();
  };
  const kernels::DType act = activation_dtype_;
  SPLICE_RETURN_IF_ERROR(allocate(ws_.residual, c.hidden_size, kernels::DType::kF32));
  SPLICE_RETURN_IF_ERROR(allocate(ws_.delta, c.hidden_size, kernels::DType::kF32));
  const auto codes_of_attention = c.q_size() / static_cast<int64_t>(kernels::DTypeBytes(act)) + 1;
  SPLICE_RETURN_IF_ERROR(allocate(ws_.normed, std::max<int64_t>(c.hidden_size, codes_of_attention), act));
  const auto widest = std::max<int64_t>({c.hidden_size, c.q_size(), c.intermediate_size});
  SPLICE_RETURN_IF_ERROR(allocate(ws_.row_scales, widest / kernels::kE4M3Group + 1, kernels::DType::kF32));
  SPLICE_RETURN_IF_ERROR(allocate(ws_.qkv, c.q_size() + 2 * c.kv_size(), kernels::DType::kF32));
  if (act != kernels::DType::kF32) SPLICE_RETURN_IF_ERROR(allocate(ws_.q, c.q_size(), act));
  SPLICE_RETURN_IF_ERROR(allocate(ws_.attention, c.q_size(), act));
  SPLICE_RETURN_IF_ERROR(allocate(ws_.gate_up, 2ll * c.intermediate_size, kernels::DType::kF32));
  SPLICE_RETURN_IF_ERROR(allocate(ws_.activated, c.intermediate_size, act));
  SPLICE_RETURN_IF_ERROR(allocate(ws_.gathered, c.hidden_size, kernels::DType::kF32));
  SPLICE_RETURN_IF_ERROR(allocate(ws_.argmax, 2, kernels::DType::kF32));
  SPLICE_RETURN_IF_ERROR(allocate(ws_.tokens, 1, kernels::DType::kF32));
  SPLICE_RETURN_IF_ERROR(allocate(ws_.gathered_delta, c.hidden_size, kernels::DType::kF32));
  return c.moe.num_experts > 0 ? AllocateExpertWorkspace() : absl::OkStatus();
}

kernels::AttentionShape Executor::attention_shape() const {
  const ModelConfig& c = model_->config();
  return {c.num_qo_heads, c.num_kv_heads, c.head_dim, 1.0f / std::sqrt(static_cast<float>(c.head_dim))};
}

absl::Status Executor::Stage(bool staged_plans) {
  num_rows_ = static_cast<int32_t>(tokens_.size());
  first_row_ = 0;
  num_logit_rows_ = 0;
  if (num_rows_ > options_.max_rows)
    return Errorf(absl::StatusCode::kResourceExhausted, "executor: {} rows in one pass, at most {}", num_rows_,
                  options_.max_rows);
  if (spans_.size() > static_cast<size_t>(options_.max_sequences))
    return Errorf(absl::StatusCode::kResourceExhausted, "executor: {} sequences in one pass, at most {}", spans_.size(),
                  options_.max_sequences);
  return StageBatch(staged_plans);
}

absl::Status Executor::StageBatch(bool staged_plans) {
  batch_sequences_.clear();
  for (size_t s = 0; s < spans_.size(); ++s) {
    const RowSpan& rows = spans_[s];
    batch_sequences_.push_back({.row_begin = rows.begin,
                                .row_end = rows.end,
                                .kv_len = static_cast<int32_t>(rows.kv_len),
                                .page_tables = rows.kv->streams(),
                                .kv_id = rows.kv->id(),
                                .selection = rows.selector != nullptr ? choices_->selection(s) : nullptr});
  }
  if (staged_plans) AddPlans();
  return session_->Stage({tokens_, positions_, batch_sequences_, spans_[0].angles, staged_plans});
}

absl::Status Executor::Embed(const int32_t* last_tokens) {
  const ModelConfig& c = model_->config();
  return model_->backend().GatherRows(context(), {.table = model_->embedding(),
                                                  .dtype = model_->embedding_dtype(),
                                                  .num_table_rows = c.vocab_size,
                                                  .width = c.hidden_size,
                                                  .ids = tokens_,
                                                  .out = F32(ws_.residual),
                                                  .ids_are_batch_tokens = true,
                                                  .last_tokens = last_tokens});
}

absl::Status Executor::RunLayers(LayerRange layers, const LayerHooks& hooks) {
  const kernels::Backend& backend = model_->backend();
  delta_pending_ = false;
  for (int32_t layer = layers.begin; layer < layers.end; ++layer) {
    const LayerWeights& weights = model_->layer(layer);
    const kernels::Activations attention_in = InputOf(weights.qkv.get(), ws_.normed, num_rows_);
    SPLICE_RETURN_IF_ERROR(Normalize(F32(ws_.residual), Delta(), *weights.attention_norm, num_rows_, attention_in));
    delta_pending_ = false;
    SPLICE_RETURN_IF_ERROR(backend.Linear(context(), {.x = attention_in,
                                                      .weight = weights.qkv.get(),
                                                      .bias = weights.qkv_bias ? F32(weights.qkv_bias) : nullptr,
                                                      .y = F32(ws_.qkv),
                                                      .num_rows = num_rows_}));
    if (hooks.before_kv) SPLICE_RETURN_IF_ERROR(hooks.before_kv(layer));
    SPLICE_RETURN_IF_ERROR(WriteKv(layer));
    if (hooks.after_kv) SPLICE_RETURN_IF_ERROR(hooks.after_kv(layer));
    // A later stage runs the layer again for the rows that go on, and announces its pages then.
    if (hooks.keys_only_last && layer + 1 == layers.end) return absl::OkStatus();
    if (hooks.on_layer && !hooks.on_layer(layer)) return absl::CancelledError("the pass was cancelled");
    SPLICE_RETURN_IF_ERROR(hooks.attend(layer));
    if (hooks.attention_only_last && layer + 1 == layers.end) return absl::OkStatus();
    // An observer may read what attention adds.
    delta_pending_ = hooks.choose_ffn_rows || !AddsProducts(weights.o.get(), num_rows_);
    SPLICE_RETURN_IF_ERROR(ProjectAttention(*weights.o, !delta_pending_));
    SPLICE_RETURN_IF_ERROR(Reduce(F32(ws_.delta), num_rows_));
    bool sparse = false;
    if (hooks.choose_ffn_rows) {
      SPLICE_ASSIGN_OR_RETURN(sparse, hooks.choose_ffn_rows(layer));
    }
    const kernels::Activations ffn_in = InputOf(sparse ? nullptr : weights.gate_up.get(), ws_.normed, num_rows_);
    SPLICE_RETURN_IF_ERROR(Normalize(F32(ws_.residual), Delta(), *weights.ffn_norm, num_rows_, ffn_in));
    delta_pending_ = sparse || !AddsProducts(weights.down.get(), num_rows_);
    if (sparse) {
      SPLICE_RETURN_IF_ERROR(RunSparseFeedForward(weights));
    } else {
      SPLICE_RETURN_IF_ERROR(delta_pending_ ? RunFeedForward(weights, ffn_in, num_rows_, F32(ws_.delta))
                                            : FeedForward(weights, ffn_in, num_rows_, {F32(ws_.residual), true}));
    }
  }
  return absl::OkStatus();
}

absl::Status Executor::Reduce(float* partial, int64_t num_rows) {
  if (communicator_ == nullptr) return absl::OkStatus();
  return communicator_->AllReduceSum(context(), partial, num_rows * model_->config().hidden_size);
}

absl::Status Executor::Multiply(const kernels::LinearWeight& weight, kernels::ConstActivations x, int64_t num_rows,
                                const Output& out) {
  if (!out.add)
    return model_->backend().Linear(context(), {.x = x, .weight = &weight, .y = out.to, .num_rows = num_rows});
  return model_->backend().LinearAdd(
      context(), {.x = x, .weight = &weight, .y = out.to, .product = F32(ws_.delta), .num_rows = num_rows});
}

absl::Status Executor::ProjectAttention(const kernels::LinearWeight& weight, bool add) {
  kernels::ConstActivations x = Act(ws_.attention);
  if (Quantizes(&weight, num_rows_)) {
    const kernels::Activations codes = InputOf(&weight, ws_.normed, num_rows_);
    SPLICE_RETURN_IF_ERROR(model_->backend().QuantizeRows(
        context(), {.x = x, .out = codes, .num_rows = num_rows_, .width = model_->config().q_size()}));
    x = codes;
  }
  return Multiply(weight, x, num_rows_, {F32(add ? ws_.residual : ws_.delta), add});
}

absl::Status Executor::Normalize(float* residual, kernels::ConstActivations delta, const kernels::Buffer& weight,
                                 int64_t num_rows, kernels::Activations out) {
  return model_->backend().RmsNorm(context(), {.residual = residual,
                                               .delta = delta,
                                               .weight = static_cast<const float*>(weight.data()),
                                               .out = out,
                                               .num_rows = num_rows,
                                               .width = model_->config().hidden_size,
                                               .eps = model_->config().rms_norm_eps});
}

void Executor::ViewPageTables(int32_t layer) {
  table_views_.clear();
  for (const RowSpan& rows : spans_) {
    for (int32_t h = 0; h < model_->config().num_kv_heads; ++h)
      table_views_.push_back(rows.kv->stream(layer, model_->first_kv_head() + h));
  }
}

kernels::RopeSequence Executor::RopeRows(size_t sequence) const {
  const RowSpan& rows = spans_[sequence];
  const size_t heads = model_->config().num_kv_heads;
  return {rows.begin, rows.end, std::span(positions_).subspan(rows.begin, rows.end - rows.begin),
          std::span(table_views_).subspan(sequence * heads, heads), rows.angles};
}

absl::Status Executor::WriteKv(int32_t layer) {
  return WriteKv(layer, F32(ws_.qkv), ws_.q ? Act(ws_.q) : kernels::Activations());
}

absl::Status Executor::WriteKv(int32_t layer, float* qkv, kernels::Activations q_out) {
  const ModelConfig& c = model_->config();
  ViewPageTables(layer);
  rope_sequences_.clear();
  for (size_t s = 0; s < spans_.size(); ++s) rope_sequences_.push_back(RopeRows(s));
  const LayerWeights& weights = model_->layer(layer);
  kernels::QkNorm qk_norm;
  if (c.qk_norm) qk_norm = {F32(weights.q_norm), F32(weights.k_norm), c.rms_norm_eps};
  return model_->backend().RopeWriteKv(context(), {.qkv = qkv,
                                                   .num_qo_heads = c.num_qo_heads,
                                                   .num_kv_heads = c.num_kv_heads,
                                                   .head_dim = c.head_dim,
                                                   .table = model_->rope(),
                                                   .pool = pool_,
                                                   .sequences = rope_sequences_,
                                                   .layer = layer,
                                                   .qk_norm = qk_norm,
                                                   .q_out = q_out});
}

absl::StatusOr<HiddenStates> Executor::AllocateHidden(PositionRange positions) const {
  HiddenStates hidden{nullptr, positions.begin};
  const size_t bytes = sizeof(float) * static_cast<size_t>(positions.size()) * model_->config().hidden_size;
  SPLICE_ASSIGN_OR_RETURN(hidden.memory, model_->backend().Allocate(bytes));
  return hidden;
}

absl::Status Executor::AlignCopy(const AlignPlan& plan) {
  if (plan.runs.empty()) return absl::OkStatus();
  return model_->backend().AlignCopy(context(), plan.Args(pool_, model_->config().head_dim));
}

}  // namespace spl::engine
