// Activations in e4m3 on a device; the contract is quantize_rows.h's.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/quantize/quantize_rows.h"

namespace spl::kernels::cuda {

inline constexpr int kQuantizedRowMax = 32768;  // columns

// Asynchronous on `stream`, launched early (cuda_launch.h). cudaErrorNotSupported: a width or type not served.
cudaError_t QuantizeRows(const QuantizeRowsArgs& args, cudaStream_t stream);

}  // namespace spl::kernels::cuda
