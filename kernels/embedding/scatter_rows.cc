#include "kernels/embedding/scatter_rows.h"

#include <algorithm>

#include "kernels/common/parallel.h"
#include "kernels/common/status.h"

namespace spl::kernels {

absl::Status ValidateScatterRows(const ScatterRowsArgs& a) {
  if (a.num_out_rows < 0 || a.width <= 0 || a.width % 4 != 0)
    return InvalidCall("ScatterRows: ", a.num_out_rows, " rows of ", a.width);
  int64_t last = -1;
  for (const int32_t id : a.ids) {
    if (id <= last || id >= a.num_out_rows)
      return InvalidCall("ScatterRows: row ", id, " after ", last, " of ", a.num_out_rows);
    last = id;
  }
  if (a.num_out_rows > 0 && (a.out == nullptr || a.out == a.rows || (!a.ids.empty() && a.rows == nullptr)))
    return InvalidCall("ScatterRows: null tensor, or out is the input");
  return absl::OkStatus();
}

absl::Status ref::ScatterRows(const KernelContext&, const ScatterRowsArgs& a) {
  if (absl::Status s = ValidateScatterRows(a); !s.ok()) return s;
  for (int64_t i = 0; i < a.num_out_rows * a.width; ++i) a.out[i] = 0;
  for (size_t i = 0; i < a.ids.size(); ++i) {
    for (int64_t c = 0; c < a.width; ++c) a.out[a.ids[i] * a.width + c] = a.rows[static_cast<int64_t>(i) * a.width + c];
  }
  return absl::OkStatus();
}

absl::Status cpu::ScatterRows(const KernelContext& ctx, const ScatterRowsArgs& a) {
  if (absl::Status s = ValidateScatterRows(a); !s.ok()) return s;
  ParallelRows(ctx, a.num_out_rows, (int64_t{64} << 10) / a.width, [&](int64_t begin, int64_t end) {
    auto next = std::lower_bound(a.ids.begin(), a.ids.end(), begin);
    for (int64_t row = begin; row < end; ++row) {
      if (next != a.ids.end() && *next == row) {
        std::copy_n(a.rows + (next - a.ids.begin()) * a.width, a.width, a.out + row * a.width);
        ++next;
      } else {
        std::fill_n(a.out + row * a.width, a.width, 0.0f);
      }
    }
  });
  return absl::OkStatus();
}

}  // namespace spl::kernels
