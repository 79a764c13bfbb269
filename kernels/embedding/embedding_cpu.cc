#include "kernels/common/parallel.h"
#include "kernels/embedding/embedding_isa.h"
#include "kernels/embedding/embedding_validate.h"

namespace spl::kernels::cpu {

absl::Status GatherRows(const KernelContext& ctx, const GatherRowsArgs& a) {
  if (absl::Status s = ValidateGatherRows(a); !s.ok()) return s;
  const EmbeddingKernels& kernels = EmbeddingKernelsFor(ctx.isa);
  ParallelRows(ctx, static_cast<int64_t>(a.ids.size()), (int64_t{64} << 10) / a.width, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      kernels.widen_row(a.table, a.dtype, a.IdOf(static_cast<size_t>(i)) * a.width, a.out + i * a.width, a.width);
    }
  });
  return absl::OkStatus();
}

}  // namespace spl::kernels::cpu
