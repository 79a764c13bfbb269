// How much host memory a decode worker on a GPU takes for KV that lands there.
#include <gtest/gtest.h>

#include "services/decode/decode_server.h"

namespace spl::decode {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20, kGiB = uint64_t{1} << 30;

TEST(LandingMemoryTest, HoldsThePoolWithinWhatTheHostCanSpare) {
  // No prompt is larger than the pool.
  EXPECT_EQ(DefaultLandingBytes(2 * kGiB, 128 * kGiB), 2 * kGiB);
  // A prompt of 12,000 tokens of an 8B model, 128 KiB each, lands beside a pool of 60 GiB.
  EXPECT_EQ(DefaultLandingBytes(60 * kGiB, 128 * kGiB), 4 * kGiB);
  EXPECT_GT(DefaultLandingBytes(60 * kGiB, 128 * kGiB), uint64_t{12'000} * 128 * 1024);
  // Page-locked memory is gone for everybody else.
  EXPECT_EQ(DefaultLandingBytes(60 * kGiB, 8 * kGiB), kGiB);
  EXPECT_EQ(DefaultLandingBytes(60 * kGiB, 0), 64 * kMiB);
  EXPECT_EQ(DefaultLandingBytes(0, 128 * kGiB), 64 * kMiB);
}

}  // namespace
}  // namespace spl::decode
