// What tests of CUDA launchers share: memory on the device, and the end of a program whose device failed.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <utility>
#include <vector>

#define CHECK_CUDA(expr)                                                                 \
  do {                                                                                   \
    const cudaError_t check_cuda_e = (expr);                                             \
    if (check_cuda_e != cudaSuccess) {                                                   \
      ADD_FAILURE() << #expr << ": " << cudaGetErrorString(check_cuda_e);                \
      std::abort(); /* a device error is sticky: nothing after it would mean anything */ \
    }                                                                                    \
  } while (false)

namespace spl::kernels::testing {

inline bool HasGpu() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

// Elements of T on the device. Owns them.
template <typename T>
class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t n) : n_(n) { CHECK_CUDA(cudaMalloc(&p_, std::max<size_t>(n, 1) * sizeof(T))); }
  explicit DeviceBuffer(const std::vector<T>& v) : DeviceBuffer(v.size()) { Write(v); }
  DeviceBuffer(DeviceBuffer&& other) noexcept : p_(std::exchange(other.p_, nullptr)), n_(other.n_) {}
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  ~DeviceBuffer() { (void)cudaFree(p_); }
  T* get() const { return static_cast<T*>(p_); }
  size_t size() const { return n_; }
  void Fill(int byte) { CHECK_CUDA(cudaMemset(p_, byte, n_ * sizeof(T))); }
  // cudaMemcpy from pageable memory may return before the bytes are there, and a test's stream does not wait for it.
  void Write(const std::vector<T>& v) {
    CHECK_CUDA(cudaMemcpy(p_, v.data(), n_ * sizeof(T), cudaMemcpyHostToDevice));
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  std::vector<T> Read() const {
    std::vector<T> v(n_);
    CHECK_CUDA(cudaMemcpy(v.data(), p_, n_ * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
  }

 private:
  void* p_ = nullptr;
  size_t n_;
};

}  // namespace spl::kernels::testing
