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
  // Tokens of the batch before, memory of the backend: an id below 0 stands for last_tokens[-1 - id], which is read
  // when the operation runs. Null: no id is below 0. With ids_are_batch_tokens only.
  const int32_t* last_tokens = nullptr;

  int32_t IdOf(size_t row) const { return ids[row] < 0 ? last_tokens[-1 - ids[row]] : ids[row]; }  // host memory
};

namespace ref {
absl::Status GatherRows(const KernelContext& ctx, const GatherRowsArgs& args);
}
namespace cpu {
absl::Status GatherRows(const KernelContext& ctx, const GatherRowsArgs& args);
}

}  // namespace spl::kernels
