// The results of Executor's passes, on the host: logits, the most likely tokens, the best scores.
#include <algorithm>

#include "services/base/status.h"
#include "services/engine/execution/executor.h"

namespace spl::engine {
namespace {

float* F32(const std::unique_ptr<kernels::Buffer>& buffer) { return static_cast<float*>(buffer->data()); }
int32_t* Int32(const std::unique_ptr<kernels::Buffer>& buffer) { return static_cast<int32_t*>(buffer->data()); }

}  // namespace

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
  if (delta_pending_) SPLICE_RETURN_IF_ERROR(gather(F32(ws_.delta), F32(ws_.gathered_delta)));
  num_logit_rows_ = static_cast<int64_t>(rows.size());
  return Project(F32(ws_.gathered), delta_pending_ ? F32(ws_.gathered_delta) : kernels::ConstActivations(),
                 num_logit_rows_);
}

// The last norm and the language model head.
absl::Status Executor::Project(kernels::Activations residual, kernels::ConstActivations delta, int64_t num_rows) {
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

absl::StatusOr<std::span<float>> Executor::Logits() {
  const size_t count = num_logit_rows_ * model_->vocab().size();
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
  const size_t rows = num_logit_rows_;
  int32_t* out = Int32(ws_.argmax);
  SPLICE_RETURN_IF_ERROR(model_->backend().Argmax(context(), {.logits = F32(ws_.logits),
                                                              .out = out,
                                                              .values = F32(ws_.argmax) + rows,
                                                              .num_rows = num_logit_rows_,
                                                              .width = model_->vocab().size()}));
  SPLICE_ASSIGN_OR_RETURN(const void* host, session_->ReadBack(out, 2 * sizeof(int32_t) * rows));
  return Best{{static_cast<const int32_t*>(host), rows}, {static_cast<const float*>(host) + rows, rows}};
}

absl::StatusOr<std::unique_ptr<kernels::Buffer>> Executor::TakeScores(int64_t count) {
  return score_memory_.Take(model_->backend(), *session_, count);
}

absl::StatusOr<std::vector<int32_t>> Executor::SelectTop(const kernels::Buffer& scores, int64_t num_scores,
                                                         int32_t pool_radius, int64_t k) {
  if (k == 0) return std::vector<int32_t>();
  const kernels::Backend& backend = model_->backend();
  const auto* from = static_cast<const float*>(scores.data());
  if (pool_radius > 0) {
    SPLICE_RETURN_IF_ERROR(Grow(ws_.pooled, sizeof(float) * num_scores));
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

}  // namespace spl::engine
