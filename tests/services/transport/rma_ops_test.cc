#include "services/transport/rma_ops.h"

#include <gtest/gtest.h>

#include "services/transport/rkey_frame.h"

namespace spl::transport {
namespace {

std::byte* At(size_t address) { return reinterpret_cast<std::byte*>(address); }

TEST(CoalesceRmaOps, JoinsWhatContinuesOnBothSides) {
  const auto ops = CoalesceRmaOps(
      {{At(100), 0, 10}, {At(110), 10, 5}, {At(115), 16, 1}, {At(117), 17, 1}, {At(118), 18, 0}, {At(118), 18, 2}});
  ASSERT_EQ(ops.size(), 3u);
  EXPECT_EQ(ops[0].bytes, 15u);
  EXPECT_EQ(ops[1].remote_offset, 16u);
  EXPECT_EQ(ops[1].bytes, 1u);
  EXPECT_EQ(ops[2].bytes, 3u);
}

TEST(CoalesceRmaOps, KeepsTheOrderOfOverlappingWrites) {
  const auto ops = CoalesceRmaOps({{At(100), 0, 10}, {At(200), 0, 10}, {At(110), 10, 10}});
  ASSERT_EQ(ops.size(), 3u);
  EXPECT_EQ(ops[1].local, At(200));
}

TEST(CheckRmaOps, RefusesWhatLeavesTheMemory) {
  EXPECT_TRUE(CheckRmaOps({{At(1), 0, 100}, {At(1), 100, 0}, {nullptr, 5, 0}}, 100).ok());
  for (const RmaOp& op : {RmaOp{At(1), 0, 101}, RmaOp{At(1), 100, 1}, RmaOp{At(1), 101, 0}, RmaOp{At(1), UINT64_MAX, 2},
                          RmaOp{At(1), 2, SIZE_MAX}, RmaOp{nullptr, 0, 1}}) {
    EXPECT_EQ(CheckRmaOps({{At(1), 0, 1}, op}, 100).code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST(RkeyFrame, RefusesDamage) {
  const std::string framed = FrameRkey({"packed", 4711});
  EXPECT_EQ(UnframeRkey(framed)->packed, "packed");
  EXPECT_EQ(UnframeRkey(framed)->local_port, 4711);
  for (size_t i = 0; i < framed.size(); ++i) {
    std::string damaged = framed;
    damaged[i] ^= 1;
    EXPECT_FALSE(UnframeRkey(damaged).ok()) << i;
  }
  EXPECT_FALSE(UnframeRkey(framed.substr(0, framed.size() - 1)).ok());
  EXPECT_FALSE(UnframeRkey("").ok());
}

}  // namespace
}  // namespace spl::transport
