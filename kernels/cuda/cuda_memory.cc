#include "kernels/cuda/cuda_memory.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "absl/strings/str_format.h"
#include "kernels/cuda/cuda_status.h"

namespace spl::kernels::cuda {
namespace {

class DeviceBuffer final : public Buffer {
 public:
  DeviceBuffer(void* data, size_t size) : data_(data), size_(size) {}
  ~DeviceBuffer() override { (void)cudaFree(data_); }
  void* data() const override { return data_; }
  size_t size() const override { return size_; }

 private:
  void* const data_;
  const size_t size_;
};

class PinnedBuffer final : public Buffer {
 public:
  PinnedBuffer(void* data, size_t size) : data_(data), size_(size) {}
  ~PinnedBuffer() override { (void)cudaFreeHost(data_); }
  void* data() const override { return data_; }
  size_t size() const override { return size_; }

 private:
  void* const data_;
  const size_t size_;
};

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

}  // namespace

absl::StatusOr<std::unique_ptr<Buffer>> AllocateDevice(size_t bytes) {
  void* data = nullptr;
  const size_t size = bytes == 0 ? 256 : bytes;
  if (const cudaError_t error = cudaMalloc(&data, size); error != cudaSuccess) {
    (void)cudaGetLastError();
    if (error != cudaErrorMemoryAllocation) return ToStatus(error, "cudaMalloc");
    size_t free_bytes = 0, total = 0;
    (void)cudaMemGetInfo(&free_bytes, &total);
    return absl::ResourceExhaustedError(absl::StrFormat(
        "cuda: %.2f GiB of device memory asked for, %.2f of %.2f GiB are free (%.2f GiB are missing); lower "
        "--kv-bytes, "
        "--slice-tokens or --max-sequences, or choose another GPU",
        static_cast<double>(size) / kGiB, static_cast<double>(free_bytes) / kGiB, static_cast<double>(total) / kGiB,
        static_cast<double>(size - std::min(size, free_bytes)) / kGiB));
  }
  auto buffer = std::make_unique<DeviceBuffer>(data, bytes);
  SPLICE_CUDA_RETURN_IF_ERROR(cudaMemset(data, 0, size), "cudaMemset");
  SPLICE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(nullptr), "zeroing new memory");
  return buffer;
}

absl::StatusOr<std::unique_ptr<Buffer>> AllocatePinned(size_t bytes) {
  void* data = nullptr;
  SPLICE_CUDA_RETURN_IF_ERROR(
      cudaHostAlloc(&data, bytes == 0 ? 64 : bytes, cudaHostAllocPortable),
      absl::StrFormat("page-locking %.2f GiB of host memory", static_cast<double>(bytes) / kGiB));
  return std::make_unique<PinnedBuffer>(data, bytes);
}

}  // namespace spl::kernels::cuda
