// Products of the shapes of an 8B model on a CUDA device, for every kind of weight and numbers of rows on both sides of
// where another kernel is chosen: against sums in double, and bit by bit against themselves while launches follow each
// other closely. Tests of single kernels have odd shapes that are small; blocks that have many tiles in turn, long rows
// and busy memory are here. Skips without a CUDA device.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "kernels/backend/backend.h"
#include "kernels/backend/cuda/cuda_plugin.h"
#include "kernels/common/e4m3.h"
#include "tests/kernels/support/kernel_test_util.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

constexpr int64_t kHidden = 4096, kWidth = 14336, kQkv = 6144;
constexpr int64_t kRows[] = {1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 100, 128, 129, 200, 256, 300, 512, 640, 1000};
constexpr int64_t kMostRows = 1000;

struct Kind {
  std::string name;
  DType dtype;
  int64_t scale_group;
};

// Codes and scales on the host.
struct HostWeight {
  int64_t out, in, group;
  DType dtype;
  std::vector<uint8_t> data, zeros;
  std::vector<float> scales;

  HostWeight(Random& random, const Kind& kind, int64_t out, int64_t in)
      : out(out), in(in), group(kind.scale_group), dtype(kind.dtype) {
    const size_t bytes = dtype == DType::kBF16 ? 2 * out * in : dtype == DType::kInt4 ? out * in / 2 : out * in;
    data.resize(bytes);
    if (dtype == DType::kBF16) {
      for (size_t i = 0; i < bytes; i += 2) {  // from 2^-7 to 2^-5, of both signs
        const auto draw = static_cast<uint16_t>(random.engine()());
        const uint16_t bits = (draw & 0x80ff) | 0x3c00;
        std::memcpy(&data[i], &bits, 2);
      }
      return;
    }
    for (size_t i = 0; i < bytes; i += 8) {
      const uint64_t draw = random.engine()();
      std::memcpy(&data[i], &draw, 8);
    }
    if (dtype == DType::kE4M3) {
      for (uint8_t& code : data) code = IsE4M3Nan(code) ? 0 : code;
    }
    const int64_t groups = group == 0 ? 1 : in / group;
    for (int64_t i = 0; i < out * groups; ++i) {
      scales.push_back(0.001f * (1 + static_cast<float>(random.engine()() % 1000) / 1000));
      if (dtype == DType::kInt4) zeros.push_back(static_cast<uint8_t>(random.engine()() % 17));
    }
  }
  WeightView View() const {
    return {.data = data.data(),
            .dtype = dtype,
            .out_features = out,
            .in_features = in,
            .scales = scales.empty() ? nullptr : scales.data(),
            .scale_group = group,
            .zeros = zeros.empty() ? nullptr : zeros.data()};
  }
  double At(int64_t feature, int64_t column) const {
    const int64_t at = feature * in + column, of_group = group == 0 ? feature : feature * (in / group) + column / group;
    switch (dtype) {
      case DType::kBF16: {
        bf16 value;
        std::memcpy(&value, &data[2 * at], 2);
        return ToFloat(value);
      }
      case DType::kE4M3:
        return double{E4M3ToFloat(data[at])} * scales[of_group];
      default: {
        const int code = at % 2 == 0 ? data[at / 2] % 16 : data[at / 2] / 16;
        return (code - int{zeros[of_group]}) * double{scales[of_group]};
      }
    }
  }
};

class CudaModelShapes : public ::testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    auto cuda = MakeCudaBackend();
    if (!cuda.ok()) GTEST_SKIP() << cuda.status();
    cuda_ = *std::move(cuda);
    session_ =
        cuda_->NewSession({.max_rows = kMostRows, .max_sequences = 1, .num_layers = 1, .num_kv_heads = 1}).value();
  }
  std::unique_ptr<Buffer> Upload(const std::vector<std::byte>& bytes) {
    auto buffer = cuda_->Allocate(bytes.size()).value();
    ExpectOk(cuda_->Copy(CopyKind::kUpload, buffer->data(), bytes.data(), bytes.size()));
    return buffer;
  }
  // Rows of x that are exact in bf16.
  std::vector<float> Rows(int64_t in) {
    std::vector<float> x(kMostRows * in);
    for (float& value : x) value = static_cast<float>(static_cast<int>(random_.engine()() % 257) - 128) / 64;
    return x;
  }
  // Runs `run` into each of `to`, one launch close behind the other, and returns what they are, if they are the same.
  template <typename T, typename Run>
  std::vector<T> SameThrice(const std::vector<std::unique_ptr<Buffer>>& to, size_t count, const std::string& what,
                            const Run& run) {
    for (const auto& y : to) ExpectOk(run(*y));
    ExpectOk(session_->Synchronize());
    std::vector<std::vector<T>> values(to.size(), std::vector<T>(count));
    for (size_t i = 0; i < to.size(); ++i)
      ExpectOk(cuda_->Copy(CopyKind::kDownload, values[i].data(), to[i]->data(), count * sizeof(T)));
    for (size_t i = 1; i < to.size(); ++i) {
      EXPECT_EQ(std::memcmp(values[i].data(), values[0].data(), count * sizeof(T)), 0) << what << ", launch " << i;
    }
    return values[0];
  }
  std::vector<std::unique_ptr<Buffer>> Three(size_t bytes) {
    std::vector<std::unique_ptr<Buffer>> buffers;
    for (int i = 0; i < 3; ++i) buffers.push_back(cuda_->Allocate(bytes).value());
    return buffers;
  }

  // Samples of `times` the product of x and the weight. Sums in f32 in any order stay far below the worst case of `in`
  // roundings; tensor cores truncate, about two.
  void ExpectSums(const HostWeight& host, const std::vector<float>& x, int64_t rows, int times,
                  const std::vector<float>& got, const std::string& what) {
    const double most = 4 + 2 * std::sqrt(static_cast<double>(host.in));
    for (int sample = 0; sample < 128; ++sample) {
      const auto row = static_cast<int64_t>(random_.engine()() % rows),
                 feature = static_cast<int64_t>(random_.engine()() % host.out);
      double sum = 0, size = 0;
      for (int64_t k = 0; k < host.in; ++k) {
        const double term = double{x[row * host.in + k]} * host.At(feature, k);
        sum += term;
        size += std::abs(term);
      }
      EXPECT_LT(std::abs(got[row * host.out + feature] - times * sum), times * most * size * 0x1p-24)
          << what << ", row " << row << ", feature " << feature;
    }
  }

  Random random_{95};
  std::unique_ptr<Backend> cuda_;
  std::unique_ptr<Session> session_;
};

TEST_P(CudaModelShapes, Linear) {
  for (const auto& [out, in] :
       {std::pair{kQkv, kHidden}, {kHidden, kHidden}, {2 * kWidth, kHidden}, {kHidden, kWidth}}) {
    const HostWeight host(random_, GetParam(), out, in);
    const auto weight = cuda_->PackLinear(host.View()).value();
    const std::vector<float> x = Rows(in);
    const auto x_device = Upload(Encode(x, DType::kBF16));
    const auto y = Three(static_cast<size_t>(kMostRows * out) * sizeof(float));
    const auto scratch = cuda_->Allocate(static_cast<size_t>(kMostRows * out) * sizeof(float)).value();
    for (const int64_t rows : kRows) {
      const std::string what = std::to_string(rows) + " rows of " + std::to_string(out) + " x " + std::to_string(in);
      const std::vector<float> got = SameThrice<float>(y, rows * out, what, [&](Buffer& to) {
        return cuda_->Linear(session_->context(), {.x = ConstActivations(x_device->data(), DType::kBF16),
                                                   .weight = weight.get(),
                                                   .y = static_cast<float*>(to.data()),
                                                   .num_rows = rows});
      });
      ExpectSums(host, x, rows, 1, got, what);
      if (GetParam().dtype != DType::kBF16) continue;
      // The same product on top of it.
      ExpectSums(host, x, rows, 2,
                 SameThrice<float>(y, rows * out, what + ", added",
                                   [&](Buffer& to) {
                                     return cuda_->LinearAdd(session_->context(),
                                                             {.x = ConstActivations(x_device->data(), DType::kBF16),
                                                              .weight = weight.get(),
                                                              .y = static_cast<float*>(to.data()),
                                                              .product = static_cast<float*>(scratch->data()),
                                                              .num_rows = rows});
                                   }),
                 what + ", added");
    }
  }
}

TEST_P(CudaModelShapes, LinearSiluMul) {
  const HostWeight host(random_, GetParam(), 2 * kWidth, kHidden);
  const auto weight = cuda_->PackLinear(host.View()).value();
  const std::vector<float> x = Rows(kHidden);
  const auto x_device = Upload(Encode(x, DType::kBF16));
  const auto both = cuda_->Allocate(static_cast<size_t>(kMostRows * 2 * kWidth) * sizeof(float)).value();
  const auto out = Three(static_cast<size_t>(kMostRows * kWidth) * sizeof(bf16));
  for (const int64_t rows : kRows) {
    const std::string what = std::to_string(rows) + " rows";
    const std::vector<bf16> got = SameThrice<bf16>(out, rows * kWidth, what, [&](Buffer& to) {
      return cuda_->LinearSiluMul(session_->context(), {.x = ConstActivations(x_device->data(), DType::kBF16),
                                                        .weight = weight.get(),
                                                        .gate_up = static_cast<float*>(both->data()),
                                                        .out = Activations(to.data(), DType::kBF16),
                                                        .num_rows = rows});
    });
    for (int sample = 0; sample < 128; ++sample) {
      const auto row = static_cast<int64_t>(random_.engine()() % rows),
                 feature = static_cast<int64_t>(random_.engine()() % kWidth);
      double gate = 0, up = 0;
      for (int64_t k = 0; k < kHidden; ++k) {
        gate += double{x[row * kHidden + k]} * host.At(feature, k);
        up += double{x[row * kHidden + k]} * host.At(kWidth + feature, k);
      }
      const double want = gate / (1 + std::exp(-gate)) * up;
      // The sums may have been rounded to bf16, and the result is.
      EXPECT_NEAR(ToFloat(got[row * kWidth + feature]), want, 0x1p-6 * std::abs(want) + 1e-3)
          << what << ", row " << row << ", feature " << feature;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Weights, CudaModelShapes,
                         ::testing::Values(Kind{"bf16", DType::kBF16, 0}, Kind{"fp8", DType::kE4M3, 0},
                                           Kind{"fp8_groups", DType::kE4M3, 128}, Kind{"int4", DType::kInt4, 128}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace spl::kernels
