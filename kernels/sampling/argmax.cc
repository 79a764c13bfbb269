#include "kernels/sampling/argmax.h"

#include <limits>

#include "kernels/common/parallel.h"
#include "kernels/common/status.h"

namespace spl::kernels {
namespace {

void ArgmaxRow(const ArgmaxArgs& a, int64_t i) {
  const float* row = a.logits + i * a.width;
  float best = -std::numeric_limits<float>::infinity();
  int64_t at = 0;
  bool found = false;
  for (int64_t j = 0; j < a.width; ++j) {
    if (row[j] > best || (!found && row[j] == best)) {
      best = row[j];
      at = j;
      found = true;
    }
  }
  a.out[i] = static_cast<int32_t>(at);
  if (a.values != nullptr) a.values[i] = row[at];
}

}  // namespace

absl::Status ValidateArgmax(const ArgmaxArgs& a) {
  if (a.num_rows < 0 || a.width <= 0 || a.width > std::numeric_limits<int32_t>::max())
    return InvalidCall("Argmax: shape [", a.num_rows, ", ", a.width, "]");
  if (a.num_rows > 0 && (a.logits == nullptr || a.out == nullptr)) return InvalidCall("Argmax: null tensor");
  return absl::OkStatus();
}

absl::Status ref::Argmax(const KernelContext&, const ArgmaxArgs& a) {
  if (absl::Status s = ValidateArgmax(a); !s.ok()) return s;
  for (int64_t i = 0; i < a.num_rows; ++i) ArgmaxRow(a, i);
  return absl::OkStatus();
}

absl::Status cpu::Argmax(const KernelContext& ctx, const ArgmaxArgs& a) {
  if (absl::Status s = ValidateArgmax(a); !s.ok()) return s;
  ParallelRows(ctx, a.num_rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) ArgmaxRow(a, i);
  });
  return absl::OkStatus();
}

}  // namespace spl::kernels
