#include "services/engine/execution/executor.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "services/base/check.h"
#include "services/base/status.h"
#include "services/engine/recovery/edge_restore.h"
#include "services/engine/recovery/ffn_rows.h"

namespace spl::engine {
namespace {

float* F32(const std::unique_ptr<kernels::Buffer>& buffer) { return static_cast<float*>(buffer->data()); }
int32_t* Int32(const std::unique_ptr<kernels::Buffer>& buffer) { return static_cast<int32_t*>(buffer->data()); }

bool ScoresColumns(const ScoreTask* score, int32_t layer) {
  if (score == nullptr || score->kind != ScoreKind::kColumnMass) return false;
  return score->every_head || score->all_layers ? layer >= score->layer : layer == score->layer;
}

bool AsksForAttention(const QueryTask::Group& group) {
  return group.begin < group.end && group.attention_to.size() > 0;
}

bool AsksForAttention(const QueryTask* queries) {
  return queries != nullptr && std::any_of(queries->groups.begin(), queries->groups.end(),
                                           [](const QueryTask::Group& group) { return AsksForAttention(group); });
}

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
    SPLICE_ASSIGN_OR_RETURN(buffer, model_->backend().Allocate(kernels::DTypeBytes(dtype) * options_.max_rows * width));
    return absl::OkStatus();
  };
  const kernels::DType act = activation_dtype_;
  SPLICE_RETURN_IF_ERROR(allocate(ws_.residual, c.hidden_size, kernels::DType::kF32));
  SPLICE_RETURN_IF_ERROR(allocate(ws_.delta, c.hidden_size, kernels::DType::kF32));
  SPLICE_RETURN_IF_ERROR(allocate(ws_.normed, c.hidden_size, act));
  SPLICE_RETURN_IF_ERROR(allocate(ws_.qkv, c.q_size() + 2 * c.kv_size(), kernels::DType::kF32));
  if (act != kernels::DType::kF32) SPLICE_RETURN_IF_ERROR(allocate(ws_.q, c.q_size(), act));
  SPLICE_RETURN_IF_ERROR(allocate(ws_.attention, c.q_size(), act));
  SPLICE_RETURN_IF_ERROR(allocate(ws_.gate_up, 2ll * c.intermediate_size, kernels::DType::kF32));
  SPLICE_RETURN_IF_ERROR(allocate(ws_.activated, c.intermediate_size, act));
  SPLICE_RETURN_IF_ERROR(allocate(ws_.gathered, c.hidden_size, kernels::DType::kF32));
  SPLICE_RETURN_IF_ERROR(allocate(ws_.argmax, 2, kernels::DType::kF32));
  SPLICE_RETURN_IF_ERROR(allocate(ws_.gathered_delta, c.hidden_size, kernels::DType::kF32));
  return c.moe.num_experts > 0 ? AllocateExpertWorkspace() : absl::OkStatus();
}

absl::Status Executor::AllocateExpertWorkspace() {
  const ModelConfig& c = model_->config();
  const int64_t rows = options_.max_rows, places = rows * c.moe.num_experts_per_token;
  const auto allocate = [&](std::unique_ptr<kernels::Buffer>& buffer, int64_t count, size_t bytes) -> absl::Status {
    SPLICE_ASSIGN_OR_RETURN(buffer, model_->backend().Allocate(static_cast<size_t>(count) * bytes));
    return absl::OkStatus();
  };
  const size_t act = kernels::DTypeBytes(activation_dtype_);
  SPLICE_RETURN_IF_ERROR(allocate(ws_.router_logits, rows * c.moe.num_experts, sizeof(float)));
  SPLICE_RETURN_IF_ERROR(allocate(ws_.expert_ids, places, sizeof(int32_t)));
  SPLICE_RETURN_IF_ERROR(allocate(ws_.expert_weights, places, sizeof(float)));
  SPLICE_RETURN_IF_ERROR(allocate(ws_.expert_offsets, c.moe.num_experts + 1, sizeof(int32_t)));
  SPLICE_RETURN_IF_ERROR(allocate(ws_.place_rows, places, sizeof(int32_t)));
  SPLICE_RETURN_IF_ERROR(allocate(ws_.row_places, places, sizeof(int32_t)));
  SPLICE_RETURN_IF_ERROR(allocate(ws_.expert_gate_up, places * 2 * c.moe.intermediate_size, sizeof(float)));
  SPLICE_RETURN_IF_ERROR(allocate(ws_.expert_activated, places * c.moe.intermediate_size, act));
  return allocate(ws_.expert_out, places * c.hidden_size, sizeof(float));
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
  return session_->Stage({tokens_, positions_, batch_sequences_, staged_plans});
}

void Executor::AddPlans() {
  const int32_t layers = model_->config().num_layers, heads = model_->config().num_kv_heads;
  const size_t plan_size = static_cast<size_t>(layers) * static_cast<size_t>(heads);
  plans_.clear();
  plans_.reserve(spans_.size() * plan_size);  // spans point into it
  for (size_t s = 0; s < spans_.size(); ++s) {
    kernels::BatchSequence& sequence = batch_sequences_[s];
    TokenSelector& selector = *spans_[s].selector;
    sequence.plan_key = selector.plan_key();
    if (session_->HasPlan(sequence.kv_id, sequence.plan_key)) continue;
    const size_t begin = plans_.size();
    for (int32_t layer = 0; layer < layers; ++layer) {
      for (int32_t h = 0; h < heads; ++h) plans_.push_back(selector.Select(layer, model_->first_kv_head() + h));
    }
    sequence.plan = std::span(plans_).subspan(begin, plan_size);
  }
}

absl::Status Executor::Prefill(std::span<const PrefillSlice> slices, const PassLayers& pass, const OnLayer& on_layer) {
  return Prefill(
      slices, pass, [&](size_t slice, int32_t layer) { return slices[slice].policy->PlanLayer(layer); }, on_layer);
}

absl::Status Executor::Prefill(std::span<const PrefillSlice> slices, const PassLayers& pass, const PlanSlice& plan,
                               const OnLayer& on_layer) {
  if (pass.whole) {
    SPLICE_CHECK(slices.size() == 1, "a whole span is of one prompt");
    return PrefillSpan(slices[0], pass, plan, on_layer);
  }
  const int32_t num_layers = model_->config().num_layers;
  const LayerRange layers = pass.layers;
  SPLICE_CHECK(layers.begin >= 0 && layers.begin < layers.end && layers.end <= num_layers, "layers of the model");
  spans_.clear();
  tokens_.clear();
  positions_.clear();
  bool any_lse = false, any_report = false;
  for (const PrefillSlice& slice : slices) {
    const int32_t begin = static_cast<int32_t>(tokens_.size());
    tokens_.insert(tokens_.end(), slice.tokens.begin(), slice.tokens.end());
    positions_.insert(positions_.end(), slice.positions.begin(), slice.positions.end());
    spans_.push_back({begin, static_cast<int32_t>(tokens_.size()), slice.positions.back() + 1, slice.kv});
    any_lse |= slice.num_probes > 0 || (slice.score != nullptr && slice.score->kind == ScoreKind::kColumnMass) ||
               AsksForAttention(slice.queries);
    any_report |= slice.report != nullptr;
    SPLICE_CHECK(slice.num_probes == 0 || (slices.size() == 1 && slice.report != nullptr), "probes are of one prompt");
  }
  if (any_lse)
    SPLICE_RETURN_IF_ERROR(
        Grow(ws_.lse, sizeof(float) * static_cast<size_t>(options_.max_rows) * model_->config().num_qo_heads));
  SPLICE_RETURN_IF_ERROR(Stage());
  LayerHooks hooks{.before_kv = [&](int32_t layer) -> absl::Status {
                     SPLICE_RETURN_IF_ERROR(ScoreDeviation(slices, layer));
                     return FuseRows(slices, layer, kernels::FuseStep::kSave);
                   },
                   .after_kv = [&](int32_t layer) -> absl::Status {
                     SPLICE_RETURN_IF_ERROR(FuseRows(slices, layer, kernels::FuseStep::kBlend));
                     return AddQueries(slices, layer);
                   },
                   .on_layer = on_layer,
                   .keys_only_last = pass.keys_only_last,
                   .attention_only_last = pass.attention_only_last,
                   .attend = [&](int32_t layer) { return AttendPrefill(slices, plan, layer); },
                   .choose_ffn_rows = nullptr};
  if (any_report) hooks.choose_ffn_rows = [&](int32_t) { return ChooseFfnRows(slices); };
  const auto run = [&]() -> absl::Status {
    SPLICE_RETURN_IF_ERROR(layers.begin == 0 ? Embed() : LoadHidden(slices));
    SPLICE_RETURN_IF_ERROR(RunLayers(layers, hooks));
    if (!pass.keep_hidden) return absl::OkStatus();
    if (!pass.keys_only_last) SPLICE_RETURN_IF_ERROR(AddDelta(layers.end));
    return KeepHidden(slices);
  };
  const absl::Status ran = run();
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
    const auto num_rows = static_cast<int64_t>(hidden.memory->size() / (sizeof(float) * static_cast<size_t>(width)));
    SPLICE_RETURN_IF_ERROR(
        GatherRows(hidden.memory->data(), num_rows, row_ids_, F32(ws_.residual) + spans_[s].begin * width));
  }
  return absl::OkStatus();
}

// The norm in front of the next layer is what adds the last layer's result to the residual stream.
absl::Status Executor::AddDelta(int32_t next_layer) {
  return Normalize(F32(ws_.delta), *model_->layer(next_layer).attention_norm);
}

absl::Status Executor::KeepHidden(std::span<const PrefillSlice> slices) {
  const int64_t width = model_->config().hidden_size;
  for (size_t s = 0; s < slices.size(); ++s) {
    SPLICE_CHECK(slices[s].positions.back() - slices[s].positions.front() + 1 ==
                     static_cast<int32_t>(slices[s].positions.size()),
                 "hidden states are kept of neighbouring rows");
    row_ids_.resize(slices[s].tokens.size());
    std::iota(row_ids_.begin(), row_ids_.end(), spans_[s].begin);
    float* to = F32(slices[s].hidden->memory) + (slices[s].positions[0] - slices[s].hidden->first_position) * width;
    SPLICE_RETURN_IF_ERROR(GatherRows(ws_.residual->data(), num_rows_, row_ids_, to));
  }
  return absl::OkStatus();
}

absl::Status Executor::AttendPrefill(std::span<const PrefillSlice> slices, const PlanSlice& plan, int32_t layer) {
  const ModelConfig& c = model_->config();
  const int32_t first = model_->first_kv_head();
  bool any_scores = false, any_groups = false;
  stream_views_.clear();
  layer_plans_.clear();
  for (size_t s = 0; s < slices.size(); ++s) {
    layer_plans_.push_back(plan(s, layer));
    for (int32_t h = first; h < first + c.num_kv_heads; ++h)
      stream_views_.push_back({spans_[s].kv->stream(layer, h), static_cast<int32_t>(spans_[s].kv_len),
                               layer_plans_[s].visibility[static_cast<size_t>(h)]});
    const ScoreTask* score = slices[s].score;
    any_scores |= ScoresColumns(score, layer);
    any_groups |= AsksForAttention(slices[s].queries);
  }
  prefill_sequences_.clear();
  for (size_t s = 0; s < spans_.size(); ++s) {
    const RowSpan& rows = spans_[s];
    prefill_sequences_.push_back({rows.begin, rows.end,
                                  std::span(positions_).subspan(rows.begin, rows.end - rows.begin),
                                  std::span(stream_views_).subspan(s * c.num_kv_heads, c.num_kv_heads)});
  }
  const bool restores = slices[0].num_probes > 0 && !layer_plans_[0].restore_above.empty();
  const bool wants_lse = any_scores || any_groups || restores || observer_ != nullptr;
  const kernels::PrefillAttentionArgs args = {.shape = attention_shape(),
                                              .pool = pool_,
                                              .q = query(),
                                              .q_row_stride = query_stride(),
                                              .out = Act(ws_.attention),
                                              .lse = wants_lse ? F32(ws_.lse) : nullptr,
                                              .sequences = prefill_sequences_,
                                              .layer = layer};
  SPLICE_RETURN_IF_ERROR(model_->backend().PrefillAttention(context(), args));
  SPLICE_RETURN_IF_ERROR(OpenLastRows(args));
  if (restores) SPLICE_RETURN_IF_ERROR(RestoreHeads(slices[0], args));
  if (observer_ != nullptr) SPLICE_RETURN_IF_ERROR(Observe(args));
  if (any_groups) SPLICE_RETURN_IF_ERROR(ScoreGroups(slices, layer));
  return any_scores ? ScoreColumns(slices, layer) : absl::OkStatus();
}

// The rows from LayerPlan::open_from on once more, with all that the model lets them see: that is what stays.
absl::Status Executor::OpenLastRows(const kernels::PrefillAttentionArgs& seen) {
  const auto first = std::lower_bound(positions_.begin(), positions_.end(), layer_plans_[0].open_from);
  if (first == positions_.end()) return absl::OkStatus();
  SPLICE_CHECK(spans_.size() == 1, "rows with a view of their own are of one prompt");
  for (kernels::HeadStreamView& stream : stream_views_) stream.visibility = model_->config().visibility(seen.layer);
  kernels::PrefillAttentionArgs args = seen;
  args.last_rows = static_cast<int32_t>(positions_.end() - first);
  return model_->backend().PrefillAttention(context(), args);
}

absl::StatusOr<std::vector<float>> Executor::ProbeLse(const std::unique_ptr<kernels::Buffer>& lse, int32_t num_probes) {
  const size_t heads = static_cast<size_t>(model_->config().num_qo_heads), count = num_probes * heads;
  const float* first = F32(lse) + static_cast<size_t>(num_rows_ - num_probes) * heads;
  SPLICE_ASSIGN_OR_RETURN(const void* host, session_->ReadBack(first, sizeof(float) * count));
  return std::vector<float>(static_cast<const float*>(host), static_cast<const float*>(host) + count);
}

// The probes once more with all that the model lets them see. When a head had too much outside, the attention of all
// rows runs again with that head whole; the KV of a head is there whatever its class.
absl::Status Executor::RestoreHeads(const PrefillSlice& slice, const kernels::PrefillAttentionArgs& seen) {
  const ModelConfig& c = model_->config();
  const int32_t first = model_->first_kv_head();
  const auto heads = static_cast<size_t>(c.num_kv_heads);
  const auto thresholds = layer_plans_[0].restore_above.subspan(static_cast<size_t>(first), heads);
  const bool any = std::any_of(thresholds.begin(), thresholds.end(), [](float t) { return std::isfinite(t); });
  if (!any || slice.report->restore_left <= 0) return absl::OkStatus();
  const size_t rows = static_cast<size_t>(options_.max_rows);
  SPLICE_RETURN_IF_ERROR(Grow(ws_.probe_lse, rows * static_cast<size_t>(c.num_qo_heads) * sizeof(float)));
  SPLICE_RETURN_IF_ERROR(
      Grow(ws_.probe_out, rows * static_cast<size_t>(c.q_size()) * kernels::DTypeBytes(activation_dtype_)));
  const kernels::HeadVisibility own = c.visibility(seen.layer);
  for (kernels::HeadStreamView& stream : stream_views_) stream.visibility = own;
  kernels::PrefillAttentionArgs probe = seen;
  probe.out = Act(ws_.probe_out);
  probe.lse = F32(ws_.probe_lse);
  probe.last_rows = slice.num_probes;
  SPLICE_RETURN_IF_ERROR(model_->backend().PrefillAttention(context(), probe));
  SPLICE_ASSIGN_OR_RETURN(const std::vector<float> lse_seen, ProbeLse(ws_.lse, slice.num_probes));
  SPLICE_ASSIGN_OR_RETURN(const std::vector<float> lse_all, ProbeLse(ws_.probe_lse, slice.num_probes));
  const std::vector<float> edge = EdgeMass({lse_seen, lse_all, slice.num_probes, c.num_qo_heads, c.num_kv_heads});
  const std::vector<int32_t> restored = HeadsToRestore(edge, thresholds, slice.report->restore_left);
  if (restored.empty()) return absl::OkStatus();
  slice.report->restore_left -= static_cast<int32_t>(restored.size());
  for (size_t h = 0; h < heads; ++h)
    stream_views_[h].visibility = layer_plans_[0].visibility[static_cast<size_t>(first) + h];
  for (const int32_t h : restored) {
    stream_views_[static_cast<size_t>(h)].visibility = own;
    slice.report->restored.push_back(seen.layer * whole_->config().num_kv_heads + first + h);
  }
  return model_->backend().PrefillAttention(context(), seen);
}

// With one rank by what attention puts out; with several, whose heads are apart, by what it adds to the residual
// stream, which every rank has.
absl::StatusOr<bool> Executor::ChooseFfnRows(std::span<const PrefillSlice> slices) {
  bool any = false;
  for (size_t s = 0; s < slices.size(); ++s) {
    const int64_t rows = spans_[s].end - spans_[s].begin;
    if (slices[s].report == nullptr) continue;
    slices[s].report->rows += rows;
    if (layer_plans_[s].ffn.dense()) slices[s].report->ffn_rows += rows;
    any |= !layer_plans_[s].ffn.dense();
  }
  if (!any) return false;
  const ModelConfig& c = model_->config();
  const auto num_rows = static_cast<size_t>(num_rows_);
  SPLICE_RETURN_IF_ERROR(Grow(ws_.norms, sizeof(float) * static_cast<size_t>(options_.max_rows)));
  const bool whole = communicator_ == nullptr;
  SPLICE_RETURN_IF_ERROR(model_->backend().RowNorms(
      context(),
      {.x = whole ? kernels::ConstActivations(Act(ws_.attention)) : kernels::ConstActivations(F32(ws_.delta)),
       .num_rows = num_rows_,
       .width = whole ? c.q_size() : c.hidden_size,
       .out = F32(ws_.norms)}));
  SPLICE_ASSIGN_OR_RETURN(const void* host, session_->ReadBack(ws_.norms->data(), sizeof(float) * num_rows));
  const std::span<const float> norms(static_cast<const float*>(host), num_rows);
  ffn_rows_.clear();
  for (size_t s = 0; s < slices.size(); ++s) {
    const int32_t begin = spans_[s].begin, end = spans_[s].end;
    const FfnPlan& ffn = layer_plans_[s].ffn;
    const size_t chosen_before = ffn_rows_.size();
    if (ffn.dense() || slices[s].report == nullptr) {
      for (int32_t row = begin; row < end; ++row) ffn_rows_.push_back(row);
      continue;
    }
    const auto kept = std::lower_bound(positions_.begin() + begin, positions_.begin() + end, ffn.keep_from);
    const auto first_kept = static_cast<int32_t>(kept - positions_.begin());
    for (const int32_t row :
         RowsByMass(norms.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin)), ffn.mass)) {
      if (begin + row < first_kept) ffn_rows_.push_back(begin + row);
    }
    for (int32_t row = first_kept; row < end; ++row) ffn_rows_.push_back(row);
    slices[s].report->ffn_rows += static_cast<int64_t>(ffn_rows_.size() - chosen_before);
  }
  return ffn_rows_.size() < num_rows;
}

absl::Status Executor::Observe(const kernels::PrefillAttentionArgs& seen) {
  const int64_t heads = model_->config().num_qo_heads, rows = num_rows_, width = model_->config().q_size();
  kernels::PrefillAttentionArgs args = seen;
  args.out = {observer_->out->data(), activation_dtype_};
  args.lse = F32(observer_->lse);
  for (kernels::HeadStreamView& stream : stream_views_) stream.visibility = observer_->other;
  SPLICE_RETURN_IF_ERROR(model_->backend().PrefillAttention(context(), args));
  const auto floats = [&](const void* device, int64_t count,
                          kernels::DType dtype) -> absl::StatusOr<std::vector<float>> {
    SPLICE_ASSIGN_OR_RETURN(const void* host,
                            session_->ReadBack(device, static_cast<size_t>(count) * kernels::DTypeBytes(dtype)));
    std::vector<float> values(static_cast<size_t>(count));
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = dtype == kernels::DType::kF32 ? static_cast<const float*>(host)[i]
                                                : kernels::ToFloat(static_cast<const kernels::bf16*>(host)[i]);
    return values;
  };
  SPLICE_ASSIGN_OR_RETURN(const auto out, floats(ws_.attention->data(), rows * width, activation_dtype_));
  SPLICE_ASSIGN_OR_RETURN(const auto lse, floats(ws_.lse->data(), rows * heads, kernels::DType::kF32));
  SPLICE_ASSIGN_OR_RETURN(const auto other, floats(observer_->lse->data(), rows * heads, kernels::DType::kF32));
  (*observer_->observe)({seen.layer, out, lse, other});
  return absl::OkStatus();
}

absl::Status Executor::PrefillObserved(const PrefillSlice& slice, const kernels::HeadVisibility& other,
                                       const OnAttention& observe) {
  const ModelConfig& c = model_->config();
  const size_t rows = static_cast<size_t>(options_.max_rows);
  const size_t lse_bytes = rows * static_cast<size_t>(c.num_qo_heads) * sizeof(float);
  auto observer = std::make_unique<Observer>(Observer{other, &observe, nullptr, nullptr});
  SPLICE_RETURN_IF_ERROR(
      Grow(observer->out, rows * static_cast<size_t>(c.q_size()) * kernels::DTypeBytes(activation_dtype_)));
  SPLICE_RETURN_IF_ERROR(Grow(observer->lse, lse_bytes));
  SPLICE_RETURN_IF_ERROR(Grow(ws_.lse, lse_bytes));
  observer_ = std::move(observer);
  const absl::Status status = Prefill({&slice, 1}, PassLayers{{0, c.num_layers}});
  observer_.reset();
  return status;
}

kernels::ColumnScoresArgs Executor::ColumnArgs(size_t sequence, int32_t layer) const {
  return {.shape = attention_shape(),
          .pool = pool_,
          .q = query(),
          .q_row_stride = query_stride(),
          .lse = F32(ws_.lse),
          .rows = prefill_sequences_[sequence],
          .sequence = static_cast<int32_t>(sequence),
          .layer = layer};
}

absl::Status Executor::ScoreColumns(std::span<const PrefillSlice> slices, int32_t layer) {
  const int32_t heads = model_->config().num_kv_heads;
  for (size_t s = 0; s < slices.size(); ++s) {
    const ScoreTask* score = slices[s].score;
    if (!ScoresColumns(score, layer)) continue;
    kernels::ColumnScoresArgs args = ColumnArgs(s, layer);
    args.probes = score->probes;
    args.columns = score->candidates;
    args.scores = score->scores;
    if (score->every_head) {
      int64_t columns = 0;
      for (const PositionRange& range : score->candidates) columns += range.size();
      for (int32_t h = 0; h < heads; ++h) {
        args.kv_heads = {&h, 1};
        args.scores = score->scores + (int64_t{layer} * heads + h) * columns;
        SPLICE_RETURN_IF_ERROR(model_->backend().ColumnScores(context(), args));
      }
      continue;
    }
    score_heads_.clear();  // the rank's numbers
    for (const int32_t head : score->kv_heads) {
      const int32_t own = head - model_->first_kv_head();
      if (own >= 0 && own < heads) score_heads_.push_back(own);
    }
    if (score_heads_.empty() && !score->kv_heads.empty()) continue;
    args.kv_heads = score_heads_;
    SPLICE_RETURN_IF_ERROR(model_->backend().ColumnScores(context(), args));
  }
  return absl::OkStatus();
}

absl::Status Executor::ScoreGroups(std::span<const PrefillSlice> slices, int32_t layer) {
  for (size_t s = 0; s < slices.size(); ++s) {
    if (slices[s].queries == nullptr) continue;
    for (const QueryTask::Group& group : slices[s].queries->groups) {
      if (!AsksForAttention(group)) continue;
      row_ids_.resize(static_cast<size_t>(group.end - group.begin));
      std::iota(row_ids_.begin(), row_ids_.end(), group.begin);
      kernels::ColumnScoresArgs args = ColumnArgs(s, layer);
      args.probes = row_ids_;
      args.columns = {&group.attention_to, 1};
      args.scores = group.scores[static_cast<size_t>(rank_)];
      SPLICE_RETURN_IF_ERROR(model_->backend().ColumnScores(context(), args));
    }
  }
  return absl::OkStatus();
}

absl::Status Executor::ScoreDeviation(std::span<const PrefillSlice> slices, int32_t layer) {
  const ModelConfig& c = model_->config();
  for (size_t s = 0; s < slices.size(); ++s) {
    const ScoreTask* score = slices[s].score;
    if (score == nullptr || score->kind != ScoreKind::kValueDeviation || score->layer != layer) continue;
    ViewPageTables(layer);
    const kernels::RopeSequence all = RopeRows(s);
    float* to = score->scores;
    for (const PositionRange& range : score->candidates) {
      const auto first = std::lower_bound(all.positions.begin(), all.positions.end(), range.begin);
      const int32_t begin = static_cast<int32_t>(first - all.positions.begin());
      kernels::RopeSequence rows = all;
      rows.row_begin = all.row_begin + begin;
      rows.row_end = rows.row_begin + range.size();
      rows.positions = all.positions.subspan(static_cast<size_t>(begin), static_cast<size_t>(range.size()));
      SPLICE_RETURN_IF_ERROR(model_->backend().ValueDeviation(context(), {.qkv = F32(ws_.qkv),
                                                                          .num_qo_heads = c.num_qo_heads,
                                                                          .num_kv_heads = c.num_kv_heads,
                                                                          .head_dim = c.head_dim,
                                                                          .pool = pool_,
                                                                          .rows = rows,
                                                                          .sequence = static_cast<int32_t>(s),
                                                                          .layer = layer,
                                                                          .scores = to}));
      to += range.size();
    }
  }
  return absl::OkStatus();
}

absl::Status Executor::AddQueries(std::span<const PrefillSlice> slices, int32_t layer) {
  const ModelConfig& c = model_->config();
  const auto width = static_cast<size_t>(c.q_size()), stride = static_cast<size_t>(query_stride());
  const size_t whole = static_cast<size_t>(whole_->config().q_size());
  const size_t first = static_cast<size_t>(model_->first_kv_head() * (c.num_qo_heads / c.num_kv_heads) * c.head_dim);
  for (size_t s = 0; s < slices.size(); ++s) {
    if (slices[s].queries == nullptr) continue;
    for (const QueryTask::Group& group : slices[s].queries->groups) {
      const auto rows = static_cast<size_t>(group.end - group.begin);
      if (rows == 0) continue;
      const kernels::ConstActivations q = query();
      const size_t bytes = kernels::DTypeBytes(q.dtype);
      const std::byte* const from =
          static_cast<const std::byte*>(q.data) + static_cast<size_t>(spans_[s].begin + group.begin) * stride * bytes;
      SPLICE_ASSIGN_OR_RETURN(const void* host, session_->ReadBack(from, ((rows - 1) * stride + width) * bytes));
      double* const sums = group.sums + static_cast<size_t>(layer) * whole + first;
      for (size_t row = 0; row < rows; ++row) {
        for (size_t i = 0; i < width; ++i) {
          const size_t at = row * stride + i;
          sums[i] += q.dtype == kernels::DType::kF32 ? static_cast<const float*>(host)[at]
                                                     : kernels::ToFloat(static_cast<const kernels::bf16*>(host)[at]);
        }
      }
    }
  }
  return absl::OkStatus();
}

// Of every slice that blends rows: saves what is in their place, or blends it with what is there now.
absl::Status Executor::FuseRows(std::span<const PrefillSlice> slices, int32_t layer, kernels::FuseStep step) {
  const ModelConfig& c = model_->config();
  const size_t row_bytes = static_cast<size_t>(2 * c.kv_size()) * kernels::DTypeBytes(pool_.dtype);
  size_t saved = 0;
  for (size_t s = 0; s < slices.size(); ++s) {
    if (slices[s].fuse.empty()) continue;
    row_ids_.clear();
    for (size_t i = 0; i < slices[s].positions.size(); ++i) {
      if (ContainsPosition(slices[s].fuse, slices[s].positions[i])) row_ids_.push_back(static_cast<int32_t>(i));
    }
    ViewPageTables(layer);
    SPLICE_RETURN_IF_ERROR(Grow(ws_.before_fusion, static_cast<size_t>(options_.max_rows) * row_bytes));
    SPLICE_RETURN_IF_ERROR(
        model_->backend().FuseRows(context(), {.step = step,
                                               .pool = pool_,
                                               .num_kv_heads = c.num_kv_heads,
                                               .rows = RopeRows(s),
                                               .layer = layer,
                                               .row_ids = row_ids_,
                                               .saved = static_cast<std::byte*>(ws_.before_fusion->data()) + saved}));
    saved += row_ids_.size() * row_bytes;
  }
  return absl::OkStatus();
}

absl::Status Executor::Embed() {
  const ModelConfig& c = model_->config();
  return model_->backend().GatherRows(context(), {.table = model_->embedding(),
                                                  .dtype = model_->embedding_dtype(),
                                                  .num_table_rows = c.vocab_size,
                                                  .width = c.hidden_size,
                                                  .ids = tokens_,
                                                  .out = F32(ws_.residual),
                                                  .ids_are_batch_tokens = true});
}

absl::Status Executor::RunLayers(LayerRange layers, const LayerHooks& hooks) {
  const kernels::Backend& backend = model_->backend();
  kernels::ConstActivations delta;
  for (int32_t layer = layers.begin; layer < layers.end; ++layer) {
    const LayerWeights& weights = model_->layer(layer);
    SPLICE_RETURN_IF_ERROR(Normalize(delta, *weights.attention_norm));
    SPLICE_RETURN_IF_ERROR(backend.Linear(context(), {.x = Act(ws_.normed),
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
    SPLICE_RETURN_IF_ERROR(backend.Linear(
        context(), {.x = Act(ws_.attention), .weight = weights.o.get(), .y = F32(ws_.delta), .num_rows = num_rows_}));
    SPLICE_RETURN_IF_ERROR(Reduce(F32(ws_.delta), num_rows_));
    bool sparse = false;
    if (hooks.choose_ffn_rows) {
      SPLICE_ASSIGN_OR_RETURN(sparse, hooks.choose_ffn_rows(layer));
    }
    SPLICE_RETURN_IF_ERROR(Normalize(F32(ws_.delta), *weights.ffn_norm));
    SPLICE_RETURN_IF_ERROR(sparse ? RunSparseFeedForward(weights)
                                  : RunFeedForward(weights, Act(ws_.normed), num_rows_, F32(ws_.delta)));
    delta = F32(ws_.delta);
  }
  return absl::OkStatus();
}

absl::Status Executor::Reduce(float* partial, int64_t num_rows) {
  if (communicator_ == nullptr) return absl::OkStatus();
  return communicator_->AllReduceSum(context(), partial, num_rows * model_->config().hidden_size);
}

absl::Status Executor::RunFeedForward(const LayerWeights& weights, kernels::ConstActivations x, int64_t num_rows,
                                      float* out) {
  SPLICE_RETURN_IF_ERROR(weights.has_experts() ? RunExperts(weights, x, num_rows, out)
                                               : FeedForward(weights, x, num_rows, out));
  return Reduce(out, num_rows);
}

// The chosen rows packed, and back to their places; the others add nothing.
absl::Status Executor::RunSparseFeedForward(const LayerWeights& weights) {
  const kernels::Backend& backend = model_->backend();
  const auto count = static_cast<int64_t>(ffn_rows_.size());
  SPLICE_RETURN_IF_ERROR(backend.GatherRows(context(), {.table = ws_.normed->data(),
                                                        .dtype = activation_dtype_,
                                                        .num_table_rows = num_rows_,
                                                        .width = model_->config().hidden_size,
                                                        .ids = ffn_rows_,
                                                        .out = Act(ws_.gathered_delta)}));
  SPLICE_RETURN_IF_ERROR(RunFeedForward(weights, Act(ws_.gathered_delta), count, F32(ws_.gathered)));
  return backend.ScatterRows(context(), {.rows = F32(ws_.gathered),
                                         .ids = ffn_rows_,
                                         .num_out_rows = num_rows_,
                                         .width = model_->config().hidden_size,
                                         .out = F32(ws_.delta)});
}

absl::Status Executor::Normalize(kernels::ConstActivations delta, const kernels::Buffer& weight) {
  return Normalize(F32(ws_.residual), delta, weight, num_rows_);
}

absl::Status Executor::Normalize(float* residual, kernels::ConstActivations delta, const kernels::Buffer& weight,
                                 int64_t num_rows) {
  return model_->backend().RmsNorm(context(), {.residual = residual,
                                               .delta = delta,
                                               .weight = static_cast<const float*>(weight.data()),
                                               .out = Act(ws_.normed),
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
  const size_t heads = static_cast<size_t>(model_->config().num_kv_heads);
  return {rows.begin, rows.end, std::span(positions_).subspan(rows.begin, rows.end - rows.begin),
          std::span(table_views_).subspan(sequence * heads, heads)};
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

absl::Status Executor::FeedForward(const LayerWeights& weights, kernels::ConstActivations x, int64_t num_rows,
                                   float* out) {
  const kernels::Backend& backend = model_->backend();
  SPLICE_RETURN_IF_ERROR(backend.Linear(
      context(), {.x = x, .weight = weights.gate_up.get(), .y = F32(ws_.gate_up), .num_rows = num_rows}));
  SPLICE_RETURN_IF_ERROR(backend.SiluMul(context(), {.gate_up = F32(ws_.gate_up),
                                                     .out = Act(ws_.activated),
                                                     .num_rows = num_rows,
                                                     .width = model_->config().intermediate_size}));
  return backend.Linear(context(),
                        {.x = Act(ws_.activated), .weight = weights.down.get(), .y = out, .num_rows = num_rows});
}

absl::Status Executor::RunExperts(const LayerWeights& weights, kernels::ConstActivations x, int64_t num_rows,
                                  float* out) {
  const ModelConfig& c = model_->config();
  const kernels::Backend& backend = model_->backend();
  const int32_t top_k = c.moe.num_experts_per_token;
  const int64_t places = num_rows * top_k;
  SPLICE_RETURN_IF_ERROR(backend.Linear(
      context(), {.x = x, .weight = weights.router.get(), .y = F32(ws_.router_logits), .num_rows = num_rows}));
  SPLICE_RETURN_IF_ERROR(backend.RouteExperts(context(), {.logits = F32(ws_.router_logits),
                                                          .num_rows = num_rows,
                                                          .num_experts = c.moe.num_experts,
                                                          .top_k = top_k,
                                                          .renormalize = c.moe.renormalize,
                                                          .expert_ids = Int32(ws_.expert_ids),
                                                          .weights = F32(ws_.expert_weights),
                                                          .offsets = Int32(ws_.expert_offsets),
                                                          .rows = Int32(ws_.place_rows),
                                                          .places = Int32(ws_.row_places)}));
  SPLICE_RETURN_IF_ERROR(backend.GroupedLinear(context(), {.x = x,
                                                           .num_x_rows = num_rows,
                                                           .rows = Int32(ws_.place_rows),
                                                           .offsets = Int32(ws_.expert_offsets),
                                                           .weight = weights.expert_gate_up.get(),
                                                           .y = F32(ws_.expert_gate_up),
                                                           .num_places = places}));
  SPLICE_RETURN_IF_ERROR(backend.SiluMul(context(), {.gate_up = F32(ws_.expert_gate_up),
                                                     .out = Act(ws_.expert_activated),
                                                     .num_rows = places,
                                                     .width = c.moe.intermediate_size}));
  SPLICE_RETURN_IF_ERROR(backend.GroupedLinear(context(), {.x = Act(ws_.expert_activated),
                                                           .num_x_rows = places,
                                                           .offsets = Int32(ws_.expert_offsets),
                                                           .weight = weights.expert_down.get(),
                                                           .y = F32(ws_.expert_out),
                                                           .num_places = places}));
  return backend.CombineExperts(context(), {.y = F32(ws_.expert_out),
                                            .places = Int32(ws_.row_places),
                                            .weights = F32(ws_.expert_weights),
                                            .out = out,
                                            .num_rows = num_rows,
                                            .top_k = top_k,
                                            .width = c.hidden_size});
}

absl::Status Executor::ReserveLogits(int64_t num_rows) {
  if (num_rows > options_.max_rows)
    return Errorf(absl::StatusCode::kResourceExhausted, "executor: logits of {} rows, at most {}", num_rows,
                  options_.max_rows);
  const size_t bytes = sizeof(float) * static_cast<size_t>(num_rows * model_->vocab().size());
  if (ws_.logits == nullptr || ws_.logits->size() < bytes) {
    SPLICE_RETURN_IF_ERROR(session_->Synchronize());
    ws_.logits.reset();
    SPLICE_ASSIGN_OR_RETURN(ws_.logits, model_->backend().Allocate(bytes));
  }
  return absl::OkStatus();
}

absl::Status Executor::ComputeLogits(std::span<const int32_t> rows) {
  const kernels::Backend& backend = model_->backend();
  row_ids_.clear();
  for (const int32_t row : rows) {
    if (row < first_row_)
      return Errorf(absl::StatusCode::kFailedPrecondition,
                    "executor: logits of row {} of a pass over a whole span, which keeps rows from {} on", row,
                    first_row_);
    row_ids_.push_back(row - first_row_);
  }
  SPLICE_RETURN_IF_ERROR(ReserveLogits(static_cast<int64_t>(rows.size())));
  const auto gather = [&](kernels::Activations from, kernels::Activations to) {
    return backend.GatherRows(context(), {.table = from.data,
                                          .dtype = from.dtype,
                                          .num_table_rows = num_rows_,
                                          .width = model_->config().hidden_size,
                                          .ids = row_ids_,
                                          .out = to});
  };
  SPLICE_RETURN_IF_ERROR(gather(F32(ws_.residual), F32(ws_.gathered)));
  SPLICE_RETURN_IF_ERROR(gather(F32(ws_.delta), F32(ws_.gathered_delta)));
  num_logit_rows_ = static_cast<int64_t>(rows.size());
  return Project(F32(ws_.gathered), F32(ws_.gathered_delta), num_logit_rows_);
}

// The last norm and the language model head.
absl::Status Executor::Project(kernels::Activations residual, kernels::Activations delta, int64_t num_rows) {
  const ModelConfig& c = model_->config();
  const kernels::Backend& backend = model_->backend();
  SPLICE_RETURN_IF_ERROR(backend.RmsNorm(context(), {.residual = residual,
                                                     .delta = delta,
                                                     .weight = model_->final_norm(),
                                                     .out = Act(ws_.normed),
                                                     .num_rows = num_rows,
                                                     .width = c.hidden_size,
                                                     .eps = c.rms_norm_eps}));
  return backend.Linear(
      context(), {.x = Act(ws_.normed), .weight = &model_->lm_head(), .y = F32(ws_.logits), .num_rows = num_rows});
}

absl::StatusOr<HiddenStates> Executor::AllocateHidden(PositionRange positions) const {
  HiddenStates hidden{nullptr, positions.begin};
  const size_t bytes = sizeof(float) * static_cast<size_t>(positions.size()) * model_->config().hidden_size;
  SPLICE_ASSIGN_OR_RETURN(hidden.memory, model_->backend().Allocate(bytes));
  return hidden;
}

absl::StatusOr<std::unique_ptr<kernels::Buffer>> Executor::AllocateScores(int64_t count) const {
  return model_->backend().Allocate(sizeof(float) * static_cast<size_t>(std::max<int64_t>(count, 1)));
}

absl::StatusOr<std::vector<int32_t>> Executor::SelectTop(const kernels::Buffer& scores, int64_t num_scores,
                                                         int32_t pool_radius, int64_t k) {
  if (k == 0) return std::vector<int32_t>();
  const kernels::Backend& backend = model_->backend();
  const auto* from = static_cast<const float*>(scores.data());
  if (pool_radius > 0) {
    SPLICE_RETURN_IF_ERROR(Grow(ws_.pooled, sizeof(float) * static_cast<size_t>(num_scores)));
    SPLICE_RETURN_IF_ERROR(backend.PoolScores(context(), {from, num_scores, pool_radius, F32(ws_.pooled)}));
    from = F32(ws_.pooled);
  }
  const size_t bytes = sizeof(int32_t) * static_cast<size_t>(k);
  SPLICE_RETURN_IF_ERROR(Grow(ws_.top, bytes));
  SPLICE_RETURN_IF_ERROR(backend.TopK(context(), {from, num_scores, k, Int32(ws_.top)}));
  SPLICE_ASSIGN_OR_RETURN(const void* host, session_->ReadBack(ws_.top->data(), bytes));
  const auto* indices = static_cast<const int32_t*>(host);
  return std::vector<int32_t>(indices, indices + k);
}

absl::Status Executor::AlignCopy(const AlignPlan& plan) {
  if (plan.runs.empty()) return absl::OkStatus();
  return model_->backend().AlignCopy(context(), plan.Args(pool_, model_->config().head_dim));
}

absl::StatusOr<std::span<float>> Executor::Logits() {
  const size_t count = static_cast<size_t>(num_logit_rows_ * model_->vocab().size());
  if (model_->backend().host_memory()) return std::span<float>(F32(ws_.logits), count);
  SPLICE_ASSIGN_OR_RETURN(const void* host, session_->ReadBack(ws_.logits->data(), count * sizeof(float)));
  host_logits_.assign(static_cast<const float*>(host), static_cast<const float*>(host) + count);
  return std::span<float>(host_logits_);
}

absl::StatusOr<std::span<const int32_t>> Executor::Argmax() {
  int32_t* out = Int32(ws_.argmax);
  SPLICE_RETURN_IF_ERROR(model_->backend().Argmax(
      context(),
      {.logits = F32(ws_.logits), .out = out, .num_rows = num_logit_rows_, .width = model_->vocab().size()}));
  SPLICE_ASSIGN_OR_RETURN(const void* host,
                          session_->ReadBack(out, sizeof(int32_t) * static_cast<size_t>(num_logit_rows_)));
  return std::span(static_cast<const int32_t*>(host), static_cast<size_t>(num_logit_rows_));
}

absl::StatusOr<Executor::Best> Executor::ArgmaxWithLogits() {
  const size_t rows = static_cast<size_t>(num_logit_rows_);
  int32_t* out = Int32(ws_.argmax);
  SPLICE_RETURN_IF_ERROR(model_->backend().Argmax(context(), {.logits = F32(ws_.logits),
                                                              .out = out,
                                                              .values = F32(ws_.argmax) + rows,
                                                              .num_rows = num_logit_rows_,
                                                              .width = model_->vocab().size()}));
  SPLICE_ASSIGN_OR_RETURN(const void* host, session_->ReadBack(out, 2 * sizeof(int32_t) * rows));
  return Best{{static_cast<const int32_t*>(host), rows}, {static_cast<const float*>(host) + rows, rows}};
}

}  // namespace spl::engine
