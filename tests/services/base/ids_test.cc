#include "services/base/ids.h"

#include <gtest/gtest.h>

#include <set>

namespace spl {
namespace {

TEST(RandomId, IsDifferentEveryTimeAndRoundTrips) {
  std::set<std::string> seen;
  for (int i = 0; i < 1000; ++i) {
    const RandomId id = RandomId::Make();
    EXPECT_EQ(id.ToHex().size(), 32u);
    EXPECT_TRUE(seen.insert(id.ToHex()).second);
    const auto back = RandomId::FromBytes(id.ToBytes());
    ASSERT_TRUE(back.ok());
    EXPECT_EQ(*back, id);
    EXPECT_EQ(RandomIdHash()(*back), RandomIdHash()(id));
  }
  EXPECT_EQ(RandomId::FromBytes("short").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(Hex, EncodesAndDecodes) {
  const uint8_t bytes[] = {0x00, 0x7f, 0xff, 0xa0};
  EXPECT_EQ(HexEncode(bytes), "007fffa0");
  EXPECT_EQ(*HexDecode("007fFFa0"), std::string("\x00\x7f\xff\xa0", 4));
  EXPECT_EQ(*HexDecode(""), "");
  EXPECT_FALSE(HexDecode("abc").ok());
  EXPECT_FALSE(HexDecode("zz").ok());
}

}  // namespace
}  // namespace spl
