#include "services/engine/model/executor.h"

#include <cmath>
#include <thread>

#include "services/base/status.h"

namespace spl::engine {
namespace {

float* F32(const std::unique_ptr<kernels::Buffer>& buffer) { return static_cast<float*>(buffer->data()); }

}  // namespace

Executor::Executor(std::shared_ptr<const Model> model, const kernels::KvPoolView& pool, const ExecutorOptions& options)
    : model_(std::move(model)), pool_(pool), options_(options) {
  const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  threads_ = std::make_unique<kernels::ThreadPool>(options.num_threads > 0 ? options.num_threads : cores);
  context_ = {.pool = threads_.get(), .isa = options.isa};
}

absl::StatusOr<std::unique_ptr<Executor>> Executor::Create(std::shared_ptr<const Model> model,
                                                           const kernels::KvPoolView& pool,
                                                           const ExecutorOptions& options) {
  if (options.max_rows < 1) return InvalidArgument("executor: max_rows is {}, at least 1 is needed", options.max_rows);
  if (pool.head_dim != model->config().head_dim || pool.dtype != model->kv_dtype())
    return Errorf(absl::StatusCode::kFailedPrecondition, "executor: the KV pool's layout is not the model's");
  auto executor = std::unique_ptr<Executor>(new Executor(std::move(model), pool, options));
  SPLICE_RETURN_IF_ERROR(executor->AllocateWorkspace());
  return executor;
}

absl::Status Executor::AllocateWorkspace() {
  const ModelConfig& c = model_->config();
  const auto allocate = [&](std::unique_ptr<kernels::Buffer>& buffer, int64_t width) -> absl::Status {
    SPLICE_ASSIGN_OR_RETURN(buffer, model_->backend().Allocate(sizeof(float) * options_.max_rows * width));
    return absl::OkStatus();
  };
  SPLICE_RETURN_IF_ERROR(allocate(ws_.residual, c.hidden_size));
  SPLICE_RETURN_IF_ERROR(allocate(ws_.delta, c.hidden_size));
  SPLICE_RETURN_IF_ERROR(allocate(ws_.normed, c.hidden_size));
  SPLICE_RETURN_IF_ERROR(allocate(ws_.qkv, c.q_size() + 2 * c.kv_size()));
  SPLICE_RETURN_IF_ERROR(allocate(ws_.attention, c.q_size()));
  SPLICE_RETURN_IF_ERROR(allocate(ws_.gate_up, 2ll * c.intermediate_size));
  SPLICE_RETURN_IF_ERROR(allocate(ws_.activated, c.intermediate_size));
  SPLICE_RETURN_IF_ERROR(allocate(ws_.gathered, c.hidden_size));
  return allocate(ws_.gathered_delta, c.hidden_size);
}

kernels::AttentionShape Executor::attention_shape() const {
  const ModelConfig& c = model_->config();
  return {c.num_qo_heads, c.num_kv_heads, c.head_dim, 1.0f / std::sqrt(static_cast<float>(c.head_dim))};
}

absl::Status Executor::Prefill(std::span<const PrefillSlice> slices, const OnLayer& on_layer) {
  const ModelConfig& c = model_->config();
  spans_.clear();
  tokens_.clear();
  positions_.clear();
  for (const PrefillSlice& slice : slices) {
    const int32_t begin = static_cast<int32_t>(tokens_.size());
    tokens_.insert(tokens_.end(), slice.tokens.begin(), slice.tokens.end());
    for (size_t i = 0; i < slice.tokens.size(); ++i)
      positions_.push_back(static_cast<int32_t>(slice.first_position + static_cast<int64_t>(i)));
    spans_.push_back({begin, static_cast<int32_t>(tokens_.size()), slice.kv});
  }
  const auto attend = [&](int32_t layer) -> absl::Status {
    stream_views_.clear();
    for (size_t s = 0; s < slices.size(); ++s) {
      const LayerPlan plan = slices[s].policy->PlanLayer(layer);
      const int64_t kv_len = slices[s].first_position + static_cast<int64_t>(slices[s].tokens.size());
      for (int32_t h = 0; h < c.num_kv_heads; ++h)
        stream_views_.push_back({spans_[s].kv->stream(layer, h), static_cast<int32_t>(kv_len), plan.visibility[h]});
    }
    prefill_sequences_.clear();
    for (size_t s = 0; s < spans_.size(); ++s) {
      const RowSpan& rows = spans_[s];
      prefill_sequences_.push_back({rows.begin, rows.end,
                                    std::span(positions_).subspan(rows.begin, rows.end - rows.begin),
                                    std::span(stream_views_).subspan(s * c.num_kv_heads, c.num_kv_heads)});
    }
    return model_->backend().PrefillAttention(context_, {.shape = attention_shape(),
                                                         .pool = pool_,
                                                         .q = F32(ws_.qkv),
                                                         .q_row_stride = c.q_size() + 2ll * c.kv_size(),
                                                         .out = F32(ws_.attention),
                                                         .sequences = prefill_sequences_});
  };
  return Run(tokens_, on_layer, attend);
}

absl::Status Executor::Decode(std::span<const DecodeRow> rows) {
  const ModelConfig& c = model_->config();
  spans_.clear();
  tokens_.clear();
  positions_.clear();
  for (const DecodeRow& row : rows) {
    const int32_t begin = static_cast<int32_t>(tokens_.size());
    tokens_.push_back(row.token);
    positions_.push_back(static_cast<int32_t>(row.kv->num_tokens()));
    spans_.push_back({begin, begin + 1, row.kv});
  }
  const auto attend = [&](int32_t layer) -> absl::Status {
    stream_views_.clear();
    for (const DecodeRow& row : rows) {
      for (int32_t h = 0; h < c.num_kv_heads; ++h)
        stream_views_.push_back(
            {row.kv->stream(layer, h), static_cast<int32_t>(row.kv->num_tokens() + 1), row.selector->Select(layer, h)});
    }
    return model_->backend().DecodeAttention(context_, {.shape = attention_shape(),
                                                        .pool = pool_,
                                                        .q = F32(ws_.qkv),
                                                        .q_row_stride = c.q_size() + 2ll * c.kv_size(),
                                                        .out = F32(ws_.attention),
                                                        .streams = stream_views_});
  };
  return Run(tokens_, nullptr, attend);
}

absl::Status Executor::Run(std::span<const int32_t> tokens, const OnLayer& on_layer,
                           const std::function<absl::Status(int32_t)>& attend) {
  const ModelConfig& c = model_->config();
  const kernels::Backend& backend = model_->backend();
  if (tokens.size() > static_cast<size_t>(options_.max_rows))
    return Errorf(absl::StatusCode::kResourceExhausted, "executor: {} rows in one pass, at most {}", tokens.size(),
                  options_.max_rows);
  num_rows_ = static_cast<int32_t>(tokens.size());
  SPLICE_RETURN_IF_ERROR(backend.GatherRows(context_, {.table = model_->embedding(),
                                                       .dtype = model_->embedding_dtype(),
                                                       .num_table_rows = c.vocab_size,
                                                       .width = c.hidden_size,
                                                       .ids = tokens,
                                                       .out = F32(ws_.residual)}));
  const float* delta = nullptr;
  for (int32_t layer = 0; layer < c.num_layers; ++layer) {
    const LayerWeights& weights = model_->layer(layer);
    SPLICE_RETURN_IF_ERROR(Normalize(delta, *weights.attention_norm));
    SPLICE_RETURN_IF_ERROR(backend.Linear(context_, {.x = F32(ws_.normed),
                                                     .weight = weights.qkv.get(),
                                                     .bias = weights.qkv_bias ? F32(weights.qkv_bias) : nullptr,
                                                     .y = F32(ws_.qkv),
                                                     .num_rows = num_rows_}));
    SPLICE_RETURN_IF_ERROR(WriteKv(layer));
    if (on_layer && !on_layer(layer)) return absl::CancelledError("the pass was cancelled");
    SPLICE_RETURN_IF_ERROR(attend(layer));
    SPLICE_RETURN_IF_ERROR(backend.Linear(
        context_, {.x = F32(ws_.attention), .weight = weights.o.get(), .y = F32(ws_.delta), .num_rows = num_rows_}));
    SPLICE_RETURN_IF_ERROR(Normalize(F32(ws_.delta), *weights.ffn_norm));
    SPLICE_RETURN_IF_ERROR(FeedForward(weights));
    delta = F32(ws_.delta);
  }
  return absl::OkStatus();
}

absl::Status Executor::Normalize(const float* delta, const kernels::Buffer& weight) {
  return model_->backend().RmsNorm(context_, {.residual = F32(ws_.residual),
                                              .delta = delta,
                                              .weight = static_cast<const float*>(weight.data()),
                                              .out = F32(ws_.normed),
                                              .num_rows = num_rows_,
                                              .width = model_->config().hidden_size,
                                              .eps = model_->config().rms_norm_eps});
}

absl::Status Executor::WriteKv(int32_t layer) {
  const ModelConfig& c = model_->config();
  table_views_.clear();
  for (const RowSpan& rows : spans_) {
    for (int32_t h = 0; h < c.num_kv_heads; ++h) table_views_.push_back(rows.kv->stream(layer, h));
  }
  rope_sequences_.clear();
  for (size_t s = 0; s < spans_.size(); ++s) {
    const RowSpan& rows = spans_[s];
    rope_sequences_.push_back({rows.begin, rows.end, std::span(positions_).subspan(rows.begin, rows.end - rows.begin),
                               std::span(table_views_).subspan(s * c.num_kv_heads, c.num_kv_heads)});
  }
  return model_->backend().RopeWriteKv(context_, {.qkv = F32(ws_.qkv),
                                                  .num_qo_heads = c.num_qo_heads,
                                                  .num_kv_heads = c.num_kv_heads,
                                                  .head_dim = c.head_dim,
                                                  .table = model_->rope(),
                                                  .pool = pool_,
                                                  .sequences = rope_sequences_});
}

absl::Status Executor::FeedForward(const LayerWeights& weights) {
  const kernels::Backend& backend = model_->backend();
  SPLICE_RETURN_IF_ERROR(backend.Linear(
      context_, {.x = F32(ws_.normed), .weight = weights.gate_up.get(), .y = F32(ws_.gate_up), .num_rows = num_rows_}));
  SPLICE_RETURN_IF_ERROR(backend.SiluMul(context_, {.gate_up = F32(ws_.gate_up),
                                                    .out = F32(ws_.activated),
                                                    .num_rows = num_rows_,
                                                    .width = model_->config().intermediate_size}));
  return backend.Linear(
      context_, {.x = F32(ws_.activated), .weight = weights.down.get(), .y = F32(ws_.delta), .num_rows = num_rows_});
}

absl::StatusOr<std::span<float>> Executor::Logits(std::span<const int32_t> rows) {
  const ModelConfig& c = model_->config();
  const kernels::Backend& backend = model_->backend();
  const int64_t count = static_cast<int64_t>(rows.size());
  if (count > options_.max_rows)
    return Errorf(absl::StatusCode::kResourceExhausted, "executor: logits of {} rows, at most {}", count,
                  options_.max_rows);
  const size_t bytes = sizeof(float) * rows.size() * c.vocab_size;
  if (ws_.logits == nullptr || ws_.logits->size() < bytes) {
    SPLICE_ASSIGN_OR_RETURN(ws_.logits, backend.Allocate(bytes));
  }
  const auto gather = [&](const std::unique_ptr<kernels::Buffer>& from, const std::unique_ptr<kernels::Buffer>& to) {
    return backend.GatherRows(context_, {.table = from->data(),
                                         .dtype = kernels::DType::kF32,
                                         .num_table_rows = num_rows_,
                                         .width = c.hidden_size,
                                         .ids = rows,
                                         .out = F32(to)});
  };
  SPLICE_RETURN_IF_ERROR(gather(ws_.residual, ws_.gathered));
  SPLICE_RETURN_IF_ERROR(gather(ws_.delta, ws_.gathered_delta));
  SPLICE_RETURN_IF_ERROR(backend.RmsNorm(context_, {.residual = F32(ws_.gathered),
                                                    .delta = F32(ws_.gathered_delta),
                                                    .weight = model_->final_norm(),
                                                    .out = F32(ws_.normed),
                                                    .num_rows = count,
                                                    .width = c.hidden_size,
                                                    .eps = c.rms_norm_eps}));
  SPLICE_RETURN_IF_ERROR(backend.Linear(
      context_, {.x = F32(ws_.normed), .weight = &model_->lm_head(), .y = F32(ws_.logits), .num_rows = count}));
  return std::span<float>(F32(ws_.logits), rows.size() * c.vocab_size);
}

}  // namespace spl::engine
