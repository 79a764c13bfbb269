#include "kernels/kv_copy/crc32c.h"

#include <string>
#include <vector>

#include "kernels/kv_copy/crc32c_portable.h"
#include "kernels/kv_copy/crc32c_shifter.h"
#include "tests/kernels/support/kernel_test_util.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

using Extend = uint32_t (*)(uint32_t, const void*, size_t);

class Crc32c : public ::testing::TestWithParam<Extend> {};

// RFC 3720, appendix B.4.
TEST_P(Crc32c, GivesThePublishedValues) {
  const Extend extend = GetParam();
  EXPECT_EQ(extend(0, "123456789", 9), 0xe3069283u);
  std::vector<uint8_t> bytes(32, 0);
  EXPECT_EQ(extend(0, bytes.data(), 32), 0x8a9136aau);
  bytes.assign(32, 0xff);
  EXPECT_EQ(extend(0, bytes.data(), 32), 0x62a8ab43u);
  for (int i = 0; i < 32; ++i) bytes[i] = static_cast<uint8_t>(i);
  EXPECT_EQ(extend(0, bytes.data(), 32), 0x46dd794eu);
  EXPECT_EQ(extend(0, nullptr, 0), 0u);
}

// Every length around the edges of the three-way loops (3 x 256, 3 x 4096), at every alignment.
TEST_P(Crc32c, EqualsReferenceAtEveryLengthAndAlignment) {
  Random random(81);
  std::vector<uint8_t> data(40000);
  for (uint8_t& b : data) b = static_cast<uint8_t>(random.Int(0, 255));
  std::vector<size_t> sizes;
  for (size_t n = 0; n < 80; ++n) sizes.push_back(n);
  for (size_t edge : {768u, 1536u, 12288u, 24576u, 12288u + 768u}) {
    for (size_t n = edge - 9; n <= edge + 9; ++n) sizes.push_back(n);
  }
  for (size_t n : sizes) {
    const size_t at = static_cast<size_t>(random.Int(0, 63));
    const auto seed = static_cast<uint32_t>(random.engine()());
    ASSERT_EQ(GetParam()(seed, data.data() + at, n), ref::Crc32cExtend(seed, data.data() + at, n)) << n << " at " << at;
  }
}

TEST_P(Crc32c, ExtendsAcrossAnyCut) {
  Random random(82);
  std::vector<uint8_t> data(30000);
  for (uint8_t& b : data) b = static_cast<uint8_t>(random.Int(0, 255));
  const uint32_t whole = GetParam()(0, data.data(), data.size());
  for (int i = 0; i < 50; ++i) {
    const auto cut = static_cast<size_t>(random.Int(0, 30000));
    EXPECT_EQ(GetParam()(GetParam()(0, data.data(), cut), data.data() + cut, data.size() - cut), whole) << cut;
  }
}

INSTANTIATE_TEST_SUITE_P(Variants, Crc32c,
                         ::testing::Values(&Crc32cExtend, &portable::Crc32cExtend, &ref::Crc32cExtend));

TEST(Crc32c, AShifterMovesCrcsOverItsBytes) {
  std::mt19937 random(5);
  for (const size_t size : {size_t{0}, size_t{1}, size_t{17}, size_t{16384}, size_t{32768}}) {
    const Crc32cShifter shifter(size);
    for (int i = 0; i < 100; ++i) {
      const uint32_t crc = random();
      EXPECT_EQ(shifter(crc), Crc32cMultiply(Crc32cShift(size), crc)) << size;
    }
  }
}

}  // namespace
}  // namespace spl::kernels
