// Executor's passes over slices of prompts: the slices' hidden states, what observers see, attention, and the rows of
// running sequences behind them.
#include <numeric>

#include "services/base/check.h"
#include "services/base/status.h"
#include "services/engine/execution/executor.h"

namespace spl::engine {
namespace {

float* F32(const std::unique_ptr<kernels::Buffer>& buffer) { return static_cast<float*>(buffer->data()); }

}  // namespace

absl::Status Executor::Prefill(std::span<const PrefillSlice> slices, const PassLayers& pass, const OnLayer& on_layer,
                               std::span<const DecodeRow> riders, Until until) {
  return Prefill(
      slices, pass, [&](size_t slice, int32_t layer) { return slices[slice].policy->PlanLayer(layer); }, on_layer,
      riders, until);
}

absl::Status Executor::Prefill(std::span<const PrefillSlice> slices, const PassLayers& pass, const PlanSlice& plan,
                               const OnLayer& on_layer, std::span<const DecodeRow> riders, Until until) {
  if (pass.whole) {
    SPLICE_CHECK(slices.size() == 1 && riders.empty(), "a whole span is of one prompt");
    return PrefillSpan(slices[0], pass, plan, on_layer);
  }
  const int32_t num_layers = model_->config().num_layers;
  const LayerRange layers = pass.layers;
  SPLICE_CHECK(layers.begin >= 0 && layers.begin < layers.end && layers.end <= num_layers, "layers of the model");
  spans_.clear();
  tokens_.clear();
  positions_.clear();
  bool observed = false;
  for (const PrefillSlice& slice : slices) {
    const int32_t begin = static_cast<int32_t>(tokens_.size());
    tokens_.insert(tokens_.end(), slice.tokens.begin(), slice.tokens.end());
    positions_.insert(positions_.end(), slice.positions.begin(), slice.positions.end());
    SPLICE_CHECK(slice.angles.empty() || (slices.size() == 1 && riders.empty()), "a slice with angles is alone");
    spans_.push_back({begin, static_cast<int32_t>(tokens_.size()), slice.positions.back() + 1, slice.kv});
    spans_.back().angles = slice.angles;
    if (slice.observers == nullptr) continue;
    observed = true;
    for (LayerObserver* const observer : *slice.observers) observer->BeginPass(slice.positions);
  }
  SPLICE_CHECK(riders.empty() || (!observed && pass == PassLayers{{0, num_layers}}), "a pass that may be shared");
  for (const DecodeRow& row : riders) {
    const int32_t begin = static_cast<int32_t>(tokens_.size());
    tokens_.push_back(row.token);
    positions_.push_back(static_cast<int32_t>(row.position()));
    spans_.push_back({begin, begin + 1, row.kv_len(), row.kv});
  }
  SPLICE_RETURN_IF_ERROR(Stage());
  LayerHooks hooks{.on_layer = on_layer,
                   .keys_only_last = pass.keys_only_last,
                   .attention_only_last = pass.attention_only_last,
                   .attend = [&](int32_t layer) -> absl::Status {
                     SPLICE_RETURN_IF_ERROR(AttendPrefill(slices, plan, layer));
                     return riders.empty() ? absl::OkStatus() : AttendRiders(riders, layer);
                   }};
  if (observed) {
    hooks.before_kv = [&](int32_t layer) {
      ViewPageTables(layer);
      return Observe(slices, layer, &LayerObserver::BeforeKv);
    };
    hooks.after_kv = [&](int32_t layer) { return Observe(slices, layer, &LayerObserver::AfterKv); };
    hooks.choose_ffn_rows = [&](int32_t layer) { return ChooseFfnRows(slices, layer); };
  }
  const auto run = [&]() -> absl::Status {
    SPLICE_RETURN_IF_ERROR(layers.begin == 0 ? Embed() : LoadHidden(slices));
    SPLICE_RETURN_IF_ERROR(RunLayers(layers, hooks));
    if (!pass.keep_hidden) return absl::OkStatus();
    if (!pass.keys_only_last) SPLICE_RETURN_IF_ERROR(AddDelta(layers.end));
    return KeepHidden(slices);
  };
  const absl::Status ran = run();
  if (ran.ok() && until == Until::kLaunched) return ran;
  // Also after an error: the caller may give the pages to somebody else.
  const absl::Status done = session_->Synchronize();
  return ran.ok() ? done : ran;
}

absl::Status Executor::GatherRows(const void* table, int64_t num_table_rows, std::span<const int32_t> ids, float* out) {
  return model_->backend().GatherRows(context(), {.table = table,
                                                  .dtype = kernels::DType::kF32,
                                                  .num_table_rows = num_table_rows,
                                                  .width = model_->config().hidden_size,
                                                  .ids = ids,
                                                  .out = out});
}

absl::Status Executor::LoadHidden(std::span<const PrefillSlice> slices) {
  const int64_t width = model_->config().hidden_size;
  for (size_t s = 0; s < slices.size(); ++s) {
    const HiddenStates& hidden = *slices[s].hidden;
    row_ids_.clear();
    for (const int32_t position : slices[s].positions) row_ids_.push_back(position - hidden.first_position);
    const auto num_rows = static_cast<int64_t>(hidden.memory->size() / (sizeof(float) * width));
    SPLICE_RETURN_IF_ERROR(
        GatherRows(hidden.memory->data(), num_rows, row_ids_, F32(ws_.residual) + spans_[s].begin * width));
  }
  return absl::OkStatus();
}

// Where the last layer's product was not added to the residual stream, the norm in front of the next layer does that.
absl::Status Executor::AddDelta(int32_t next_layer) {
  if (!delta_pending_) return absl::OkStatus();
  return Normalize(F32(ws_.residual), F32(ws_.delta), *model_->layer(next_layer).attention_norm, num_rows_,
                   Act(ws_.normed));
}

absl::Status Executor::KeepHidden(std::span<const PrefillSlice> slices) {
  const int64_t width = model_->config().hidden_size;
  for (size_t s = 0; s < slices.size(); ++s) {
    int32_t row = spans_[s].begin;
    for (const PositionRange& run : RangesOf(slices[s].positions)) {  // neighbours in the prompt are so in memory
      row_ids_.resize(run.size());
      std::iota(row_ids_.begin(), row_ids_.end(), row);
      row += run.size();
      float* to = F32(slices[s].hidden->memory) + (run.begin - slices[s].hidden->first_position) * width;
      SPLICE_RETURN_IF_ERROR(GatherRows(ws_.residual->data(), num_rows_, row_ids_, to));
    }
  }
  return absl::OkStatus();
}

LayerView Executor::View(size_t slice, int32_t layer) {
  const auto heads = static_cast<size_t>(model_->config().num_kv_heads);
  LayerView view{.whole = whole_->config(),
                 .model = *model_,
                 .session = *session_,
                 .scratch = scratch_,
                 .pool = pool_,
                 .max_rows = options_.max_rows,
                 .layer = layer,
                 .sequence = static_cast<int32_t>(slice),
                 .rows = RopeRows(slice),
                 .qkv = F32(ws_.qkv),
                 .q = query(),
                 .q_row_stride = query_stride(),
                 .attention = attention_,
                 .delta = F32(ws_.delta)};
  if (slice < layer_plans_.size()) view.plan = &layer_plans_[slice];
  if (stream_views_.size() == spans_.size() * heads)
    view.heads = std::span(stream_views_).subspan(slice * heads, heads);
  return view;
}

absl::Status Executor::Observe(std::span<const PrefillSlice> slices, int32_t layer,
                               absl::Status (LayerObserver::*hook)(const LayerView&)) {
  for (size_t s = 0; s < slices.size(); ++s) {
    if (slices[s].observers == nullptr) continue;
    const LayerView view = View(s, layer);
    for (LayerObserver* const observer : *slices[s].observers) SPLICE_RETURN_IF_ERROR((observer->*hook)(view));
  }
  return absl::OkStatus();
}

absl::Status Executor::AttendPrefill(std::span<const PrefillSlice> slices, const PlanSlice& plan, int32_t layer) {
  const ModelConfig& c = model_->config();
  const int32_t first = model_->first_kv_head();
  bool wants_lse = false;
  stream_views_.clear();
  layer_plans_.clear();
  for (size_t s = 0; s < slices.size(); ++s) {
    layer_plans_.push_back(plan(s, layer));
    for (int32_t h = first; h < first + c.num_kv_heads; ++h)
      stream_views_.push_back(
          {spans_[s].kv->stream(layer, h), static_cast<int32_t>(spans_[s].kv_len), layer_plans_[s].visibility[h]});
    if (slices[s].observers == nullptr) continue;
    for (const LayerObserver* const observer : *slices[s].observers)
      wants_lse |= observer->wants_lse(layer, layer_plans_[s]);
  }
  prefill_sequences_.clear();
  for (size_t s = 0; s < slices.size(); ++s) {
    const RowSpan& rows = spans_[s];
    prefill_sequences_.push_back({rows.begin, rows.end,
                                  std::span(positions_).subspan(rows.begin, rows.end - rows.begin),
                                  std::span(stream_views_).subspan(s * c.num_kv_heads, c.num_kv_heads)});
  }
  if (wants_lse)
    SPLICE_RETURN_IF_ERROR(Grow(ws_.lse, sizeof(float) * static_cast<size_t>(options_.max_rows) * c.num_qo_heads));
  attention_ = {.shape = attention_shape(),
                .pool = pool_,
                .q = query(),
                .q_row_stride = query_stride(),
                .out = Act(ws_.attention),
                .lse = wants_lse ? F32(ws_.lse) : nullptr,
                .sequences = prefill_sequences_,
                .layer = layer};
  SPLICE_RETURN_IF_ERROR(model_->backend().PrefillAttention(context(), attention_));
  return Observe(slices, layer, &LayerObserver::AfterAttention);
}

}  // namespace spl::engine
