#include "kernels/backend/cuda/page_checksummer.h"

#include <algorithm>
#include <bit>

#include "kernels/backend/cuda/staged_batch.h"
#include "kernels/cuda/cuda_memory.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/kv_copy/crc32c_cuda.h"

namespace spl::kernels::cuda {

PageChecksummer::~PageChecksummer() {
  if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
}

absl::Status PageChecksummer::Init() {
  SPLICE_CUDA_RETURN_IF_ERROR(cudaSetDevice(device_), "choosing the GPU");
  // Checksums are short and waited for: they go ahead of a prompt's products that were launched before them.
  int lowest = 0, highest = 0;
  SPLICE_CUDA_RETURN_IF_ERROR(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "creating a stream");
  return ToStatus(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, highest), "creating a stream");
}

absl::Status PageChecksummer::Run(const KvPoolView& pool, std::span<const int32_t> pages, uint32_t* out) {
  if (pages.empty()) return absl::OkStatus();
  std::lock_guard lock(mutex_);
  SPLICE_CUDA_RETURN_IF_ERROR(cudaSetDevice(device_), "choosing the GPU");
  const size_t bytes = pages.size() * sizeof(int32_t);
  if (memory_ == nullptr || memory_->size() < 2 * bytes) {
    memory_.reset();
    auto memory = AllocateDevice(std::bit_ceil(2 * bytes));
    if (!memory.ok()) return memory.status();
    auto host = AllocatePinned((*memory)->size());  // copies from and to other memory would hold the thread up
    if (!host.ok()) return host.status();
    memory_ = *std::move(memory);
    host_memory_ = *std::move(host);
  }
  auto* device_pages = static_cast<int32_t*>(memory_->data());
  auto* device_out = reinterpret_cast<uint32_t*>(device_pages + pages.size());
  auto* host_pages = static_cast<int32_t*>(host_memory_->data());
  auto* host_out = reinterpret_cast<uint32_t*>(host_pages + pages.size());
  for (size_t i = 0; i < pages.size(); ++i) host_pages[i] = pages[i] - pool.first_page;
  SPLICE_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(device_pages, host_pages, bytes, cudaMemcpyHostToDevice, stream_),
                              "page checksums");
  SPLICE_CUDA_RETURN_IF_ERROR(
      cuda::PageChecksums(DevicePool(pool), device_pages, static_cast<int64_t>(pages.size()), device_out, stream_),
      "page checksums");
  SPLICE_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(host_out, device_out, bytes, cudaMemcpyDeviceToHost, stream_),
                              "page checksums");
  SPLICE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream_), "page checksums");
  std::copy(host_out, host_out + pages.size(), out);
  return absl::OkStatus();
}

}  // namespace spl::kernels::cuda
