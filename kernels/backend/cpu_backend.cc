#include <string>

#include "kernels/backend/host_backend.h"
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

  absl::StatusOr<std::unique_ptr<PageSends>> NewPageSends(size_t page_bytes) const override {
    return NewHostPageSends(page_bytes, cpu::SendPages);
  }

  absl::StatusOr<std::unique_ptr<GroupedWeight>> AdoptGrouped(std::unique_ptr<Buffer> data,
                                                              GroupedWeightView w) const override {
    w.data = data->data();
    return cpu::PackGrouped(w, options_.gemm);
  }

#define SPLICE_DEFINE(name, args) \
  absl::Status name(const KernelContext& ctx, const args& a) const override { return cpu::name(ctx, a); }
  SPLICE_OPERATIONS(SPLICE_DEFINE)
#undef SPLICE_DEFINE

 private:
  const CpuBackendOptions options_;
};

}  // namespace

std::unique_ptr<Backend> MakeCpuBackend(const CpuBackendOptions& options) {
  return std::make_unique<CpuBackend>(options);
}

}  // namespace spl::kernels
