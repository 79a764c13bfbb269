// Rows in e4m3 on a GPU: the codes of the operations that write them, and products of codes with codes. Skipped where
// there is no GPU of the Hopper generation.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/backend/backend.h"
#include "kernels/backend/cuda/cuda_plugin.h"
#include "kernels/common/e4m3.h"
#include "tests/kernels/cuda/floats.h"
#include "tests/kernels/support/kernel_test_util.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

class CudaE4M3Rows : public ::testing::Test {
 protected:
  void SetUp() override {
    auto cuda = MakeCudaBackend();
    if (!cuda.ok()) GTEST_SKIP() << cuda.status();
    cuda_ = *std::move(cuda);
    session_ = cuda_->NewSession({.max_rows = 4096, .max_sequences = 1, .num_layers = 1, .num_kv_heads = 1}).value();
  }
  std::unique_ptr<Buffer> Upload(const void* data, size_t bytes) {
    auto buffer = cuda_->Allocate(bytes).value();
    EXPECT_TRUE(cuda_->Copy(CopyKind::kUpload, buffer->data(), data, bytes).ok());
    return buffer;
  }
  // `values` become what the device has of them.
  std::unique_ptr<Buffer> Upload(std::vector<float>& values, DType dtype) {
    const std::vector<std::byte> bytes = Encode(values, dtype);
    values = ToFloats(bytes, dtype);
    return Upload(bytes.data(), bytes.size());
  }
  template <typename T>
  std::vector<T> Download(const Buffer& buffer, size_t count) {
    std::vector<T> values(count);
    EXPECT_TRUE(session_->Synchronize().ok());
    EXPECT_TRUE(cuda_->Copy(CopyKind::kDownload, values.data(), buffer.data(), count * sizeof(T)).ok());
    return values;
  }

  struct DeviceRows {
    std::unique_ptr<Buffer> codes, scales;
    int64_t num_rows, width, group;
    Activations act() const { return {codes->data(), DType::kE4M3, static_cast<float*>(scales->data()), group}; }
    size_t num_scales() const {
      return static_cast<size_t>(group == 0 ? num_rows : (width + group - 1) / group * E4M3Rows(num_rows));
    }
  };
  DeviceRows EmptyRows(int64_t num_rows, int64_t width, int64_t group) {
    DeviceRows rows{nullptr, nullptr, num_rows, width, group};
    const std::vector<uint8_t> poison(static_cast<size_t>(E4M3Rows(num_rows) * width), 0x55);
    const std::vector<float> bad(rows.num_scales(), -7.0f);
    rows.codes = Upload(poison.data(), poison.size());
    rows.scales = Upload(bad.data(), bad.size() * sizeof(float));
    return rows;
  }
  // Codes in the order of the columns (fp8_gemm_cuda.h).
  std::vector<uint8_t> Codes(const DeviceRows& rows) {
    const auto raw = Download<uint8_t>(*rows.codes, static_cast<size_t>(rows.num_rows * rows.width));
    std::vector<uint8_t> codes(raw.size());
    for (size_t block = 0; block < raw.size(); block += 16) {
      for (size_t q = 0; q < 4; ++q) {
        codes[block + 2 * q + 8] = raw[block + 4 * q];
        codes[block + 2 * q] = raw[block + 4 * q + 1];
        codes[block + 2 * q + 9] = raw[block + 4 * q + 2];
        codes[block + 2 * q + 1] = raw[block + 4 * q + 3];
      }
    }
    return codes;
  }
  // Against the codes of what the reference computes: sums and exponentials of a device differ in their last bits,
  // which moves few values across the middle between two codes.
  void ExpectCodesOf(const DeviceRows& rows, const std::vector<float>& values, bool exactly) {
    std::vector<uint8_t> want(values.size());
    std::vector<float> want_scales(rows.num_scales(), -7.0f);
    const Activations out(want.data(), DType::kE4M3, want_scales.data(), rows.group);
    ExpectOk(ref_->QuantizeRows({}, {values.data(), out, rows.num_rows, rows.width}));
    const std::vector<uint8_t> got = Codes(rows);
    const auto scales = Download<float>(*rows.scales, rows.num_scales());
    size_t differ = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      differ += got[i] != want[i];
      const auto row = static_cast<int64_t>(i) / rows.width, column = static_cast<int64_t>(i) % rows.width;
      const auto scale =
          static_cast<size_t>(rows.group == 0 ? row : column / rows.group * E4M3Rows(rows.num_rows) + row);
      const float a = kE4M3Values[got[i]] * scales[scale], b = kE4M3Values[want[i]] * want_scales[scale];
      ASSERT_NEAR(a, b, std::max(std::abs(b) / 7, scales[scale] * 0x1p-8f)) << "row " << row << ", " << column;
    }
    EXPECT_LE(differ, exactly ? 0 : got.size() / 500 + 1);
    for (size_t i = 0; i < scales.size(); ++i)
      EXPECT_NEAR(scales[i], want_scales[i], exactly ? 0 : std::abs(want_scales[i]) / 1e5f);
  }

  std::unique_ptr<Backend> cuda_;
  const std::unique_ptr<Backend> ref_ = MakeReferenceBackend();
  std::unique_ptr<Session> session_;
};

TEST_F(CudaE4M3Rows, OperationsWriteTheReferencesCodes) {
  Random random(71);
  const int64_t rows = 7;
  for (const int64_t width : {16, 64, 400, 4096, 8192, 14336, 28672, 32768}) {
    std::vector<float> x = random.Normals(rows * width), residual = random.Normals(rows * width),
                       weight = random.Normals(width), delta = random.Normals(rows * width),
                       gate_up = random.Normals(rows * 2 * width), want(static_cast<size_t>(rows * width));
    for (int64_t j = 0; j < width; ++j) x[3 * width + j] = 0;
    for (const auto& [dtype, group] : std::vector<std::pair<DType, int64_t>>{
             {DType::kF32, 0}, {DType::kBF16, 0}, {DType::kF32, 128}, {DType::kBF16, 128}}) {
      const DeviceRows codes = EmptyRows(rows, width, group);
      const auto from = Upload(x, dtype);
      ExpectOk(cuda_->QuantizeRows(session_->context(), {{from->data(), dtype}, codes.act(), rows, width}));
      ExpectCodesOf(codes, x, true);
      std::vector<float> own = residual;
      const auto on_device = Upload(own, DType::kF32), w = Upload(weight, DType::kF32), d = Upload(delta, dtype);
      ExpectOk(cuda_->RmsNorm(session_->context(),
                              {static_cast<float*>(on_device->data()), ConstActivations(d->data(), dtype),
                               static_cast<const float*>(w->data()), codes.act(), rows, width}));
      ExpectOk(ref_->RmsNorm({}, {own.data(), delta.data(), weight.data(), want.data(), rows, width}));
      ExpectCodesOf(codes, want, false);
      const auto gates = Upload(gate_up, dtype);
      ExpectOk(cuda_->SiluMul(session_->context(), {{gates->data(), dtype}, codes.act(), rows, width}));
      ExpectOk(ref_->SiluMul({}, {gate_up.data(), want.data(), rows, width}));
      ExpectCodesOf(codes, want, false);
    }
  }
}

TEST_F(CudaE4M3Rows, ProductsOfCodesWithCodes) {
  Random random(72);
  for (const auto& [rows, in, out, group] : std::vector<std::array<int64_t, 4>>{{1, 64, 96, 0},
                                                                                {17, 128, 48, 0},
                                                                                {200, 256, 512, 0},
                                                                                {333, 4096, 1024, 0},
                                                                                {1000, 1024, 2048, 0},
                                                                                {4, 256, 256, 128},
                                                                                {201, 512, 640, 128},
                                                                                {1000, 1024, 2048, 128}}) {
    std::vector<uint8_t> w(static_cast<size_t>(out * in));
    for (uint8_t& code : w) code = FloatToE4M3(8 * random.Normal());
    const int64_t groups = group == 0 ? 1 : (in + group - 1) / group;
    std::vector<float> scales(static_cast<size_t>(out * groups));
    for (int64_t i = 0; i < out; ++i) {
      for (int64_t g = 0; g < groups; ++g)
        scales[i * groups + g] =
            group == 0 || i % group == 0 ? 0.01f + std::abs(random.Normal()) / 50 : scales[(i - 1) * groups + g];
    }
    const auto packed = cuda_->PackLinear({w.data(), DType::kE4M3, out, in, scales.data(), group}).value();
    if (!packed->PrefersE4M3(1 << 20)) GTEST_SKIP() << "no products of e4m3 with e4m3 here";
    EXPECT_FALSE(packed->PrefersE4M3(64));
    EXPECT_EQ(packed->e4m3_group(), group);
    std::vector<float> x = random.Normals(rows * in), bias = random.Normals(out);
    const auto from = Upload(x, DType::kBF16), b = Upload(bias, DType::kF32);
    const DeviceRows codes = EmptyRows(rows, in, group);
    ExpectOk(cuda_->QuantizeRows(session_->context(), {{from->data(), DType::kBF16}, codes.act(), rows, in}));
    std::vector<uint8_t> plain = Codes(codes);
    auto x_scales = Download<float>(*codes.scales, codes.num_scales());
    std::vector<float> want(static_cast<size_t>(rows * out));
    const auto of_ref = ref_->PackLinear({w.data(), DType::kE4M3, out, in, scales.data(), group}).value();
    ExpectOk(ref_->Linear({}, {Activations(plain.data(), DType::kE4M3, x_scales.data(), group), of_ref.get(),
                               bias.data(), want.data(), rows}));
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      std::vector<float> poison(static_cast<size_t>(E4M3Rows(rows) * out), NAN);
      const auto y = Upload(poison, dtype);
      ExpectOk(
          cuda_->Linear(session_->context(),
                        {codes.act(), packed.get(), static_cast<const float*>(b->data()), {y->data(), dtype}, rows}));
      const auto bytes = Download<std::byte>(*y, want.size() * DTypeBytes(dtype));
      const std::vector<float> got = ToFloats(bytes, dtype);
      double error = 0, norm = 0;
      for (size_t i = 0; i < got.size(); ++i) {
        ASSERT_FALSE(std::isnan(got[i])) << i;
        error += (double{got[i]} - want[i]) * (double{got[i]} - want[i]);
        norm += double{want[i]} * want[i];
      }
      // The tensor cores add some 14 bits of a sum; codes in another order than the weight's would be 1.4 off.
      EXPECT_LE(std::sqrt(error / norm), 5e-3) << rows << " x " << in << " x " << out << ", group " << group;
    }
  }
}

// Scales that differ within a block of 128 rows have no such product.
TEST_F(CudaE4M3Rows, RowsOfABlockThatDifferKeepTheirOwnProduct) {
  std::vector<uint8_t> w(256 * 256, 0x38);
  std::vector<float> scales(256 * 2, 1.0f);
  EXPECT_EQ(cuda_->PackLinear({w.data(), DType::kE4M3, 256, 256, scales.data(), 128}).value()->PrefersE4M3(0), false);
  scales[2 * 5] = 2.0f;
  EXPECT_FALSE(cuda_->PackLinear({w.data(), DType::kE4M3, 256, 256, scales.data(), 128}).value()->PrefersE4M3(1 << 20));
}

}  // namespace
}  // namespace spl::kernels
