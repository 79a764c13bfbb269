// Checksums of a pool's pages, taken on the GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <span>

#include "absl/status/status.h"
#include "kernels/common/buffer.h"
#include "kernels/common/kv_pool.h"

namespace spl::kernels::cuda {

// Threads: any.
class PageChecksummer {
 public:
  explicit PageChecksummer(int device) : device_(device) {}
  ~PageChecksummer();
  absl::Status Init();

  // Implements Backend::PageChecksums.
  absl::Status Run(const KvPoolView& pool, std::span<const int32_t> pages, uint32_t* out);

 private:
  const int device_;
  std::mutex mutex_;  // guards all below
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<Buffer> memory_, host_memory_;  // page ids, then results
};

}  // namespace spl::kernels::cuda
