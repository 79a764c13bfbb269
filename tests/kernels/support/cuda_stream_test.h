// A stream of their own, and operands in bf16 that are drawn fast, for tests of products on a CUDA device.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "kernels/common/dtype.h"
#include "kernels/cuda/cuda_device_info.h"
#include "tests/kernels/support/cuda_test_util.h"

namespace spl::kernels::testing {

inline constexpr uint16_t kNaNBf16 = 0x7fff;

inline float FromBits(uint16_t x) { return ToFloat(bf16{x}); }

// About normal, in bf16: sums of four uniform numbers, which are drawn much faster.
inline std::vector<uint16_t> FastNormals(uint64_t& state, int64_t count, float scale = 1) {
  std::vector<uint16_t> v(static_cast<size_t>(count));
  for (uint16_t& x : v) {
    uint64_t z = state += 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    const int64_t sum =
        static_cast<int64_t>((z & 0xffff) + (z >> 16 & 0xffff) + (z >> 32 & 0xffff) + (z >> 48)) - 131070;
    x = ToBf16(scale * static_cast<float>(sum) * (1.0f / 37837)).bits;
  }
  return v;
}

// Skips where there is no device: machines without one run the other tests.
class CudaStreamTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!HasGpu()) GTEST_SKIP() << "no CUDA device";
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  void TearDown() override {
    if (stream_ != nullptr) CHECK_CUDA(cudaStreamDestroy(stream_));
  }
  cudaStream_t stream_ = nullptr;
};

// The same for kernels that only Hopper runs.
class HopperStreamTest : public CudaStreamTest {
 protected:
  void SetUp() override {
    CudaStreamTest::SetUp();
    if (IsSkipped()) return;
    int capability = 0, num_sms = 0;
    CHECK_CUDA(cuda::DeviceInfo(&capability, &num_sms));
    if (capability != 90) GTEST_SKIP() << "a device of compute capability " << capability << ", not 90";
  }
};

}  // namespace spl::kernels::testing
