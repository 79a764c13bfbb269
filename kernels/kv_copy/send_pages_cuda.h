// SendPages on a GPU, for any number of pages in one launch; see PageSends.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/kv_copy/send_pages.h"

namespace spl::kernels::cuda {

// `pages` and `crcs`: [count], and `late`: one number; memory that the device reads and writes (its own, or page-locked
// host memory) until the launch has run. Pages lie at multiples of 16. `deadline`: nanoseconds of ReadClock; a page is
// not begun from then on, and *late becomes 1. Asynchronous on `stream`. cudaErrorNotSupported: a page size that is no
// multiple of 16.
//
// `within_device`: the targets are memory of the device that runs this, too.
//
// Cost: reads and writes each page once, at 1.56 TB/s within an H200; a bare copy without checksums makes 2.1
// (docs/results/2026-11-28-kv-push.md).
cudaError_t SendPages(const PageSend* pages, int64_t count, size_t page_bytes, bool within_device, uint32_t* crcs,
                      uint32_t* late, uint64_t deadline, cudaStream_t stream);

// Writes the device's clock to *now: nanoseconds from some moment on, at the rate of the host's clocks.
cudaError_t ReadClock(uint64_t* now, cudaStream_t stream);

}  // namespace spl::kernels::cuda
