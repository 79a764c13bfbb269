#include "kernels/gemm/gemm_cuda.h"

#include "kernels/cuda/cuda_device_info.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/gemm/fp8_gemm_cuda.h"
#include "kernels/gemm/rows_of_choice.h"

namespace spl::kernels::cuda {
namespace {

cudaDataType_t DataType(DType dtype) {
  return dtype == DType::kF32 ? CUDA_R_32F : dtype == DType::kE4M3 ? CUDA_R_8F_E4M3 : CUDA_R_16BF;
}

template <typename T>
cublasStatus_t SetAttribute(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t name, const T& value) {
  return cublasLtMatmulDescSetAttribute(operation, name, &value, sizeof(value));
}

// Scales of channels and rows, with sums as fast as the tensor cores add; or of blocks, and of 128 columns of a row.
cublasStatus_t ScaleE4M3(cublasLtMatmulDesc_t operation, bool blocks) {
  const auto of_w = blocks ? CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F : CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
  const auto of_x = blocks ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F : CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
  cublasStatus_t s = SetAttribute(operation, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, of_w);
  if (s == CUBLAS_STATUS_SUCCESS) s = SetAttribute(operation, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, of_x);
  const int8_t fast = blocks ? 0 : 1;
  if (s == CUBLAS_STATUS_SUCCESS) s = SetAttribute(operation, CUBLASLT_MATMUL_DESC_FAST_ACCUM, fast);
  return s;
}
cublasStatus_t SetScales(cublasLtMatmulDesc_t operation, const float* channels, const float* rows) {
  const cublasStatus_t s = SetAttribute(operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, channels);
  return s == CUBLAS_STATUS_SUCCESS ? SetAttribute(operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, rows) : s;
}

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

// Rows that cuBLASLt computes: of x in e4m3 with scale groups four at a time.
int64_t RowsOf(const LinearArgs& a) { return a.x.scale_group != 0 ? E4M3Rows(a.num_rows) : a.num_rows; }

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

bool MultipliesE4M3() {
  int capability = 0, num_sms = 0;
  return cublasLtGetVersion() >= 120900 && DeviceInfo(&capability, &num_sms) == cudaSuccess && capability / 10 == 9;
}

GemmPlans::Matrix GemmPlans::MatrixOf(const LinearWeight& weight) {
  if (const auto* fp8 = dynamic_cast<const DeviceFp8Weight*>(&weight))
    return {fp8->codes(), DType::kE4M3, fp8->e4m3_scales(), fp8->scale_group() != 0};
  const auto& plain = static_cast<const DeviceWeight&>(weight);
  return {plain.data(), plain.dtype(), nullptr, false};
}

GemmPlans::Key GemmPlans::KeyOf(const LinearArgs& a, int64_t num_rows) {
  return {num_rows, a.weight->out_features(), a.weight->in_features(),
          static_cast<int64_t>(MatrixOf(*a.weight).dtype) | static_cast<int64_t>(MatrixOf(*a.weight).blocks) << 24 |
              static_cast<int64_t>(a.x.dtype) << 8 | static_cast<int64_t>(a.y.dtype) << 16};
}

std::vector<float> BlockScales(const WeightView& w) {
  const int64_t groups = w.num_scale_groups(), stride = (groups + 3) / 4 * 4;
  const int64_t blocks = (w.out_features + kFp8Group - 1) / kFp8Group;
  std::vector<float> scales(static_cast<size_t>(blocks * stride), 1.0f);
  for (int64_t row = 0; row < w.out_features; ++row) {
    for (int64_t group = 0; group < groups; ++group) {
      float& of_block = scales[row / kFp8Group * stride + group];
      if (row % kFp8Group == 0) of_block = w.scales[row * groups + group];
      if (of_block != w.scales[row * groups + group]) return {};
    }
  }
  return scales;
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
  const Matrix weight = MatrixOf(*a.weight);
  const auto in = static_cast<uint64_t>(a.weight->in_features()), out = static_cast<uint64_t>(a.weight->out_features());
  SPLICE_CUDA_RETURN_IF_ERROR(cublasLtMatmulDescCreate(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "GEMM");
  SPLICE_CUDA_RETURN_IF_ERROR(SetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T), "GEMM");
  if (weight.dtype == DType::kE4M3) {
    SPLICE_CUDA_RETURN_IF_ERROR(ScaleE4M3(plan.operation, weight.blocks), "GEMM");
    SPLICE_CUDA_RETURN_IF_ERROR(SetScales(plan.operation, weight.scales, a.x.scales), "GEMM");
  }
  SPLICE_CUDA_RETURN_IF_ERROR(
      cublasLtMatrixLayoutCreate(&plan.w, DataType(weight.dtype), in, out, a.weight->in_features()), "GEMM");
  const int64_t num_rows = RowsOf(a);
  SPLICE_CUDA_RETURN_IF_ERROR(plan.rows.Create(a, num_rows), "GEMM");
  cublasLtMatmulPreference_t preference = nullptr;
  SPLICE_CUDA_RETURN_IF_ERROR(cublasLtMatmulPreferenceCreate(&preference), "GEMM");
  cublasStatus_t status = cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                               &ctx.workspace_bytes, sizeof(ctx.workspace_bytes));
  const int64_t rows_of_choice = deterministic_ ? kDeterministicRows : RowsOfChoice(num_rows);
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

absl::Status GemmPlans::Multiply(const GemmContext& ctx, const LinearArgs& a, bool add) {
  const Matrix weight = MatrixOf(*a.weight);
  const Key key = KeyOf(a, RowsOf(a));
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
  const float one = 1, times_y = add ? 1 : 0;
  cublasLtMatmulDescOpaque_t scaled;  // threads share the plan, and have scales of their own
  cublasLtMatmulDesc_t operation = plan->operation;
  if (weight.dtype == DType::kE4M3) {
    scaled = *plan->operation;
    operation = &scaled;
    SPLICE_CUDA_RETURN_IF_ERROR(SetScales(operation, weight.scales, a.x.scales), "GEMM");
  }
  return ToStatus(cublasLtMatmul(ctx.handle, operation, &one, weight.data, plan->w, a.x.data, plan->rows.x(), &times_y,
                                 a.y.data, plan->rows.y(), a.y.data, plan->rows.y(), &plan->algorithm, ctx.workspace,
                                 ctx.workspace_bytes, ctx.stream),
                  "GEMM");
}

}  // namespace spl::kernels::cuda
