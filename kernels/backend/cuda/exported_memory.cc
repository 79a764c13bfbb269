// Handles to device memory, for this process and for other processes of the host.
#include <cuda_runtime_api.h>

#include <array>
#include <cstring>
#include <random>

#include "absl/strings/str_cat.h"
#include "kernels/backend/cuda/cuda_backend.h"
#include "kernels/cuda/cuda_status.h"

namespace spl::kernels::cuda {
namespace {

// The bytes that Export returns: where the memory is (for its own process), and CUDA's handle (for other processes).
struct MemoryHandle {
  uint64_t process[2] = {};
  uint64_t address = 0;
  uint64_t bytes = 0;
  char gpu[16] = {};
  cudaIpcMemHandle_t ipc{};
};

class ImportedBuffer final : public Buffer {
 public:
  ImportedBuffer(void* data, size_t size, bool opened) : data_(data), size_(size), opened_(opened) {}
  ~ImportedBuffer() override {
    if (opened_) (void)cudaIpcCloseMemHandle(data_);
  }
  void* data() const override { return data_; }
  size_t size() const override { return size_; }

 private:
  void* const data_;
  const size_t size_;
  const bool opened_;
};

// Drawn once: process ids are reused and differ between containers.
const std::array<uint64_t, 2>& ThisProcess() {
  static const std::array<uint64_t, 2> id = [] {
    std::random_device random;
    const auto word = [&] { return static_cast<uint64_t>(random()) << 32 | random(); };
    return std::array<uint64_t, 2>{word(), word()};
  }();
  return id;
}

}  // namespace

// Lets this GPU write memory of another one of the process.
absl::Status CudaBackend::EnablePeer(const char (&gpu)[16]) const {
  if (std::memcmp(gpu, properties_.uuid.bytes, sizeof(gpu)) == 0) return absl::OkStatus();
  int count = 0;
  SPLICE_CUDA_RETURN_IF_ERROR(cudaGetDeviceCount(&count), "looking for GPUs");
  for (int peer = 0; peer < count; ++peer) {
    cudaDeviceProp properties{};
    SPLICE_CUDA_RETURN_IF_ERROR(cudaGetDeviceProperties(&properties, peer), "reading a GPU's properties");
    if (std::memcmp(gpu, properties.uuid.bytes, sizeof(gpu)) != 0) continue;
    const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
    if (error == cudaSuccess) return absl::OkStatus();
    (void)cudaGetLastError();
    if (error == cudaErrorPeerAccessAlreadyEnabled) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("cuda: GPU ", device_, " cannot reach GPU ", peer, ": ", cudaGetErrorString(error)));
  }
  return absl::FailedPreconditionError("cuda: the peer's GPU is not of this machine");
}

absl::StatusOr<std::string> CudaBackend::Export(const Buffer& buffer) const {
  SPLICE_CUDA_RETURN_IF_ERROR(cudaSetDevice(device_), "choosing the GPU");
  MemoryHandle handle{.address = reinterpret_cast<uint64_t>(buffer.data()), .bytes = buffer.size()};
  std::memcpy(handle.process, ThisProcess().data(), sizeof(handle.process));
  std::memcpy(handle.gpu, properties_.uuid.bytes, sizeof(handle.gpu));
  SPLICE_CUDA_RETURN_IF_ERROR(cudaIpcGetMemHandle(&handle.ipc, buffer.data()), "exporting device memory");
  return std::string(reinterpret_cast<const char*>(&handle), sizeof(handle));
}

absl::StatusOr<std::unique_ptr<Buffer>> CudaBackend::Import(const std::string& bytes) const {
  MemoryHandle handle;
  if (bytes.size() != sizeof(handle)) return absl::InvalidArgumentError("cuda: not a handle of device memory");
  std::memcpy(&handle, bytes.data(), sizeof(handle));
  SPLICE_CUDA_RETURN_IF_ERROR(cudaSetDevice(device_), "choosing the GPU");
  // CUDA does not open a handle in the process that made it, and need not.
  if (std::memcmp(handle.process, ThisProcess().data(), sizeof(handle.process)) == 0) {
    if (absl::Status s = EnablePeer(handle.gpu); !s.ok()) return s;
    return std::make_unique<ImportedBuffer>(reinterpret_cast<void*>(handle.address), handle.bytes, false);
  }
  void* data = nullptr;
  if (const cudaError_t error = cudaIpcOpenMemHandle(&data, handle.ipc, cudaIpcMemLazyEnablePeerAccess);
      error != cudaSuccess) {
    (void)cudaGetLastError();
    return absl::FailedPreconditionError(
        absl::StrCat("cuda: the peer's device memory cannot be reached from here: ", cudaGetErrorString(error)));
  }
  return std::make_unique<ImportedBuffer>(data, handle.bytes, true);
}

}  // namespace spl::kernels::cuda
