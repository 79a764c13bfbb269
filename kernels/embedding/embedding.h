// Row lookups: token embedding and row gather.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "kernels/common/activations.h"
#include "kernels/common/dtype.h"
#include "kernels/common/kernel_context.h"

namespace spl::kernels {

// out[i] = table[ids[i]], converted to the type of out (f32 on CPU). InvalidArgument: an id outside [0,
// num_table_rows).
struct GatherRowsArgs {
  const void* table = nullptr;  // [num_table_rows, width], row-major
  DType dtype = DType::kF32;
  int64_t num_table_rows = 0;
  int64_t width = 0;
  std::span<const int32_t> ids;       // [num_rows]
  Activations out;                    // [num_rows, width]; not table
  bool ids_are_batch_tokens = false;  // ids are the tokens of the batch staged on the context's session
};

namespace ref {
absl::Status GatherRows(const KernelContext& ctx, const GatherRowsArgs& args);
}
namespace cpu {
absl::Status GatherRows(const KernelContext& ctx, const GatherRowsArgs& args);
}

}  // namespace spl::kernels
