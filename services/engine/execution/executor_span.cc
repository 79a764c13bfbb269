// Executor's passes over a whole span (PassLayers::whole): one layer for all rows of one prompt. First K, V and queries
// of all rows, max_rows at a time; then one attention over all of them, which may look only at chosen lines; then feed-
// forward, again in parts. In between rows are their hidden states, in the prompt's memory.
#include <algorithm>
#include <cmath>

#include "services/base/check.h"
#include "services/base/status.h"
#include "services/engine/execution/executor.h"

namespace spl::engine {
namespace {

float* F32(const std::unique_ptr<kernels::Buffer>& buffer) { return static_cast<float*>(buffer->data()); }

// Element `at` of activations.
kernels::Activations At(const std::unique_ptr<kernels::Buffer>& buffer, kernels::DType dtype, int64_t at) {
  return {static_cast<std::byte*>(buffer->data()) + at * static_cast<int64_t>(kernels::DTypeBytes(dtype)), dtype};
}

}  // namespace

absl::Status Executor::PrefillSpan(const PrefillSlice& slice, const PassLayers& pass, const PlanSlice& plan,
                                   const OnLayer& on_layer) {
  const ModelConfig& c = model_->config();
  SPLICE_CHECK(pass.layers.begin >= 0 && pass.layers.end == pass.layers.begin + 1 && pass.layers.end <= c.num_layers &&
                   !pass.keys_only_last && slice.hidden != nullptr,
               "a whole span runs one layer at a time, with hidden states");
  SPLICE_CHECK(slice.positions.back() - slice.positions.front() + 1 == static_cast<int32_t>(slice.positions.size()),
               "a whole span has no gaps");
  const auto num_rows = static_cast<int64_t>(slice.tokens.size());
  if (num_rows > options_.span_rows())
    return Errorf(absl::StatusCode::kResourceExhausted, "executor: a span of {} rows, at most {}", num_rows,
                  options_.span_rows());
  const SpanPass span{slice, plan(0, pass.layers.begin), pass.layers.begin, pass.layers.end == c.num_layers};
  const bool wants_lse = span.plan.lines != nullptr && !span.plan.lines->held_out.empty();
  if (const absl::Status allocated = AllocateSpan(num_rows, wants_lse); !allocated.ok())
    return Errorf(allocated.code(),
                  "no memory for a pass over a span of {} rows ({}); a shorter prompt or reuse \"exact\" needs less",
                  num_rows, std::string(allocated.message()));
  const absl::Status ran = RunSpan(span, on_layer);
  // Also after an error: the caller may give the pages to somebody else.
  const absl::Status done = session_->Synchronize();
  return ran.ok() ? done : ran;
}

absl::Status Executor::RunSpan(const SpanPass& pass, const OnLayer& on_layer) {
  const auto num_rows = static_cast<int32_t>(pass.slice.tokens.size());
  for (int32_t begin = 0; begin < num_rows; begin += options_.max_rows)
    SPLICE_RETURN_IF_ERROR(SpanKeys(pass, begin, std::min(num_rows, begin + options_.max_rows)));
  if (on_layer && !on_layer(pass.layer)) return absl::CancelledError("the pass was cancelled");
  SPLICE_RETURN_IF_ERROR(SpanAttention(pass));
  // Behind the last layer only the prompt's end is of use.
  const int32_t parts = (num_rows + options_.max_rows - 1) / options_.max_rows;
  const int32_t first = pass.last_layer ? (parts - 1) * options_.max_rows : 0;
  for (int32_t begin = first; begin < num_rows; begin += options_.max_rows)
    SPLICE_RETURN_IF_ERROR(SpanFeedForward(pass, begin, std::min(num_rows, begin + options_.max_rows)));
  first_row_ = first;
  num_rows_ = num_rows - first;
  return absl::OkStatus();
}

absl::Status Executor::AllocateSpan(int64_t num_rows, bool wants_lse) {
  const ModelConfig& c = model_->config();
  const auto bytes = [&](int64_t width, kernels::DType dtype) {
    return static_cast<size_t>(num_rows * width) * kernels::DTypeBytes(dtype);
  };
  SPLICE_RETURN_IF_ERROR(
      Grow(ws_.span_q, ws_.q ? bytes(c.q_size(), activation_dtype_) : bytes(query_stride(), kernels::DType::kF32)));
  SPLICE_RETURN_IF_ERROR(Grow(ws_.span_attention, bytes(c.q_size(), activation_dtype_)));
  return wants_lse ? Grow(ws_.span_lse, bytes(c.num_qo_heads, kernels::DType::kF32)) : absl::OkStatus();
}

// Makes rows [begin, end) of the span the batch.
absl::Status Executor::StageSpan(const SpanPass& pass, int32_t begin, int32_t end, int64_t kv_len) {
  const auto count = static_cast<size_t>(end - begin);
  const auto tokens = pass.slice.tokens.subspan(begin, count);
  const auto positions = pass.slice.positions.subspan(begin, count);
  tokens_.assign(tokens.begin(), tokens.end());
  positions_.assign(positions.begin(), positions.end());
  spans_.assign(1, {0, end - begin, kv_len, pass.slice.kv});
  num_rows_ = end - begin;
  num_logit_rows_ = 0;
  return StageBatch();
}

absl::Status Executor::SpanKeys(const SpanPass& pass, int32_t begin, int32_t end) {
  const ModelConfig& c = model_->config();
  const kernels::Backend& backend = model_->backend();
  const LayerWeights& weights = model_->layer(pass.layer);
  SPLICE_RETURN_IF_ERROR(StageSpan(pass, begin, end, pass.slice.positions[end - 1] + 1));
  float* hidden = F32(pass.slice.hidden->memory) +
                  int64_t{pass.slice.positions.front() + begin - pass.slice.hidden->first_position} * c.hidden_size;
  if (pass.layer == 0) {
    SPLICE_RETURN_IF_ERROR(backend.GatherRows(context(), {.table = model_->embedding(),
                                                          .dtype = model_->embedding_dtype(),
                                                          .num_table_rows = c.vocab_size,
                                                          .width = c.hidden_size,
                                                          .ids = tokens_,
                                                          .out = hidden,
                                                          .ids_are_batch_tokens = true}));
  }
  SPLICE_RETURN_IF_ERROR(Normalize(hidden, {}, *weights.attention_norm, num_rows_, Act(ws_.normed)));
  // Where queries are rotated in place they stay with their keys and values.
  float* qkv = ws_.q ? F32(ws_.qkv) : F32(ws_.span_q) + begin * query_stride();
  SPLICE_RETURN_IF_ERROR(backend.Linear(context(), {.x = Act(ws_.normed),
                                                    .weight = weights.qkv.get(),
                                                    .bias = weights.qkv_bias ? F32(weights.qkv_bias) : nullptr,
                                                    .y = qkv,
                                                    .num_rows = num_rows_}));
  return WriteKv(pass.layer, qkv,
                 ws_.q ? At(ws_.span_q, activation_dtype_, begin * query_stride()) : kernels::Activations());
}

absl::Status Executor::SpanAttention(const SpanPass& pass) {
  const ModelConfig& c = model_->config();
  const int32_t first = model_->first_kv_head(), kv_len = pass.slice.positions.back() + 1;
  SPLICE_RETURN_IF_ERROR(StageSpan(pass, 0, static_cast<int32_t>(pass.slice.tokens.size()), kv_len));
  stream_views_.clear();
  for (int32_t h = first; h < first + c.num_kv_heads; ++h)
    stream_views_.push_back({pass.slice.kv->stream(pass.layer, h), kv_len, pass.plan.visibility[h]});
  const kernels::PrefillSequence sequence{0, num_rows_, positions_, stream_views_};
  const kernels::ConstActivations q = At(ws_.span_q, ws_.q ? activation_dtype_ : kernels::DType::kF32, 0);
  bool chose = false;
  if (pass.plan.lines != nullptr) {
    if (lines_ == nullptr) lines_ = std::make_unique<LineAttention>(model_->backend(), *session_);
    SPLICE_ASSIGN_OR_RETURN(const std::span<const int32_t> heads, lines_->Select({.shape = attention_shape(),
                                                                                  .pool = pool_,
                                                                                  .q = q,
                                                                                  .q_row_stride = query_stride(),
                                                                                  .rows = sequence,
                                                                                  .layer = pass.layer,
                                                                                  .task = pass.plan.lines,
                                                                                  .first_kv_head = first}));
    for (const int32_t head : heads) stream_views_[head].visibility = lines_->Visibility(head);
    chose = !heads.empty();
  }
  const bool measures = chose && !pass.plan.lines->held_out.empty();
  const kernels::PrefillAttentionArgs args = {.shape = attention_shape(),
                                              .pool = pool_,
                                              .q = q,
                                              .q_row_stride = query_stride(),
                                              .out = At(ws_.span_attention, activation_dtype_, 0),
                                              .lse = measures ? F32(ws_.span_lse) : nullptr,
                                              .sequences = {&sequence, 1},
                                              .layer = pass.layer};
  SPLICE_RETURN_IF_ERROR(model_->backend().PrefillAttention(context(), args));
  if (!chose || pass.slice.lines == nullptr) return absl::OkStatus();
  LineFidelity fidelity;
  if (measures) {
    SPLICE_ASSIGN_OR_RETURN(fidelity, SpanFidelity(pass, args));
  }
  return lines_->Report(measures, fidelity, *pass.slice.lines);
}

// The held-out rows once more, with all that the model lets them see: their mass on the lines is what the log-sum-exp
// of the lines is below that of everything.
absl::StatusOr<LineFidelity> Executor::SpanFidelity(const SpanPass& pass, const kernels::PrefillAttentionArgs& seen) {
  const ModelConfig& c = model_->config();
  const std::vector<int32_t>& held_out = pass.plan.lines->held_out;
  const auto count = static_cast<int64_t>(held_out.size()), heads = int64_t{c.num_qo_heads};
  const auto span_rows = static_cast<size_t>(num_rows_);
  SPLICE_ASSIGN_OR_RETURN(const void* host, session_->ReadBack(seen.lse, sizeof(float) * span_rows * heads));
  std::vector<float> on_lines;
  for (const int32_t row : held_out) {
    const float* lse = static_cast<const float*>(host) + row * heads;
    on_lines.insert(on_lines.end(), lse, lse + heads);
  }
  const kernels::DType q_dtype = seen.q.dtype;
  SPLICE_RETURN_IF_ERROR(
      Grow(scratch_.q, static_cast<size_t>(count * seen.q_row_stride) * kernels::DTypeBytes(q_dtype)));
  SPLICE_RETURN_IF_ERROR(
      Grow(scratch_.out, static_cast<size_t>(count * c.q_size()) * kernels::DTypeBytes(activation_dtype_)));
  SPLICE_RETURN_IF_ERROR(Grow(scratch_.lse, count * heads * sizeof(float)));
  SPLICE_RETURN_IF_ERROR(model_->backend().GatherRows(context(), {.table = seen.q.data,
                                                                  .dtype = q_dtype,
                                                                  .num_table_rows = num_rows_,
                                                                  .width = seen.q_row_stride,
                                                                  .ids = held_out,
                                                                  .out = {scratch_.q->data(), q_dtype}}));
  tokens_.clear();
  positions_.clear();
  for (const int32_t row : held_out) {
    tokens_.push_back(pass.slice.tokens[row]);
    positions_.push_back(pass.slice.positions[row]);
  }
  num_rows_ = static_cast<int32_t>(count);
  spans_[0].end = num_rows_;
  SPLICE_RETURN_IF_ERROR(StageBatch());
  for (kernels::HeadStreamView& stream : stream_views_) stream.visibility = c.visibility(pass.layer);
  const kernels::PrefillSequence sequence{0, num_rows_, positions_, stream_views_};
  kernels::PrefillAttentionArgs args = seen;
  args.q = kernels::ConstActivations(scratch_.q->data(), q_dtype);
  args.out = Act(scratch_.out);
  args.lse = F32(scratch_.lse);
  args.sequences = {&sequence, 1};
  SPLICE_RETURN_IF_ERROR(model_->backend().PrefillAttention(context(), args));
  SPLICE_ASSIGN_OR_RETURN(host, session_->ReadBack(args.lse, sizeof(float) * static_cast<size_t>(count * heads)));
  const auto* on_all = static_cast<const float*>(host);
  const int64_t group = heads / c.num_kv_heads;
  LineFidelity fidelity(static_cast<size_t>(c.num_kv_heads), 0);
  for (int64_t i = 0; i < count * heads; ++i)
    fidelity[i % heads / group] +=
        std::clamp(std::exp(double{on_lines[i]} - on_all[i]), 0.0, 1.0) / static_cast<double>(count * group);
  return fidelity;
}

absl::Status Executor::SpanFeedForward(const SpanPass& pass, int32_t begin, int32_t end) {
  const ModelConfig& c = model_->config();
  const LayerWeights& weights = model_->layer(pass.layer);
  const int64_t rows = end - begin;
  const int64_t first = int64_t{pass.slice.positions.front() + begin - pass.slice.hidden->first_position};
  float* hidden = F32(pass.slice.hidden->memory) + first * c.hidden_size;
  num_rows_ = static_cast<int32_t>(rows);
  if (pass.last_layer) {  // whose results are where any pass leaves them
    row_ids_.clear();
    for (int64_t row = 0; row < rows; ++row) row_ids_.push_back(static_cast<int32_t>(first + row));
    const auto num_hidden = static_cast<int64_t>(pass.slice.hidden->memory->size() / sizeof(float)) / c.hidden_size;
    SPLICE_RETURN_IF_ERROR(GatherRows(pass.slice.hidden->memory->data(), num_hidden, row_ids_, F32(ws_.residual)));
    hidden = F32(ws_.residual);
  }
  bool adds = AddsProducts(weights.o.get(), rows);
  SPLICE_RETURN_IF_ERROR(Multiply(*weights.o, At(ws_.span_attention, activation_dtype_, begin * c.q_size()), rows,
                                  {adds ? hidden : F32(ws_.delta), adds}));
  delta_pending_ = !adds;
  SPLICE_RETURN_IF_ERROR(Reduce(F32(ws_.delta), rows));
  SPLICE_RETURN_IF_ERROR(Normalize(hidden, Delta(), *weights.ffn_norm, rows, Act(ws_.normed)));
  adds = AddsProducts(weights.down.get(), rows);
  delta_pending_ = !adds;
  if (adds) return FeedForward(weights, Act(ws_.normed), rows, {hidden, true});
  SPLICE_RETURN_IF_ERROR(RunFeedForward(weights, Act(ws_.normed), rows, F32(ws_.delta)));
  if (pass.last_layer) return absl::OkStatus();
  // The norm in front of the next layer is what adds the result to the residual stream.
  return Normalize(hidden, F32(ws_.delta), *model_->layer(pass.layer + 1).attention_norm, rows, Act(ws_.normed));
}

}  // namespace spl::engine
