#include "kernels/fill/fill.h"

#include <string>

#include "kernels/common/status.h"

namespace spl::kernels {

absl::Status ValidateFillRandom(const FillRandomArgs& a) {
  if (a.count < 0 || a.first_index < 0) {
    return InvalidCall("FillRandom: ", a.count, " elements from index ", a.first_index);
  }
  if (a.row_length < 0 || a.row_stride < a.row_length) {
    return InvalidCall("FillRandom: rows of ", a.row_length, " elements, ", a.row_stride, " apart");
  }
  if (a.step_exponent < -16 || a.step_exponent > 0) {
    return InvalidCall("FillRandom: step_exponent ", a.step_exponent, " is outside [-16, 0]");
  }
  if (IsQuantizedType(a.dtype)) return InvalidCall("FillRandom: ", std::string(DTypeName(a.dtype)), " has no fill");
  if (a.count > 0 && a.out == nullptr) return InvalidCall("FillRandom: null tensor");
  return absl::OkStatus();
}

}  // namespace spl::kernels
