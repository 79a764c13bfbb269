#include "kernels/gemm/gemm_cuda.h"

#include "kernels/cuda/cuda_status.h"

namespace spl::kernels::cuda {
namespace {

cudaDataType_t DataType(DType dtype) { return dtype == DType::kF32 ? CUDA_R_32F : CUDA_R_16BF; }

}  // namespace

struct GemmPlans::Plan {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t w = nullptr, x = nullptr, y = nullptr;
  cublasLtMatmulAlgo_t algorithm{};

  ~Plan() {
    for (cublasLtMatrixLayout_t layout : {w, x, y}) {
      if (layout != nullptr) (void)cublasLtMatrixLayoutDestroy(layout);
    }
    if (operation != nullptr) (void)cublasLtMatmulDescDestroy(operation);
  }
};

GemmPlans::Key GemmPlans::KeyOf(const LinearArgs& a, int64_t num_rows) {
  const auto& weight = static_cast<const DeviceWeight&>(*a.weight);
  return {num_rows, weight.out_features(), weight.in_features(),
          static_cast<int64_t>(weight.dtype()) | static_cast<int64_t>(a.x.dtype) << 8 |
              static_cast<int64_t>(a.y.dtype) << 16};
}

// Numbers of rows that differ by an eighth at most, and small ones only when equal.
GemmPlans::Key GemmPlans::BucketOf(const LinearArgs& a) {
  constexpr int64_t kEach = 64;
  int64_t rows = a.num_rows;
  if (rows > kEach) {
    int64_t step = kEach;
    while (step * 16 < rows) step *= 2;
    rows = (rows + step - 1) / step * step;
  }
  return KeyOf(a, rows);
}

GemmPlans::GemmPlans(bool deterministic) : deterministic_(deterministic) {}
GemmPlans::~GemmPlans() = default;

// cuBLASLt is column-major: yᵀ [out, rows] = W [in, out]ᵀ · xᵀ [in, rows], all with their rows contiguous.
absl::Status GemmPlans::Make(const GemmContext& ctx, const LinearArgs& a, Plan& plan) {
  const auto& weight = static_cast<const DeviceWeight&>(*a.weight);
  const uint64_t in = static_cast<uint64_t>(weight.in_features()), out = static_cast<uint64_t>(weight.out_features());
  const uint64_t rows = static_cast<uint64_t>(a.num_rows);
  SPLICE_CUDA_RETURN_IF_ERROR(cublasLtMatmulDescCreate(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "GEMM");
  const cublasOperation_t transpose = CUBLAS_OP_T;
  SPLICE_CUDA_RETURN_IF_ERROR(
      cublasLtMatmulDescSetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof(transpose)),
      "GEMM");
  SPLICE_CUDA_RETURN_IF_ERROR(
      cublasLtMatrixLayoutCreate(&plan.w, DataType(weight.dtype()), in, out, weight.in_features()), "GEMM");
  SPLICE_CUDA_RETURN_IF_ERROR(cublasLtMatrixLayoutCreate(&plan.x, DataType(a.x.dtype), in, rows, weight.in_features()),
                              "GEMM");
  SPLICE_CUDA_RETURN_IF_ERROR(
      cublasLtMatrixLayoutCreate(&plan.y, DataType(a.y.dtype), out, rows, weight.out_features()), "GEMM");
  cublasLtMatmulPreference_t preference = nullptr;
  SPLICE_CUDA_RETURN_IF_ERROR(cublasLtMatmulPreferenceCreate(&preference), "GEMM");
  cublasStatus_t status = cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                               &ctx.workspace_bytes, sizeof(ctx.workspace_bytes));
  cublasLtMatmulHeuristicResult_t result{};
  int count = 0;
  if (!deterministic_) {
    // Asking takes a millisecond, and chosen rows come in every number: neighbours share an answer where it serves
    // both.
    const Key bucket = BucketOf(a);
    const auto known = algorithms_.find(bucket);
    cublasLtMatmulHeuristicResult_t checked{};
    if (status == CUBLAS_STATUS_SUCCESS && known != algorithms_.end() &&
        cublasLtMatmulAlgoCheck(ctx.handle, plan.operation, plan.w, plan.x, plan.y, plan.y, &known->second, &checked) ==
            CUBLAS_STATUS_SUCCESS &&
        checked.workspaceSize <= ctx.workspace_bytes) {
      result.algo = known->second;
      count = 1;
    } else if (status == CUBLAS_STATUS_SUCCESS) {
      status = cublasLtMatmulAlgoGetHeuristic(ctx.handle, plan.operation, plan.w, plan.x, plan.y, plan.y, preference, 1,
                                              &result, &count);
      if (status == CUBLAS_STATUS_SUCCESS && count > 0) algorithms_[bucket] = result.algo;
    }
  } else {
    const uint32_t no_split = CUBLASLT_REDUCTION_SCHEME_NONE;
    if (status == CUBLAS_STATUS_SUCCESS)
      status = cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &no_split,
                                                    sizeof(no_split));
    cublasLtMatrixLayout_t x = nullptr, y = nullptr;
    if (status == CUBLAS_STATUS_SUCCESS)
      status = cublasLtMatrixLayoutCreate(&x, DataType(a.x.dtype), in, kDeterministicRows, weight.in_features());
    if (status == CUBLAS_STATUS_SUCCESS)
      status = cublasLtMatrixLayoutCreate(&y, DataType(a.y.dtype), out, kDeterministicRows, weight.out_features());
    if (status == CUBLAS_STATUS_SUCCESS)
      status =
          cublasLtMatmulAlgoGetHeuristic(ctx.handle, plan.operation, plan.w, x, y, y, preference, 1, &result, &count);
    if (x != nullptr) (void)cublasLtMatrixLayoutDestroy(x);
    if (y != nullptr) (void)cublasLtMatrixLayoutDestroy(y);
    cublasLtMatmulHeuristicResult_t checked{};
    if (status == CUBLAS_STATUS_SUCCESS && count > 0)
      status =
          cublasLtMatmulAlgoCheck(ctx.handle, plan.operation, plan.w, plan.x, plan.y, plan.y, &result.algo, &checked);
  }
  (void)cublasLtMatmulPreferenceDestroy(preference);
  SPLICE_CUDA_RETURN_IF_ERROR(status, "choosing a GEMM");
  if (count == 0) return absl::UnimplementedError("cublasLt: no algorithm for this product");
  plan.algorithm = result.algo;
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
  return ToStatus(
      cublasLtMatmul(ctx.handle, plan->operation, &one, weight.data(), plan->w, a.x.data, plan->x, &zero, a.y.data,
                     plan->y, a.y.data, plan->y, &plan->algorithm, ctx.workspace, ctx.workspace_bytes, ctx.stream),
      "GEMM");
}

}  // namespace spl::kernels::cuda
