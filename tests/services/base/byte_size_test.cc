#include "services/base/byte_size.h"

#include <gtest/gtest.h>

namespace spl {
namespace {

TEST(ByteSize, ParsesUnits) {
  EXPECT_EQ(*ParseByteSize("0"), 0u);
  EXPECT_EQ(*ParseByteSize("123"), 123u);
  EXPECT_EQ(*ParseByteSize("64KiB"), 65536u);
  EXPECT_EQ(*ParseByteSize("512MiB"), 512u << 20);
  EXPECT_EQ(*ParseByteSize("1.5 GiB"), 3ull << 29);
  EXPECT_EQ(*ParseByteSize("2TB"), 2'000'000'000'000ull);
}

TEST(ByteSize, RefusesOtherText) {
  for (const char* text : {"", "MiB", "12XB", "-1", "1e3", "1..2", "512mib", "99999999TiB", "1 2"}) {
    EXPECT_EQ(ParseByteSize(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

TEST(ByteSize, FormatsForPeople) {
  EXPECT_EQ(FormatByteSize(17), "17 B");
  EXPECT_EQ(FormatByteSize(512ull << 20), "512.0 MiB");
  EXPECT_EQ(FormatByteSize(1536), "1.5 KiB");
}

}  // namespace
}  // namespace spl
