#include "kernels/gemm/linear_add.h"

#include "kernels/common/parallel.h"
#include "kernels/common/status.h"
#include "kernels/gemm/gemm_validate.h"

namespace spl::kernels {

absl::Status ValidateLinearAdd(const LinearAddArgs& a) {
  if (absl::Status s = ValidateLinear(a.Product()); !s.ok()) return s;
  if (a.num_rows > 0 && a.y == nullptr) return InvalidCall("LinearAdd: null tensor");
  if (a.num_rows > 0 && (a.y == a.product || a.y == a.x.data)) return InvalidCall("LinearAdd: y aliases x or product");
  return absl::OkStatus();
}

absl::Status ref::LinearAdd(const KernelContext& ctx, const LinearAddArgs& a) {
  if (absl::Status s = ValidateLinearAdd(a); !s.ok()) return s;
  if (absl::Status s = Linear(ctx, a.Product()); !s.ok()) return s;
  for (int64_t i = 0; i < a.num_rows * a.weight->out_features(); ++i) a.y[i] += a.product[i];
  return absl::OkStatus();
}

absl::Status cpu::LinearAdd(const KernelContext& ctx, const LinearAddArgs& a) {
  if (absl::Status s = ValidateLinearAdd(a); !s.ok()) return s;
  if (absl::Status s = Linear(ctx, a.Product()); !s.ok()) return s;
  const int64_t width = a.weight->out_features();
  // 32 Ki elements are about 10 us of streaming.
  ParallelRows(ctx, a.num_rows, (int64_t{32} << 10) / width, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * width; i < end * width; ++i) a.y[i] += a.product[i];
  });
  return absl::OkStatus();
}

}  // namespace spl::kernels
