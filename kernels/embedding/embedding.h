// Row lookups: token embedding and row gather.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "kernels/common/dtype.h"
#include "kernels/common/kernel_context.h"

namespace spl::kernels {

// out[i] = table[ids[i]], widened to f32. InvalidArgument: an id outside [0, num_table_rows).
struct GatherRowsArgs {
  const void* table = nullptr;  // [num_table_rows, width], row-major
  DType dtype = DType::kF32;
  int64_t num_table_rows = 0;
  int64_t width = 0;
  std::span<const int32_t> ids;  // [num_rows]
  float* out = nullptr;          // [num_rows, width]; not table
};

namespace ref {
absl::Status GatherRows(const KernelContext& ctx, const GatherRowsArgs& args);
}
namespace cpu {
absl::Status GatherRows(const KernelContext& ctx, const GatherRowsArgs& args);
}

}  // namespace spl::kernels
