// What every kernel test needs: a seed that is printed, the tolerance check, the instruction sets of this machine.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/common/cpu_features.h"
#include "kernels/common/dtype.h"
#include "kernels/common/kernel_context.h"
#include "kernels/common/tolerance.h"

namespace spl::kernels::testing {

// SPLICE_TEST_SEED repeats a failure; otherwise each run tries other numbers.
inline uint64_t Seed() {
  static const uint64_t seed = [] {
    const char* fixed = std::getenv("SPLICE_TEST_SEED");
    const uint64_t s = fixed != nullptr ? std::strtoull(fixed, nullptr, 10) : std::random_device{}();
    std::cout << "SPLICE_TEST_SEED=" << s << std::endl;
    return s;
  }();
  return seed;
}

class Random {
 public:
  explicit Random(uint64_t stream) : engine_(Seed() * 1000003 + stream) {}

  float Normal() { return normal_(engine_); }
  int32_t Int(int32_t low, int32_t high) { return std::uniform_int_distribution<int32_t>(low, high)(engine_); }
  std::vector<float> Normals(size_t n) {
    std::vector<float> v(n);
    for (float& x : v) x = Normal();
    return v;
  }
  std::mt19937_64& engine() { return engine_; }

 private:
  std::mt19937_64 engine_;
  std::normal_distribution<float> normal_;
};

inline void ExpectOk(const absl::Status& status) { EXPECT_TRUE(status.ok()) << status; }

// Values as memory of this type holds them, bf16 rounded.
inline std::vector<std::byte> Encode(std::span<const float> values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * DTypeBytes(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::kF32) {
      std::memcpy(&bytes[4 * i], &values[i], 4);
    } else {
      const bf16 x = ToBf16(values[i]);
      std::memcpy(&bytes[2 * i], &x, 2);
    }
  }
  return bytes;
}

// The instruction sets of this machine that have a variant of their own in every operation.
inline std::vector<CpuIsa> MachineIsas() {
  std::vector<CpuIsa> isas;
  for (CpuIsa isa : {CpuIsa::kPortable, CpuIsa::kAvx2, CpuIsa::kAvx512}) {
    if (isa <= DetectCpuIsa()) isas.push_back(isa);
  }
  return isas;
}

// Those that multiply bf16.
inline std::vector<CpuIsa> MachineBf16Isas() {
  std::vector<CpuIsa> isas;
  for (CpuIsa isa : {CpuIsa::kAvx512Bf16, CpuIsa::kAmx}) {
    if (isa <= DetectCpuIsa()) isas.push_back(isa);
  }
  return isas;
}

inline std::string IsaParam(const ::testing::TestParamInfo<CpuIsa>& info) {
  return std::string(CpuIsaName(info.param));
}

// A pool and a context over it.
struct TestContext {
  explicit TestContext(CpuIsa isa, int threads = 2) : pool(threads) {
    ctx.pool = &pool;
    ctx.isa = isa;
  }
  ThreadPool pool;
  KernelContext ctx;
};

// `got` is close to `want`, relative to `sizes` [want]: the size of each value when what it is summed of does not
// cancel.
inline void ExpectClose(std::span<const float> got, std::span<const float> want, std::span<const float> sizes,
                        DType dtype, const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  ASSERT_EQ(sizes.size(), want.size()) << what;
  double error = 0, norm = 0, worst = 0, largest = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::isinf(want[i])) {
      ASSERT_EQ(got[i], want[i]) << what << " at " << i;
      continue;
    }
    ASSERT_TRUE(std::isfinite(got[i])) << what << " at " << i << ": " << got[i] << ", want " << want[i];
    const double d = static_cast<double>(got[i]) - want[i];
    error += d * d;
    norm += static_cast<double>(sizes[i]) * sizes[i];
    worst = std::max(worst, std::abs(d));
    largest = std::max(largest, std::abs(static_cast<double>(sizes[i])));
  }
  const Tolerance t = ToleranceFor(dtype);
  EXPECT_LE(std::sqrt(error), t.relative_l2 * std::sqrt(norm)) << what;
  EXPECT_LE(worst, t.max_abs_of_max_ref * largest) << what;
}
inline void ExpectClose(std::span<const float> got, std::span<const float> want, DType dtype, const std::string& what) {
  ExpectClose(got, want, want, dtype, what);
}

inline ::testing::AssertionResult BitwiseEqual(std::span<const float> a, std::span<const float> b) {
  if (a.size() != b.size()) return ::testing::AssertionFailure() << a.size() << " against " << b.size() << " values";
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::memcmp(&a[i], &b[i], sizeof(float)) != 0) {
      return ::testing::AssertionFailure() << "at " << i << ": " << a[i] << " against " << b[i];
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace spl::kernels::testing
