// Executor's feed-forward: of all rows or of chosen ones, dense or of experts.
#include "services/base/status.h"
#include "services/engine/execution/executor.h"

namespace spl::engine {
namespace {

float* F32(const std::unique_ptr<kernels::Buffer>& buffer) { return static_cast<float*>(buffer->data()); }
int32_t* Int32(const std::unique_ptr<kernels::Buffer>& buffer) { return static_cast<int32_t*>(buffer->data()); }

}  // namespace

absl::StatusOr<bool> Executor::ChooseFfnRows(std::span<const PrefillSlice> slices, int32_t layer) {
  bool any = false;
  ffn_rows_.clear();
  for (size_t s = 0; s < slices.size(); ++s) {
    bool chose = false;
    if (slices[s].observers != nullptr) {
      const LayerView view = View(s, layer);
      for (LayerObserver* const observer : *slices[s].observers) {
        SPLICE_ASSIGN_OR_RETURN(const bool chosen, observer->ChooseFfnRows(view, ffn_rows_));
        chose |= chosen;
      }
    }
    any |= chose;
    for (int32_t row = spans_[s].begin; !chose && row < spans_[s].end; ++row) ffn_rows_.push_back(row);
  }
  return any && ffn_rows_.size() < static_cast<size_t>(num_rows_);
}

absl::Status Executor::RunFeedForward(const LayerWeights& weights, kernels::ConstActivations x, int64_t num_rows,
                                      float* out) {
  SPLICE_RETURN_IF_ERROR(weights.has_experts() ? RunExperts(weights, x, num_rows, out)
                                               : FeedForward(weights, x, num_rows, {out}));
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

absl::Status Executor::FeedForward(const LayerWeights& weights, kernels::ConstActivations x, int64_t num_rows,
                                   const Output& out) {
  const kernels::Backend& backend = model_->backend();
  const kernels::Activations gate_up =
      x.dtype == kernels::DType::kE4M3 ? Act(ws_.gate_up) : kernels::Activations(F32(ws_.gate_up));
  const kernels::Activations activated = InputOf(weights.down.get(), ws_.activated, num_rows);
  SPLICE_RETURN_IF_ERROR(backend.LinearSiluMul(
      context(),
      {.x = x, .weight = weights.gate_up.get(), .gate_up = gate_up, .out = activated, .num_rows = num_rows}));
  return Multiply(*weights.down, activated, num_rows, out);
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

}  // namespace spl::engine
