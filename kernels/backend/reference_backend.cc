#include "kernels/common/host_backend.h"

namespace spl::kernels {
namespace {

class ReferenceBackend final : public HostBackend {
 public:
  std::string name() const override { return "ref"; }
  std::string description() const override { return "reference: plain loops in double precision, for tests"; }

  absl::StatusOr<std::unique_ptr<LinearWeight>> PackLinear(const WeightView& w) const override {
    return ref::PackLinear(w);
  }

  absl::StatusOr<std::unique_ptr<GroupedWeight>> AdoptGrouped(std::unique_ptr<Buffer> data,
                                                              GroupedWeightView w) const override {
    w.data = data->data();
    return ref::PackGrouped(w);
  }
  absl::Status FillRandom(const KernelContext& ctx, const FillRandomArgs& a) const override {
    return ref::FillRandom(ctx, a);
  }

  absl::Status Linear(const KernelContext& ctx, const LinearArgs& a) const override { return ref::Linear(ctx, a); }
  absl::Status RmsNorm(const KernelContext& ctx, const RmsNormArgs& a) const override { return ref::RmsNorm(ctx, a); }
  absl::Status SiluMul(const KernelContext& ctx, const SiluMulArgs& a) const override { return ref::SiluMul(ctx, a); }
  absl::Status GatherRows(const KernelContext& ctx, const GatherRowsArgs& a) const override {
    return ref::GatherRows(ctx, a);
  }
  absl::Status RopeWriteKv(const KernelContext& ctx, const RopeWriteKvArgs& a) const override {
    return ref::RopeWriteKv(ctx, a);
  }
  absl::Status PrefillAttention(const KernelContext& ctx, const PrefillAttentionArgs& a) const override {
    return ref::PrefillAttention(ctx, a);
  }
  absl::Status DecodeAttention(const KernelContext& ctx, const DecodeAttentionArgs& a) const override {
    return ref::DecodeAttention(ctx, a);
  }
  absl::Status Argmax(const KernelContext& ctx, const ArgmaxArgs& a) const override { return ref::Argmax(ctx, a); }
  absl::Status AlignCopy(const KernelContext& ctx, const AlignCopyArgs& a) const override {
    return ref::AlignCopy(ctx, a);
  }
  absl::Status ColumnScores(const KernelContext& ctx, const ColumnScoresArgs& a) const override {
    return ref::ColumnScores(ctx, a);
  }
  absl::Status ScatterRows(const KernelContext& ctx, const ScatterRowsArgs& a) const override {
    return ref::ScatterRows(ctx, a);
  }
  absl::Status RowNorms(const KernelContext& ctx, const RowNormsArgs& a) const override {
    return ref::RowNorms(ctx, a);
  }
  absl::Status PoolScores(const KernelContext& ctx, const PoolScoresArgs& a) const override {
    return ref::PoolScores(ctx, a);
  }
  absl::Status TopK(const KernelContext& ctx, const TopKArgs& a) const override { return ref::TopK(ctx, a); }
  absl::Status ValueDeviation(const KernelContext& ctx, const ValueDeviationArgs& a) const override {
    return ref::ValueDeviation(ctx, a);
  }
  absl::Status FuseRows(const KernelContext& ctx, const FuseRowsArgs& a) const override {
    return cpu::FuseRows(ctx, a);
  }
  absl::Status ListCandidates(const KernelContext& ctx, const ListCandidatesArgs& a) const override {
    return ref::ListCandidates(ctx, a);
  }
  absl::Status SelectTokens(const KernelContext& ctx, const SelectTokensArgs& a) const override {
    return ref::SelectTokens(ctx, a);
  }
  absl::Status TopTokens(const KernelContext& ctx, const TopTokensArgs& a) const override {
    return ref::TopTokens(ctx, a);
  }
  absl::Status ChooseByQueryWindow(const KernelContext& ctx, const QueryWindowArgs& args) const override {
    return ref::ChooseByQueryWindow(ctx, args);
  }
  absl::Status PageBoundScores(const KernelContext& ctx, const PageBoundScoresArgs& a) const override {
    return ref::PageBoundScores(ctx, a);
  }
  absl::Status SelectLines(const KernelContext& ctx, const SelectLinesArgs& a) const override {
    return ref::SelectLines(ctx, a);
  }
  absl::Status RouteExperts(const KernelContext& ctx, const RouteExpertsArgs& a) const override {
    return ref::RouteExperts(ctx, a);
  }
  absl::Status GroupedLinear(const KernelContext& ctx, const GroupedLinearArgs& a) const override {
    return ref::GroupedLinear(ctx, a);
  }
  absl::Status CombineExperts(const KernelContext& ctx, const CombineExpertsArgs& a) const override {
    return ref::CombineExperts(ctx, a);
  }
};

}  // namespace

std::unique_ptr<Backend> MakeReferenceBackend() { return std::make_unique<ReferenceBackend>(); }

}  // namespace spl::kernels
