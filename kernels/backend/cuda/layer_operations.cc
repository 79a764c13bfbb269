// Products, norms, rows and experts of a layer, and K and V of its pages.
#include "absl/strings/str_cat.h"
#include "kernels/activation/activation_cuda.h"
#include "kernels/activation/activation_validate.h"
#include "kernels/backend/cuda/cuda_backend.h"
#include "kernels/backend/cuda/staged_batch.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/embedding/embedding_cuda.h"
#include "kernels/embedding/scatter_rows_cuda.h"
#include "kernels/gemm/gate_up_silu_gemm_cuda.h"
#include "kernels/gemm/gemm_validate.h"
#include "kernels/gemm/int4_gemm_cuda.h"
#include "kernels/gemm/skinny_gemm_cuda.h"
#include "kernels/gemm/split_gemm_cuda.h"
#include "kernels/kv_copy/align_copy_cuda.h"
#include "kernels/kv_copy/fuse_rows_cuda.h"
#include "kernels/moe/moe_cuda.h"
#include "kernels/norm/norm_cuda.h"
#include "kernels/norm/norm_validate.h"
#include "kernels/norm/row_norms_cuda.h"
#include "kernels/quantize/quantize_rows_cuda.h"
#include "kernels/selection/cacheblend/value_deviation_cuda.h"

namespace spl::kernels::cuda {

namespace {

absl::Status Fp8Linear(const LinearArgs& a, const DeviceFp8Weight& weight, bool deterministic, cudaStream_t stream) {
  if (a.x.dtype != DType::kBF16) {
    return absl::UnimplementedError(
        absl::StrCat("Linear: an FP8 weight and activations in ", std::string(DTypeName(a.x.dtype)), ", not bf16"));
  }
  const Fp8GemmArgs args{.x = a.x.data,
                         .codes = weight.codes(),
                         .scales = weight.scales(),
                         .scale_group = weight.scale_group(),
                         .bias = a.bias,
                         .y = a.y.data,
                         .y_dtype = a.y.dtype,
                         .num_rows = a.num_rows,
                         .out_features = weight.out_features(),
                         .in_features = weight.in_features()};
  // When deterministic: a row of a long prompt must come out of the same arithmetic as that of a decode step.
  return ToStatus(deterministic ? TiledFp8Gemm(args, stream) : Fp8Gemm(args, stream), "Linear");
}

absl::Status Int4Linear(const LinearArgs& a, const DeviceInt4Weight& weight, bool deterministic,
                        const CudaSession& session) {
  if (a.x.dtype != DType::kBF16) {
    return absl::UnimplementedError(
        absl::StrCat("Linear: an int4 weight and activations in ", std::string(DTypeName(a.x.dtype)), ", not bf16"));
  }
  static_assert(CudaSession::kGemmWorkspaceBytes >= kInt4WorkspaceBytes);
  const Int4GemmArgs args{.x = a.x.data,
                          .codes = weight.codes(),
                          .scales = weight.scales(),
                          .zeros = weight.zeros(),
                          .scale_group = weight.scale_group(),
                          .column_order = weight.column_order(),
                          .bias = a.bias,
                          .y = a.y.data,
                          .y_dtype = a.y.dtype,
                          .num_rows = a.num_rows,
                          .out_features = weight.out_features(),
                          .in_features = weight.in_features(),
                          .workspace = session.gemm_workspace(),
                          .workspace_bytes = CudaSession::kGemmWorkspaceBytes};
  return ToStatus(Int4Gemm(args, deterministic, session.stream()), "Linear");
}

// y = x Wᵀ + bias, or with `add` y += x Wᵀ + bias. NotSupported: cuBLASLt's product is faster, or the only one.
cudaError_t Split(const LinearArgs& a, const DeviceWeight& weight, bool add, cudaStream_t stream) {
  if (weight.dtype() != DType::kBF16 || a.x.dtype != DType::kBF16 || a.y.dtype != DType::kF32 ||
      !PrefersSplitGemm(a.num_rows, weight.out_features(), weight.in_features())) {
    return cudaErrorNotSupported;
  }
  return SplitGemm({.x = a.x.data,
                    .weight = weight.data(),
                    .bias = a.bias,
                    .y = a.y,
                    .add = add,
                    .num_rows = a.num_rows,
                    .out_features = weight.out_features(),
                    .in_features = weight.in_features()},
                   stream);
}

}  // namespace

absl::Status CudaBackend::Linear(const KernelContext& ctx, const LinearArgs& a) const {
  if (absl::Status s = ValidateLinear(a); !s.ok()) return s;
  if (a.num_rows == 0) return absl::OkStatus();
  CudaSession& session = CudaSession::Of(ctx);
  const auto* const fp8 = dynamic_cast<const DeviceFp8Weight*>(a.weight);
  if (a.x.dtype == DType::kE4M3 && (fp8 == nullptr || !fp8->multiplies_e4m3() || a.x.scale_group != fp8->e4m3_group()))
    return absl::UnimplementedError("Linear: x in e4m3, and a weight that is not multiplied with it here");
  if (fp8 != nullptr && a.x.dtype != DType::kE4M3) return Fp8Linear(a, *fp8, deterministic_, session.stream());
  if (const auto* int4 = dynamic_cast<const DeviceInt4Weight*>(a.weight)) {
    return Int4Linear(a, *int4, deterministic_, session);
  }
  // Not when deterministic: a row of a long prompt must come out of the same arithmetic as that of a decode step.
  if (fp8 == nullptr && !deterministic_) {
    const auto& weight = static_cast<const DeviceWeight&>(*a.weight);
    const cudaError_t split = Split(a, weight, false, session.stream());
    if (split != cudaErrorNotSupported) return ToStatus(split, "Linear");
    if (a.num_rows <= kMaxSkinnyRows && weight.dtype() == DType::kBF16 && a.x.dtype == DType::kBF16) {
      const cudaError_t e = SkinnyGemm({.x = a.x.data,
                                        .w = weight.data(),
                                        .bias = a.bias,
                                        .y = a.y.data,
                                        .y_dtype = a.y.dtype,
                                        .num_rows = a.num_rows,
                                        .out_features = weight.out_features(),
                                        .in_features = weight.in_features()},
                                       session.stream());
      if (e != cudaErrorNotSupported) return ToStatus(e, "Linear");
    }
  }
  const GemmContext gemm{session.cublas(), session.gemm_workspace(), CudaSession::kGemmWorkspaceBytes,
                         session.stream()};
  if (absl::Status s = gemm_plans_.Multiply(gemm, a); !s.ok()) return s;
  return a.bias == nullptr ? absl::OkStatus() : ToStatus(AddBias(a, session.stream()), "AddBias");
}

absl::Status CudaBackend::LinearAdd(const KernelContext& ctx, const LinearAddArgs& a) const {
  if (absl::Status s = ValidateLinearAdd(a); !s.ok()) return s;
  const auto* const plain = dynamic_cast<const DeviceWeight*>(a.weight);
  if (plain == nullptr || plain->dtype() != a.x.dtype)
    return absl::UnimplementedError("LinearAdd: only bf16 and f32 weights, with x of the same type");
  if (a.num_rows == 0) return absl::OkStatus();
  LinearArgs product = a.Product();
  product.y = a.y;
  CudaSession& session = CudaSession::Of(ctx);
  if (!deterministic_) {
    const cudaError_t e = Split(product, *plain, true, session.stream());
    if (e != cudaErrorNotSupported) return ToStatus(e, "LinearAdd");
  }
  const GemmContext gemm{session.cublas(), session.gemm_workspace(), CudaSession::kGemmWorkspaceBytes,
                         session.stream()};
  return gemm_plans_.Multiply(gemm, product, true);
}

absl::Status CudaBackend::LinearSiluMul(const KernelContext& ctx, const LinearSiluMulArgs& a) const {
  if (absl::Status s = ValidateLinearSiluMul(a); !s.ok()) return s;
  // Not when deterministic, as above.
  const auto* const plain = dynamic_cast<const DeviceWeight*>(a.weight);
  if (!deterministic_ && a.num_rows >= kGateUpSiluMinRows && plain != nullptr && plain->dtype() == DType::kBF16 &&
      a.x.dtype == DType::kBF16 && a.out.dtype == DType::kBF16) {
    const cudaError_t e = GateUpSiluGemm({.x = a.x.data,
                                          .weight = plain->data(),
                                          .out = a.out.data,
                                          .num_rows = a.num_rows,
                                          .width = plain->out_features() / 2,
                                          .in_features = plain->in_features()},
                                         CudaSession::Of(ctx).stream());
    if (e != cudaErrorNotSupported) return ToStatus(e, "LinearSiluMul");
  }
  if (absl::Status s = Linear(ctx, a.Product()); !s.ok()) return s;
  return SiluMul(ctx, a.Activation());
}

absl::Status CudaBackend::QuantizeRows(const KernelContext& ctx, const QuantizeRowsArgs& a) const {
  if (absl::Status s = ValidateQuantizeRows(a); !s.ok()) return s;
  return ToStatus(cuda::QuantizeRows(a, CudaSession::Of(ctx).stream()), "QuantizeRows");
}

absl::Status CudaBackend::RmsNorm(const KernelContext& ctx, const RmsNormArgs& a) const {
  if (absl::Status s = ValidateRmsNorm(a); !s.ok()) return s;
  return ToStatus(cuda::RmsNorm(a, CudaSession::Of(ctx).stream()), "RmsNorm");
}

absl::Status CudaBackend::RowNorms(const KernelContext& ctx, const RowNormsArgs& a) const {
  if (absl::Status s = ValidateRowNorms(a); !s.ok()) return s;
  return ToStatus(cuda::RowNorms(a, CudaSession::Of(ctx).stream()), "RowNorms");
}

absl::Status CudaBackend::SiluMul(const KernelContext& ctx, const SiluMulArgs& a) const {
  if (absl::Status s = ValidateSiluMul(a); !s.ok()) return s;
  return ToStatus(cuda::SiluMul(a, CudaSession::Of(ctx).stream()), "SiluMul");
}

absl::Status CudaBackend::GatherRows(const KernelContext& ctx, const GatherRowsArgs& a) const {
  CudaSession& session = CudaSession::Of(ctx);
  const int32_t* ids = session.batch().tokens;
  if (!a.ids_are_batch_tokens) {
    for (const int32_t id : a.ids) {
      if (id < 0 || id >= a.num_table_rows)
        return absl::InvalidArgumentError(
            absl::StrCat("GatherRows: id ", id, " is outside [0, ", a.num_table_rows, ")"));
    }
    auto staged = session.StageIds(a.ids);
    if (!staged.ok()) return staged.status();
    ids = *staged;
  }
  return ToStatus(cuda::GatherRows(a, ids, static_cast<int64_t>(a.ids.size()), session.stream()), "GatherRows");
}

absl::Status CudaBackend::ScatterRows(const KernelContext& ctx, const ScatterRowsArgs& a) const {
  if (absl::Status s = ValidateScatterRows(a); !s.ok()) return s;
  CudaSession& session = CudaSession::Of(ctx);
  const auto ids = session.StageIds(a.ids);
  if (!ids.ok()) return ids.status();
  return ToStatus(cuda::ScatterRows(a, *ids, session.stream()), "ScatterRows");
}

absl::Status CudaBackend::RouteExperts(const KernelContext& ctx, const RouteExpertsArgs& a) const {
  if (absl::Status s = ValidateRouteExperts(a); !s.ok()) return s;
  return ToStatus(cuda::RouteExperts(a, CudaSession::Of(ctx).stream()), "RouteExperts");
}

absl::Status CudaBackend::GroupedLinear(const KernelContext& ctx, const GroupedLinearArgs& a) const {
  if (absl::Status s = ValidateGroupedLinear(a); !s.ok()) return s;
  return ToStatus(cuda::GroupedLinear(a, CudaSession::Of(ctx).stream()), "GroupedLinear");
}

absl::Status CudaBackend::CombineExperts(const KernelContext& ctx, const CombineExpertsArgs& a) const {
  if (absl::Status s = ValidateCombineExperts(a); !s.ok()) return s;
  return ToStatus(cuda::CombineExperts(a, CudaSession::Of(ctx).stream()), "CombineExperts");
}

absl::Status CudaBackend::RopeWriteKv(const KernelContext& ctx, const RopeWriteKvArgs& a) const {
  CudaSession& session = CudaSession::Of(ctx);
  RopeWriteKvArgs args = a;
  args.pool = DevicePool(a.pool);
  return ToStatus(cuda::RopeWriteKv(args, Rows(session.batch(), a.layer), session.stream()), "RopeWriteKv");
}

absl::Status CudaBackend::AlignCopy(const KernelContext& ctx, const AlignCopyArgs& a) const {
  if (absl::Status s = ValidateAlignCopy(a); !s.ok()) return s;
  CudaSession& session = CudaSession::Of(ctx);
  auto staged = session.StageArrays(CudaSession::Use::kAlignCopy, 0,
                                    {std::as_bytes(a.runs), std::as_bytes(a.src_pages), std::as_bytes(a.dst_pages),
                                     std::as_bytes(a.cos), std::as_bytes(a.sin)});
  if (!staged.ok()) return staged.status();
  const AlignCopyTables tables{.runs = reinterpret_cast<const AlignRun*>((*staged)[0]),
                               .src_pages = reinterpret_cast<const int32_t*>((*staged)[1]),
                               .dst_pages = reinterpret_cast<const int32_t*>((*staged)[2]),
                               .cos = reinterpret_cast<const float*>((*staged)[3]),
                               .sin = reinterpret_cast<const float*>((*staged)[4])};
  AlignCopyArgs args = a;
  args.pool.base = a.pool.base - static_cast<int64_t>(a.pool.first_page) * static_cast<int64_t>(a.pool.page_bytes());
  return ToStatus(cuda::AlignCopy(args, tables, session.stream()), "AlignCopy");
}

absl::Status CudaBackend::FuseRows(const KernelContext& ctx, const FuseRowsArgs& a) const {
  if (absl::Status s = ValidateFuseRows(a); !s.ok()) return s;
  if (a.row_ids.empty()) return absl::OkStatus();
  CudaSession& session = CudaSession::Of(ctx);
  // Both steps of all layers of a pass blend the same rows.
  auto staged = session.StageChangedArrays(CudaSession::Use::kFuseRows, {std::as_bytes(a.row_ids)});
  if (!staged.ok()) return staged.status();
  FuseRowsArgs args = a;
  args.pool = DevicePool(a.pool);
  return ToStatus(cuda::FuseRows(args, Rows(session.batch(), a.layer), reinterpret_cast<const int32_t*>((*staged)[0]),
                                 session.stream()),
                  "FuseRows");
}

absl::Status CudaBackend::ValueDeviation(const KernelContext& ctx, const ValueDeviationArgs& a) const {
  if (absl::Status s = ValidateValueDeviation(a); !s.ok()) return s;
  CudaSession& session = CudaSession::Of(ctx);
  return ToStatus(cuda::ValueDeviation(a, Rows(session.batch(), a.layer), session.stream()), "ValueDeviation");
}

}  // namespace spl::kernels::cuda
