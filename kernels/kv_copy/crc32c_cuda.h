// CRC32C of pages on a device; see Backend::PageChecksums.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/kv_pool.h"

namespace spl::kernels::cuda {

// Asynchronous on `stream`; pages and out [num_pages] are device memory. Reads each page once. cudaErrorNotSupported: a
// page size that is no multiple of 4 KiB.
cudaError_t PageChecksums(const KvPoolView& pool, const int32_t* pages, int64_t num_pages, uint32_t* out,
                          cudaStream_t stream);

}  // namespace spl::kernels::cuda
