#include "kernels/backend/host_backend.h"

namespace spl::kernels {
namespace {

class ReferenceBackend final : public HostBackend {
 public:
  std::string name() const override { return "ref"; }
  std::string description() const override { return "reference: plain loops in double precision, for tests"; }

  absl::StatusOr<std::unique_ptr<LinearWeight>> PackLinear(const WeightView& w) const override {
    return ref::PackLinear(w);
  }

  absl::StatusOr<std::unique_ptr<PageSends>> NewPageSends(size_t page_bytes) const override {
    return NewHostPageSends(page_bytes, ref::SendPages);
  }

  absl::StatusOr<std::unique_ptr<GroupedWeight>> AdoptGrouped(std::unique_ptr<Buffer> data,
                                                              GroupedWeightView w) const override {
    w.data = data->data();
    return ref::PackGrouped(w);
  }

#define SPLICE_DEFINE(name, args) \
  absl::Status name(const KernelContext& ctx, const args& a) const override { return ref::name(ctx, a); }
  SPLICE_OPERATIONS(SPLICE_DEFINE)
#undef SPLICE_DEFINE
};

}  // namespace

std::unique_ptr<Backend> MakeReferenceBackend() { return std::make_unique<ReferenceBackend>(); }

}  // namespace spl::kernels
