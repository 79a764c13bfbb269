#include "kernels/quantize/quantize_rows.h"

#include "kernels/common/status.h"

namespace spl::kernels {

absl::Status ValidateE4M3(const Activations& out, const char* who) {
  if (out.dtype != DType::kE4M3) return absl::OkStatus();
  if (out.scales == nullptr) return InvalidCall(who, ": e4m3 without scales");
  if (out.scale_group != 0 && out.scale_group != kE4M3Group)
    return InvalidCall(who, ": a scale for ", out.scale_group, " columns, not for ", kE4M3Group, " or all");
  return absl::OkStatus();
}

absl::Status ValidateQuantizeRows(const QuantizeRowsArgs& a) {
  if (a.num_rows < 0 || a.width <= 0) return InvalidCall("QuantizeRows: shape [", a.num_rows, ", ", a.width, "]");
  if (a.num_rows == 0) return absl::OkStatus();
  if (a.x.data == nullptr || a.out.data == nullptr) return InvalidCall("QuantizeRows: null tensor");
  if (a.out.dtype != DType::kE4M3 || IsQuantizedType(a.x.dtype)) return InvalidCall("QuantizeRows: not to e4m3");
  if (a.out.data == a.x.data) return InvalidCall("QuantizeRows: out aliases x");
  return ValidateE4M3(a.out, "QuantizeRows");
}

}  // namespace spl::kernels
