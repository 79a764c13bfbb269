// Grouped products of experts in bf16, e4m3 and int4 on a GPU against double-precision sums on the host, and against
// themselves bit by bit for other numbers of places. Skipped where there is no GPU.
//
// NaN stands in rows of y that are not written, and behind the last row of x.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/backend/backend.h"
#include "kernels/backend/cuda/cuda_plugin.h"
#include "kernels/common/e4m3.h"
#include "tests/kernels/support/kernel_test_util.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Codes {
  DType dtype;
  int64_t group = 0;
  bool asymmetric = false;
};

// The weights of some experts, and rows of x.
struct Experts {
  Experts(Random& random, const Codes& codes, int32_t count, int64_t out, int64_t in) : in(in) {
    view = {.dtype = codes.dtype, .num_experts = count, .out_features = out, .in_features = in};
    bytes.resize(static_cast<size_t>(count * out * DTypeRowBytes(codes.dtype, in)));
    if (codes.dtype == DType::kBF16) {
      for (size_t i = 0; i < bytes.size(); i += 2) {
        const bf16 value = ToBf16(random.Normal());
        std::memcpy(&bytes[i], &value, 2);
      }
      return;
    }
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.Int(0, 255));
    if (codes.dtype == DType::kE4M3)
      for (uint8_t& byte : bytes) byte = IsE4M3Nan(byte) ? byte & 0x7e : byte;
    view.scale_group = codes.group;
    for (int64_t i = 0; i < count * out * view.expert(0).num_scale_groups(); ++i) {
      scales.push_back(0.01f * (1 + std::fabs(random.Normal())));
      zeros.push_back(static_cast<uint8_t>(random.Int(0, 16)));
    }
    view.scales = scales.data();
    if (codes.asymmetric) view.zeros = zeros.data();
  }

  double Value(int64_t row, int64_t k) const {  // row: expert * out_features + feature
    const int64_t at = row * in + k;
    if (view.dtype == DType::kBF16) {
      bf16 value;
      std::memcpy(&value, &bytes[static_cast<size_t>(2 * at)], 2);
      return ToFloat(value);
    }
    const int64_t group = row * view.expert(0).num_scale_groups() + (view.scale_group == 0 ? 0 : k / view.scale_group);
    if (view.dtype == DType::kE4M3) return double{scales[group]} * E4M3ToFloat(bytes[at]);
    const int code = at % 2 == 0 ? bytes[at / 2] % 16 : bytes[at / 2] / 16;
    return double{scales[group]} * (code - (view.zeros == nullptr ? 8 : zeros[group]));
  }

  std::vector<uint8_t> bytes;
  std::vector<float> scales;
  std::vector<uint8_t> zeros;
  GroupedWeightView view;
  int64_t in;
};

class CudaExpertsTest : public ::testing::TestWithParam<Codes> {
 protected:
  void SetUp() override {
    auto cuda = MakeCudaBackend();
    if (!cuda.ok()) GTEST_SKIP() << cuda.status();
    cuda_ = *std::move(cuda);
    session_ =
        cuda_
            ->NewSession(
                {.max_rows = 8, .max_sequences = 8, .num_layers = 1, .num_kv_heads = 1, .max_pages_per_stream = 1})
            .value();
  }
  template <typename T>
  std::unique_ptr<Buffer> Upload(const std::vector<T>& values) {
    auto buffer = cuda_->Allocate(std::max<size_t>(values.size(), 4) * sizeof(T)).value();
    if (!values.empty())
      ExpectOk(cuda_->Copy(CopyKind::kUpload, buffer->data(), values.data(), values.size() * sizeof(T)));
    return buffer;
  }
  std::unique_ptr<GroupedWeight> Adopted(const Experts& experts) {
    auto weight = cuda_->AdoptGrouped(Upload(experts.bytes), experts.view);
    EXPECT_TRUE(weight.ok()) << weight.status();
    return *std::move(weight);
  }
  // rows: of x, by place; empty: place p reads row p.
  std::vector<float> Multiply(const GroupedWeight& weight, const std::vector<float>& x,
                              const std::vector<int32_t>& rows, const std::vector<int32_t>& offsets) {
    const int64_t places = offsets.back(), out = weight.out_features();
    std::vector<float> with_nan = x;
    with_nan.resize(x.size() + 64 * weight.in_features(), kNaN);
    const auto x_device = Upload(Encode(with_nan, DType::kBF16));
    const auto rows_device = Upload(rows), offsets_device = Upload(offsets);
    std::vector<float> y(static_cast<size_t>((places + 1) * out), kNaN);
    const auto y_device = Upload(y);
    ExpectOk(cuda_->GroupedLinear(session_->context(),
                                  {.x = {x_device->data(), DType::kBF16},
                                   .num_x_rows = static_cast<int64_t>(x.size()) / weight.in_features(),
                                   .rows = rows.empty() ? nullptr : static_cast<const int32_t*>(rows_device->data()),
                                   .offsets = static_cast<const int32_t*>(offsets_device->data()),
                                   .weight = &weight,
                                   .y = {y_device->data(), DType::kF32},
                                   .num_places = places}));
    ExpectOk(session_->Synchronize());
    ExpectOk(cuda_->Copy(CopyKind::kDownload, y.data(), y_device->data(), y.size() * sizeof(float)));
    for (int64_t n = 0; n < out; ++n) EXPECT_TRUE(std::isnan(y[places * out + n])) << "written past the last place";
    y.resize(static_cast<size_t>(places * out));
    return y;
  }
  // Values that bf16 holds.
  static std::vector<float> Rows(Random& random, int64_t count) {
    std::vector<float> x = random.Normals(static_cast<size_t>(count));
    for (float& value : x) value = ToFloat(ToBf16(value));
    return x;
  }
  // Offsets of `places` places over the experts, of whom some have none and one may have most.
  static std::vector<int32_t> Offsets(Random& random, int32_t experts, int32_t places) {
    std::vector<int32_t> offsets = {0, places};
    const int32_t low = random.Int(0, 1) == 0 ? 0 : places / 2;
    for (int32_t e = 1; e < experts; ++e) offsets.push_back(random.Int(low, places));
    std::sort(offsets.begin(), offsets.end());
    return offsets;
  }

  std::unique_ptr<Backend> cuda_;
  std::unique_ptr<Session> session_;
};

// Few places in small tiles, many in large ones; widths that end inside a tile, a stage and a scale group.
TEST_P(CudaExpertsTest, IsTheSumOfItsDefinition) {
  Random random(91);
  struct Shape {
    int32_t experts;
    int64_t out, in;
    int32_t places;
  };
  for (const Shape& s :
       {Shape{4, 64, 128, 3}, {8, 72, 352, 40}, {8, 136, 224, 700}, {128, 200, 96, 1500}, {1, 8, 32, 1}}) {
    const Experts experts(random, GetParam(), s.experts, s.out, s.in);
    const auto weight = Adopted(experts);
    const std::vector<float> x = Rows(random, s.places * s.in);
    const std::vector<int32_t> offsets = Offsets(random, s.experts, s.places);
    std::vector<int32_t> rows(static_cast<size_t>(s.places));
    for (int32_t& row : rows) row = random.Int(0, s.places - 1);
    for (const bool gather : {true, false}) {
      const std::vector<float> y = Multiply(*weight, x, gather ? rows : std::vector<int32_t>(), offsets);
      double worst = 0;
      for (int32_t e = 0; e < s.experts; ++e) {
        for (int64_t p = offsets[e]; p < offsets[e + 1]; ++p) {
          for (int64_t n = p % 7; n < s.out; n += 7) {
            double sum = 0, size = 0;
            for (int64_t k = 0; k < s.in; ++k) {
              const double term = experts.Value(e * s.out + n, k) * x[(gather ? rows[p] : p) * s.in + k];
              sum += term;
              size += std::fabs(term);
            }
            const double error = std::fabs(y[p * s.out + n] - sum) / (size * 0x1p-24);
            worst = std::isfinite(error) ? std::max(worst, error) : INFINITY;
          }
        }
      }
      EXPECT_LT(worst, 8) << s.experts << " experts, " << s.out << " x " << s.in << ", " << s.places << " places";
    }
  }
}

// All 300 places, and 1, 40 or 150 of them, run in tiles of both shapes.
TEST_P(CudaExpertsTest, APlacesBitsDoNotDependOnOtherPlaces) {
  Random random(92);
  constexpr int32_t kExperts = 6, kPlaces = 300;
  constexpr int64_t kOut = 144, kIn = 416;
  const Experts experts(random, GetParam(), kExperts, kOut, kIn);
  const auto weight = Adopted(experts);
  const std::vector<float> x = Rows(random, kPlaces * kIn);
  const std::vector<int32_t> offsets = Offsets(random, kExperts, kPlaces);
  const std::vector<float> all = Multiply(*weight, x, {}, offsets);
  std::vector<int32_t> order(kPlaces);
  std::iota(order.begin(), order.end(), 0);
  for (const int32_t count : {1, 1, 1, 1, 40, 150}) {
    std::shuffle(order.begin(), order.end(), random.engine());
    std::vector<int32_t> chosen(order.begin(), order.begin() + count);
    std::sort(chosen.begin(), chosen.end());
    std::vector<int32_t> of_chosen;
    for (const int32_t offset : offsets)
      of_chosen.push_back(
          static_cast<int32_t>(std::lower_bound(chosen.begin(), chosen.end(), offset) - chosen.begin()));
    const std::vector<float> y = Multiply(*weight, x, chosen, of_chosen);
    for (int32_t i = 0; i < count; ++i) {
      EXPECT_TRUE(BitwiseEqual(std::span(y).subspan(static_cast<size_t>(i * kOut), kOut),
                               std::span(all).subspan(static_cast<size_t>(chosen[i] * kOut), kOut)))
          << "place " << chosen[i] << " of " << count;
    }
  }
}

TEST_P(CudaExpertsTest, RefusesShapesThatNoKernelServes) {
  if (GetParam().dtype == DType::kBF16) return;
  Random random(93);
  for (const auto& [out, in] :
       {std::pair<int64_t, int64_t>{12, 128}, {16, GetParam().dtype == DType::kInt4 ? 48 : 40}}) {
    const Experts experts(random, GetParam(), 2, out, in);
    EXPECT_EQ(cuda_->AdoptGrouped(Upload(experts.bytes), experts.view).status().code(),
              absl::StatusCode::kUnimplemented);
  }
  Experts without_scales(random, GetParam(), 2, 16, 128);
  without_scales.view.scales = nullptr;
  EXPECT_EQ(cuda_->AdoptGrouped(Upload(without_scales.bytes), without_scales.view).status().code(),
            absl::StatusCode::kInvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(Types, CudaExpertsTest,
                         ::testing::Values(Codes{DType::kBF16}, Codes{DType::kE4M3}, Codes{DType::kE4M3, 128},
                                           Codes{DType::kInt4}, Codes{DType::kInt4, 32, true},
                                           Codes{DType::kInt4, 64, true}, Codes{DType::kInt4, 128, true},
                                           Codes{DType::kInt4, 256, true}),
                         [](const ::testing::TestParamInfo<Codes>& info) {
                           return std::string(DTypeName(info.param.dtype)) + "_" + std::to_string(info.param.group);
                         });

}  // namespace
}  // namespace spl::kernels
