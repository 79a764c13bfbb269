#include <string>

#include "kernels/common/host_backend.h"
#include "kernels/gemm/onednn.h"

namespace spl::kernels {
namespace {

class CpuBackend final : public HostBackend {
 public:
  explicit CpuBackend(const CpuBackendOptions& options) : options_(options) {}

  std::string name() const override { return "cpu"; }
  std::string description() const override {
    const bool bf16 = options_.gemm != GemmCompute::kF32 && CpuHasBf16Gemm();
    const bool one_dnn = DetectCpuIsa() >= CpuIsa::kAvx512 && cpu::HaveOneDnn();
    return std::string("cpu: ") + std::string(CpuIsaName(DetectCpuIsa())) + ", products " +
           (bf16 ? "of bf16 weights in bf16, others in f32 " : "in f32 ") +
           (one_dnn                             ? "by oneDNN"
            : DetectCpuIsa() >= CpuIsa::kAvx512 ? "of our own (libsplice_onednn.so is not there: slower)"
                                                : "of our own");
  }

  absl::StatusOr<std::unique_ptr<LinearWeight>> PackLinear(const WeightView& w) const override {
    return cpu::PackLinear(w, options_.gemm);
  }

  absl::StatusOr<std::unique_ptr<GroupedWeight>> AdoptGrouped(std::unique_ptr<Buffer> data,
                                                              GroupedWeightView w) const override {
    w.data = data->data();
    return cpu::PackGrouped(w, options_.gemm);
  }
  absl::Status FillRandom(const KernelContext& ctx, const FillRandomArgs& a) const override {
    return cpu::FillRandom(ctx, a);
  }

  absl::Status Linear(const KernelContext& ctx, const LinearArgs& a) const override { return cpu::Linear(ctx, a); }
  absl::Status RmsNorm(const KernelContext& ctx, const RmsNormArgs& a) const override { return cpu::RmsNorm(ctx, a); }
  absl::Status SiluMul(const KernelContext& ctx, const SiluMulArgs& a) const override { return cpu::SiluMul(ctx, a); }
  absl::Status GatherRows(const KernelContext& ctx, const GatherRowsArgs& a) const override {
    return cpu::GatherRows(ctx, a);
  }
  absl::Status RopeWriteKv(const KernelContext& ctx, const RopeWriteKvArgs& a) const override {
    return cpu::RopeWriteKv(ctx, a);
  }
  absl::Status PrefillAttention(const KernelContext& ctx, const PrefillAttentionArgs& a) const override {
    return cpu::PrefillAttention(ctx, a);
  }
  absl::Status DecodeAttention(const KernelContext& ctx, const DecodeAttentionArgs& a) const override {
    return cpu::DecodeAttention(ctx, a);
  }
  absl::Status Argmax(const KernelContext& ctx, const ArgmaxArgs& a) const override { return cpu::Argmax(ctx, a); }
  absl::Status AlignCopy(const KernelContext& ctx, const AlignCopyArgs& a) const override {
    return cpu::AlignCopy(ctx, a);
  }
  absl::Status ColumnScores(const KernelContext& ctx, const ColumnScoresArgs& a) const override {
    return cpu::ColumnScores(ctx, a);
  }
  absl::Status ScatterRows(const KernelContext& ctx, const ScatterRowsArgs& a) const override {
    return cpu::ScatterRows(ctx, a);
  }
  absl::Status RowNorms(const KernelContext& ctx, const RowNormsArgs& a) const override {
    return cpu::RowNorms(ctx, a);
  }
  absl::Status PoolScores(const KernelContext& ctx, const PoolScoresArgs& a) const override {
    return cpu::PoolScores(ctx, a);
  }
  absl::Status TopK(const KernelContext& ctx, const TopKArgs& a) const override { return cpu::TopK(ctx, a); }
  absl::Status ValueDeviation(const KernelContext& ctx, const ValueDeviationArgs& a) const override {
    return cpu::ValueDeviation(ctx, a);
  }
  absl::Status FuseRows(const KernelContext& ctx, const FuseRowsArgs& a) const override {
    return cpu::FuseRows(ctx, a);
  }
  absl::Status ListCandidates(const KernelContext& ctx, const ListCandidatesArgs& a) const override {
    return cpu::ListCandidates(ctx, a);
  }
  absl::Status SelectTokens(const KernelContext& ctx, const SelectTokensArgs& a) const override {
    return cpu::SelectTokens(ctx, a);
  }
  absl::Status TopTokens(const KernelContext& ctx, const TopTokensArgs& a) const override {
    return cpu::TopTokens(ctx, a);
  }
  absl::Status ChooseByQueryWindow(const KernelContext& ctx, const QueryWindowArgs& args) const override {
    return cpu::ChooseByQueryWindow(ctx, args);
  }
  absl::Status PageBoundScores(const KernelContext& ctx, const PageBoundScoresArgs& a) const override {
    return cpu::PageBoundScores(ctx, a);
  }
  absl::Status SelectLines(const KernelContext& ctx, const SelectLinesArgs& a) const override {
    return cpu::SelectLines(ctx, a);
  }
  absl::Status RouteExperts(const KernelContext& ctx, const RouteExpertsArgs& a) const override {
    return cpu::RouteExperts(ctx, a);
  }
  absl::Status GroupedLinear(const KernelContext& ctx, const GroupedLinearArgs& a) const override {
    return cpu::GroupedLinear(ctx, a);
  }
  absl::Status CombineExperts(const KernelContext& ctx, const CombineExpertsArgs& a) const override {
    return cpu::CombineExperts(ctx, a);
  }

 private:
  const CpuBackendOptions options_;
};

}  // namespace

std::unique_ptr<Backend> MakeCpuBackend(const CpuBackendOptions& options) {
  return std::make_unique<CpuBackend>(options);
}

}  // namespace spl::kernels
