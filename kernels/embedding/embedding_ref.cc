#include <cstring>

#include "kernels/embedding/embedding_validate.h"

namespace spl::kernels::ref {

absl::Status GatherRows(const KernelContext&, const GatherRowsArgs& a) {
  if (absl::Status s = ValidateGatherRows(a); !s.ok()) return s;
  for (size_t i = 0; i < a.ids.size(); ++i) {
    for (int64_t j = 0; j < a.width; ++j) {
      const int64_t at = a.IdOf(i) * a.width + j;
      float* out = a.out + static_cast<int64_t>(i) * a.width + j;
      switch (a.dtype) {
        case DType::kF32:
          *out = static_cast<const float*>(a.table)[at];
          break;
        case DType::kBF16:
          *out = ToFloat(static_cast<const bf16*>(a.table)[at]);
          break;
        case DType::kF16:
          *out = HalfToFloat(static_cast<const uint16_t*>(a.table)[at]);
          break;
        case DType::kE4M3:
        case DType::kInt4:
          break;  // refused above
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace spl::kernels::ref
