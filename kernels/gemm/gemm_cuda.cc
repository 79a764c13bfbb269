#include "kernels/gemm/gemm_cuda.h"

#include "kernels/cuda/cuda_status.h"
#include "kernels/gemm/rows_of_choice.h"

namespace spl::kernels::cuda {
namespace {

cudaDataType_t DataType(DType dtype) { return dtype == DType::kF32 ? CUDA_R_32F : CUDA_R_16BF; }

// Layouts of x and y, for some number of rows.
class RowLayouts {
 public:
  RowLayouts() = default;
  RowLayouts(const RowLayouts&) = delete;
  RowLayouts& operator=(const RowLayouts&) = delete;
  ~RowLayouts() {
    for (cublasLtMatrixLayout_t layout : {x_, y_}) {
      if (layout != nullptr) (void)cublasLtMatrixLayoutDestroy(layout);
    }
  }
  // Once.
  cublasStatus_t Create(const LinearArgs& a, int64_t num_rows) {
    const int64_t in = a.weight->in_features(), out = a.weight->out_features();
    const auto rows = static_cast<uint64_t>(num_rows);
    const cublasStatus_t status =
        cublasLtMatrixLayoutCreate(&x_, DataType(a.x.dtype), static_cast<uint64_t>(in), rows, in);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    return cublasLtMatrixLayoutCreate(&y_, DataType(a.y.dtype), static_cast<uint64_t>(out), rows, out);
  }
  cublasLtMatrixLayout_t x() const { return x_; }
  cublasLtMatrixLayout_t y() const { return y_; }

 private:
  cublasLtMatrixLayout_t x_ = nullptr, y_ = nullptr;
};

}  // namespace

struct GemmPlans::Plan {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t w = nullptr;
  RowLayouts rows;
  cublasLtMatmulAlgo_t algorithm{};

  ~Plan() {
    if (w != nullptr) (void)cublasLtMatrixLayoutDestroy(w);
    if (operation != nullptr) (void)cublasLtMatmulDescDestroy(operation);
  }
};

GemmPlans::Key GemmPlans::KeyOf(const LinearArgs& a, int64_t num_rows) {
  const auto& weight = static_cast<const DeviceWeight&>(*a.weight);
  return {num_rows, weight.out_features(), weight.in_features(),
          static_cast<int64_t>(weight.dtype()) | static_cast<int64_t>(a.x.dtype) << 8 |
              static_cast<int64_t>(a.y.dtype) << 16};
}

GemmPlans::GemmPlans(bool deterministic) : deterministic_(deterministic) {}
GemmPlans::~GemmPlans() = default;

cublasStatus_t GemmPlans::Choose(const GemmContext& ctx, const LinearArgs& a, int64_t rows,
                                 cublasLtMatmulPreference_t preference, Plan& plan) {
  const auto ask = [&](const RowLayouts& of, cublasLtMatmulAlgo_t& algorithm) {
    cublasLtMatmulHeuristicResult_t result{};
    int count = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(ctx.handle, plan.operation, plan.w, of.x(), of.y(),
                                                                 of.y(), preference, 1, &result, &count);
    algorithm = result.algo;
    return status == CUBLAS_STATUS_SUCCESS && count == 0 ? CUBLAS_STATUS_NOT_SUPPORTED : status;
  };
  const Key key = KeyOf(a, rows);
  const auto known = algorithms_.find(key);
  if (known == algorithms_.end()) {
    RowLayouts asked;
    cublasStatus_t status = asked.Create(a, rows);
    if (status == CUBLAS_STATUS_SUCCESS) status = ask(asked, plan.algorithm);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    algorithms_.emplace(key, plan.algorithm);
  } else {
    plan.algorithm = known->second;
  }
  cublasLtMatmulHeuristicResult_t checked{};
  const cublasStatus_t status = cublasLtMatmulAlgoCheck(ctx.handle, plan.operation, plan.w, plan.rows.x(),
                                                        plan.rows.y(), plan.rows.y(), &plan.algorithm, &checked);
  if (status == CUBLAS_STATUS_SUCCESS && checked.workspaceSize <= ctx.workspace_bytes) return status;
  // Deterministic: one algorithm for every number of rows, or none.
  return deterministic_ ? CUBLAS_STATUS_NOT_SUPPORTED : ask(plan.rows, plan.algorithm);
}

// cuBLASLt is column-major: yᵀ [out, rows] = W [in, out]ᵀ · xᵀ [in, rows], all with their rows contiguous.
absl::Status GemmPlans::Make(const GemmContext& ctx, const LinearArgs& a, Plan& plan) {
  const auto& weight = static_cast<const DeviceWeight&>(*a.weight);
  const uint64_t in = static_cast<uint64_t>(weight.in_features()), out = static_cast<uint64_t>(weight.out_features());
  SPLICE_CUDA_RETURN_IF_ERROR(cublasLtMatmulDescCreate(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "GEMM");
  const cublasOperation_t transpose = CUBLAS_OP_T;
  SPLICE_CUDA_RETURN_IF_ERROR(
      cublasLtMatmulDescSetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof(transpose)),
      "GEMM");
  SPLICE_CUDA_RETURN_IF_ERROR(
      cublasLtMatrixLayoutCreate(&plan.w, DataType(weight.dtype()), in, out, weight.in_features()), "GEMM");
  SPLICE_CUDA_RETURN_IF_ERROR(plan.rows.Create(a, a.num_rows), "GEMM");
  cublasLtMatmulPreference_t preference = nullptr;
  SPLICE_CUDA_RETURN_IF_ERROR(cublasLtMatmulPreferenceCreate(&preference), "GEMM");
  cublasStatus_t status = cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                               &ctx.workspace_bytes, sizeof(ctx.workspace_bytes));
  const int64_t rows_of_choice = deterministic_ ? kDeterministicRows : RowsOfChoice(a.num_rows);
  if (deterministic_ && status == CUBLAS_STATUS_SUCCESS) {
    const uint32_t no_split = CUBLASLT_REDUCTION_SCHEME_NONE;
    status = cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &no_split,
                                                  sizeof(no_split));
  }
  if (status == CUBLAS_STATUS_SUCCESS) status = Choose(ctx, a, rows_of_choice, preference, plan);
  (void)cublasLtMatmulPreferenceDestroy(preference);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) return absl::UnimplementedError("cublasLt: no algorithm for this product");
  SPLICE_CUDA_RETURN_IF_ERROR(status, "choosing a GEMM");
  return absl::OkStatus();
}

absl::Status GemmPlans::Multiply(const GemmContext& ctx, const LinearArgs& a) {
  const auto& weight = static_cast<const DeviceWeight&>(*a.weight);
  const Key key = KeyOf(a, a.num_rows);
  Plan* plan = nullptr;
  {
    std::lock_guard lock(mutex_);
    std::unique_ptr<Plan>& entry = plans_[key];
    if (entry == nullptr) {
      auto made = std::make_unique<Plan>();
      if (absl::Status s = Make(ctx, a, *made); !s.ok()) return s;
      entry = std::move(made);
    }
    plan = entry.get();
  }
  const float one = 1, zero = 0;
  return ToStatus(cublasLtMatmul(ctx.handle, plan->operation, &one, weight.data(), plan->w, a.x.data, plan->rows.x(),
                                 &zero, a.y.data, plan->rows.y(), a.y.data, plan->rows.y(), &plan->algorithm,
                                 ctx.workspace, ctx.workspace_bytes, ctx.stream),
                  "GEMM");
}

}  // namespace spl::kernels::cuda
