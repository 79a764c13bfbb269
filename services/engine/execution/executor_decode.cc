// Executor's decode steps: one row of each sequence, which may choose what it attends to, and what is measured on the
// way.
#include <algorithm>
#include <cmath>
#include <utility>

#include "services/base/check.h"
#include "services/base/status.h"
#include "services/engine/execution/executor.h"

namespace spl::engine {
namespace {

using kernels::HeadVisibility;
using kernels::VisibilityRule;

float* F32(const std::unique_ptr<kernels::Buffer>& buffer) { return static_cast<float*>(buffer->data()); }

constexpr uint64_t kDecodeStep = 0x9e3779b97f4a7c15ull;  // mixes selectors into the key of a recorded step
constexpr uint64_t kAnyPlans = 0xd1b54a32d192ed03ull;    // in the place of a plan's key: of any mix of plans

// Address of an element.
void* From(void* data, kernels::DType dtype, int64_t element) {
  return static_cast<std::byte*>(data) + element * static_cast<int64_t>(kernels::DTypeBytes(dtype));
}
const void* From(const void* data, kernels::DType dtype, int64_t element) {
  return static_cast<const std::byte*>(data) + element * static_cast<int64_t>(kernels::DTypeBytes(dtype));
}

template <typename T>
bool AnyRow(std::span<const DecodeRow> rows, T* DecodeRow::*task) {
  return std::any_of(rows.begin(), rows.end(), [&](const DecodeRow& row) { return row.*task != nullptr; });
}

// Whether a head with rule `seen` sees what it does with `other`; lists and what is elsewhere count as less.
bool SeesAsMuch(const HeadVisibility& seen, const HeadVisibility& other) {
  if (seen.rule != other.rule) return false;
  return seen.rule == VisibilityRule::kFull ||
         (seen.rule == VisibilityRule::kBand && seen.num_sinks == other.num_sinks && seen.window == other.window);
}

}  // namespace

absl::Status Executor::Decode(std::span<const DecodeRow> rows) {
  spans_.clear();
  tokens_.clear();
  positions_.clear();
  // Equal plans are part of what is recorded; others are read from the staged batch, and one recording serves any mix.
  bool any_plans = false;
  for (const DecodeRow& row : rows) {
    const int32_t begin = static_cast<int32_t>(tokens_.size());
    tokens_.push_back(row.token_of < 0 ? row.token : -1 - row.token_of);
    positions_.push_back(static_cast<int32_t>(row.position()));
    spans_.push_back({begin, begin + 1, row.kv_len(), row.kv, row.selector});
    any_plans |= !row.selector->shares_plan() || row.selector->plan_key() != rows[0].selector->plan_key();
  }
  const bool measures = AnyRow(rows, &DecodeRow::mass);
  if (measures) {
    SPLICE_RETURN_IF_ERROR(
        Grow(ws_.lse, sizeof(float) * static_cast<size_t>(options_.max_rows) * model_->config().num_qo_heads));
  }
  SPLICE_RETURN_IF_ERROR(choices_->Prepare(rows));
  SPLICE_RETURN_IF_ERROR(Stage(any_plans));
  SPLICE_RETURN_IF_ERROR(ReserveLogits(static_cast<int64_t>(rows.size())));
  uint64_t key = kDecodeStep;
  const auto mix = [&](uint64_t value) { key = (key ^ value) * kDecodeStep + 1; };
  mix(any_plans ? kAnyPlans : rows[0].selector->plan_key());
  // The addresses in the step that ever change: a recording holds them.
  mix(reinterpret_cast<uint64_t>(ws_.logits->data()));
  mix(choices_->key());
  const auto step = [&]() -> absl::Status {
    SPLICE_RETURN_IF_ERROR(Embed(static_cast<const int32_t*>(ws_.tokens->data())));
    SPLICE_RETURN_IF_ERROR(RunLayers({0, model_->config().num_layers},
                                     {.attend = [&](int32_t layer) { return AttendDecode(rows, layer, any_plans); }}));
    return Project(F32(ws_.residual), Delta(), num_rows_);
  };
  // What is measured comes back to the host in the middle of the step: this one is not recorded.
  SPLICE_RETURN_IF_ERROR(measures ? step() : session_->RunStep(key, step));
  num_logit_rows_ = num_rows_;
  return absl::OkStatus();
}

absl::StatusOr<PendingMass> Executor::BeginMass() {
  const float* const mass = choices_->kept_mass();
  if (mass == nullptr) return PendingMass();
  const auto layers = static_cast<size_t>(model_->config().num_layers), rows = spans_.size(),
             heads = static_cast<size_t>(model_->config().num_kv_heads);
  SPLICE_ASSIGN_OR_RETURN(auto copy, session_->ReadBackLater(mass, sizeof(float) * layers * rows * heads));
  return PendingMass(std::move(copy), layers, rows, heads);
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

absl::Status Executor::AttendDecode(std::span<const DecodeRow> rows, int32_t layer, bool staged_plans) {
  const ModelConfig& c = model_->config();
  const int32_t first = model_->first_kv_head();
  const bool chooses = choices_->any(layer);
  if (chooses) SPLICE_RETURN_IF_ERROR(choices_->Choose(context(), attention_shape(), query(), query_stride(), layer));
  stream_views_.clear();
  for (size_t s = 0; s < rows.size(); ++s) {
    for (int32_t h = first; h < first + c.num_kv_heads; ++h)
      stream_views_.push_back(
          {rows[s].kv->stream(layer, h), static_cast<int32_t>(spans_[s].kv_len), rows[s].selector->Select(layer, h)});
  }
  const bool measures = AnyRow(rows, &DecodeRow::mass);
  if (measures) SPLICE_RETURN_IF_ERROR(MeasureEverything(rows, layer));
  float* const lse = measures ? F32(ws_.lse) : nullptr;
  if (chooses)
    SPLICE_RETURN_IF_ERROR(choices_->ChooseAndAttend(context(), attention_shape(), query(), query_stride(),
                                                     Act(ws_.attention), lse, layer));
  SPLICE_RETURN_IF_ERROR(
      model_->backend().DecodeAttention(context(), {.shape = attention_shape(),
                                                    .pool = pool_,
                                                    .q = query(),
                                                    .q_row_stride = query_stride(),
                                                    .out = Act(ws_.attention),
                                                    .lse = lse,
                                                    .streams = stream_views_,
                                                    .layer = layer,
                                                    .staged_plans = staged_plans,
                                                    .lists = chooses ? choices_->lists() : kernels::TokenLists{}}));
  if (measures) SPLICE_RETURN_IF_ERROR(MeasureKept(rows, layer));
  return absl::OkStatus();
}

// Rows of their own behind those of the slices.
absl::Status Executor::AttendRiders(std::span<const DecodeRow> riders, int32_t layer) {
  const ModelConfig& c = model_->config();
  const size_t first = spans_.size() - riders.size();
  stream_views_.clear();
  for (size_t i = 0; i < riders.size(); ++i) {
    for (int32_t h = model_->first_kv_head(); h < model_->first_kv_head() + c.num_kv_heads; ++h)
      stream_views_.push_back({riders[i].kv->stream(layer, h), static_cast<int32_t>(spans_[first + i].kv_len),
                               riders[i].selector->Select(layer, h)});
  }
  const int64_t row = spans_[first].begin;
  const kernels::ConstActivations q = query();
  const kernels::Activations out = Act(ws_.attention);
  return model_->backend().DecodeAttention(context(), {.shape = attention_shape(),
                                                       .pool = pool_,
                                                       .q = {From(q.data, q.dtype, row * query_stride()), q.dtype},
                                                       .q_row_stride = query_stride(),
                                                       .out = {From(out.data, out.dtype, row * c.q_size()), out.dtype},
                                                       .streams = stream_views_,
                                                       .layer = layer,
                                                       .first_sequence = static_cast<int32_t>(first)});
}

// The step's queries over everything, before what they choose: the same output is written again.
absl::Status Executor::MeasureEverything(std::span<const DecodeRow> rows, int32_t layer) {
  const ModelConfig& c = model_->config();
  const auto heads = static_cast<size_t>(c.num_kv_heads), queries = static_cast<size_t>(c.num_qo_heads);
  const std::vector<kernels::HeadStreamView> chosen = stream_views_;
  for (size_t s = 0; s < rows.size(); ++s) {
    if (rows[s].mass == nullptr) continue;
    // On a device heads of a call that is not staged have one rule each: all rows see what this one would, as far as
    // they have pages.
    for (size_t i = 0; i < stream_views_.size(); ++i) {
      const bool asks = i / heads == s || !model_->backend().host_memory();
      stream_views_[i].visibility =
          asks ? rows[s].mass->everything->Select(layer, model_->first_kv_head() + static_cast<int32_t>(i % heads))
               : chosen[i].visibility;
    }
    SPLICE_RETURN_IF_ERROR(model_->backend().DecodeAttention(
        context(), {.shape = attention_shape(),
                    .pool = pool_,
                    .q = query(),
                    .q_row_stride = query_stride(),
                    .out = Act(ws_.attention),
                    .lse = F32(ws_.lse),
                    .streams = stream_views_,
                    .layer = layer,
                    .lists = choices_->any(layer) ? choices_->lists() : kernels::TokenLists{}}));
    SPLICE_ASSIGN_OR_RETURN(const void* lse, session_->ReadBack(F32(ws_.lse) + s * queries, queries * sizeof(float)));
    for (size_t h = 0; h < queries; ++h) {
      const size_t kv_head = h / (queries / heads);
      const HeadVisibility& seen = chosen[s * heads + kv_head].visibility;
      // Negative infinity: this head sees everything that it would.
      MassOf(rows[s], layer, h) = SeesAsMuch(seen, stream_views_[s * heads + kv_head].visibility)
                                      ? -INFINITY
                                      : static_cast<const float*>(lse)[h];
    }
  }
  stream_views_ = chosen;
  return absl::OkStatus();
}

// Every rank writes what is of its own heads.
absl::Status Executor::MeasureKept(std::span<const DecodeRow> rows, int32_t layer) {
  const auto queries = static_cast<size_t>(model_->config().num_qo_heads);
  for (size_t s = 0; s < rows.size(); ++s) {
    if (rows[s].mass == nullptr) continue;
    SPLICE_ASSIGN_OR_RETURN(const void* lse, session_->ReadBack(F32(ws_.lse) + s * queries, queries * sizeof(float)));
    for (size_t h = 0; h < queries; ++h) {
      float& mass = MassOf(rows[s], layer, h);
      mass = mass == -INFINITY ? -1 : std::min(1.0f, std::exp(static_cast<const float*>(lse)[h] - mass));
    }
  }
  return absl::OkStatus();
}

float& Executor::MassOf(const DecodeRow& row, int32_t layer, size_t query_head) const {
  const ModelConfig& whole = whole_->config();
  const int32_t first = model_->first_kv_head() * (whole.num_qo_heads / whole.num_kv_heads);
  return row.mass->kept[static_cast<size_t>(layer) * static_cast<size_t>(whole.num_qo_heads) + first + query_head];
}

}  // namespace spl::engine
