#include "kernels/sampling/argmax.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace spl::kernels {
namespace {

using Op = absl::Status (*)(const KernelContext&, const ArgmaxArgs&);

class ArgmaxTest : public testing::TestWithParam<Op> {
 protected:
  static std::vector<int32_t> Run(const std::vector<float>& logits, int64_t rows, int64_t width) {
    std::vector<int32_t> out(static_cast<size_t>(rows), -1);
    const absl::Status status =
        GetParam()({}, {.logits = logits.data(), .out = out.data(), .num_rows = rows, .width = width});
    EXPECT_TRUE(status.ok()) << status;
    return out;
  }
};

TEST_P(ArgmaxTest, TiesGoToTheLowerId) {
  EXPECT_EQ(Run({1, 3, 3, 2, /**/ 5, 5, 5, 5, /**/ -2, -1, -1, -3}, 3, 4), (std::vector<int32_t>{1, 0, 1}));
}

TEST_P(ArgmaxTest, NanIsNeverChosenAndInfinitiesAre) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(Run({nan, -5, nan, /**/ nan, nan, nan, /**/ 0, inf, nan, /**/ nan, -inf, -inf}, 4, 3),
            (std::vector<int32_t>{1, 0, 1, 1}));
}

TEST_P(ArgmaxTest, TellsTheLogitsItChose) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> logits = {1, 3, 3, /**/ nan, nan, nan, /**/ nan, -7, -9};
  std::vector<int32_t> out(3);
  std::vector<float> values(3);
  ASSERT_TRUE(
      GetParam()({}, {.logits = logits.data(), .out = out.data(), .values = values.data(), .num_rows = 3, .width = 3})
          .ok());
  EXPECT_EQ(values[0], 3);
  EXPECT_TRUE(std::isnan(values[1]));
  EXPECT_EQ(values[2], -7);
}

TEST_P(ArgmaxTest, FindsPlantedMaxima) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (const int64_t width : {1, 2, 63, 1000, 128256}) {
    std::vector<float> logits(static_cast<size_t>(3 * width));
    for (float& x : logits) x = std::normal_distribution<float>(0, 4)(random);
    std::vector<int32_t> planted;
    for (int64_t row = 0; row < 3; ++row) {
      planted.push_back(static_cast<int32_t>(random() % static_cast<uint64_t>(width)));
      logits[static_cast<size_t>(row * width + planted.back())] = 100;
    }
    EXPECT_EQ(Run(logits, 3, width), planted) << "width " << width;
  }
}

TEST_P(ArgmaxTest, RefusesBadShapes) {
  EXPECT_EQ(GetParam()({}, {.num_rows = 1, .width = 0}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(GetParam()({}, {.num_rows = 1, .width = 4}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(GetParam()({}, {.num_rows = 0, .width = 4}).ok());
}

INSTANTIATE_TEST_SUITE_P(Variants, ArgmaxTest, testing::Values(&ref::Argmax, &cpu::Argmax));

}  // namespace
}  // namespace spl::kernels
