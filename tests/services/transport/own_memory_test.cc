// The way into memory of one's own, through the interface of all others.
#include "services/transport/own_memory.h"

#include <gtest/gtest.h>

#include <cstring>

#include "services/transport/bandwidth.h"

namespace spl::transport {
namespace {

using namespace std::chrono_literals;

TEST(OwnMemoryTest, WritesAndReadsAtOffsets) {
  std::vector<std::byte> memory(4096), from(64, std::byte{7}), to(64);
  const auto channel = MakeOwnMemoryChannel(memory);
  int done = 0;
  const auto count = [&](const absl::Status& status) { done += status.ok() ? 1 : 100; };
  ASSERT_TRUE(channel->Put({{from.data(), 100, 64}, {from.data(), 4032, 64}}, count).ok());
  ASSERT_TRUE(channel->Flush(count).ok());
  ASSERT_TRUE(channel->Get({{to.data(), 4032, 64}}, count).ok());
  EXPECT_EQ(done, 3);
  EXPECT_EQ(to, from);
  EXPECT_EQ(memory[99], std::byte{0});
  EXPECT_EQ(memory[100], std::byte{7});
  EXPECT_EQ(memory[163], std::byte{7});
  EXPECT_EQ(memory[164], std::byte{0});
  EXPECT_TRUE(channel->FlushAndWait(1s).ok());
  EXPECT_EQ(channel->mapped_memory().data(), memory.data());
}

TEST(OwnMemoryTest, NothingOutsideIsTouched) {
  std::vector<std::byte> memory(128), from(128, std::byte{1});
  const auto channel = MakeOwnMemoryChannel(std::span(memory).first(64));
  const auto never = [](const absl::Status&) { FAIL() << "done of what was refused"; };
  EXPECT_EQ(channel->Put({{from.data(), 0, 65}}, never).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(channel->Put({{from.data(), 64, 1}}, never).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(channel->Put({{from.data(), UINT64_MAX, 2}}, never).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(channel->Get({{from.data(), 1, 64}}, never).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(memory, std::vector<std::byte>(128));
}

TEST(OwnMemoryTest, ACopierWritesForSourcesThatOnlyItCanRead) {
  std::vector<std::byte> memory(128), from(32, std::byte{9});
  const auto channel = MakeOwnMemoryChannel(memory);
  absl::Status outcome = absl::UnknownError("not called");
  const auto copier = [](std::span<const MappedWrite> writes) {
    for (const MappedWrite& w : writes) std::memcpy(w.to, w.from, w.bytes);
    return absl::OkStatus();
  };
  ASSERT_TRUE(channel->PutThrough(copier, {{from.data(), 96, 32}}, [&](const absl::Status& s) { outcome = s; }).ok());
  EXPECT_TRUE(outcome.ok());
  EXPECT_EQ(memory[96], std::byte{9});
  const auto fails = [](std::span<const MappedWrite>) { return absl::DataLossError("device"); };
  ASSERT_TRUE(channel->PutThrough(fails, {{from.data(), 0, 32}}, [&](const absl::Status& s) { outcome = s; }).ok());
  EXPECT_EQ(outcome.code(), absl::StatusCode::kDataLoss);
}

TEST(OwnMemoryTest, ClosedIsLost) {
  std::vector<std::byte> memory(64), from(64);
  const auto channel = MakeOwnMemoryChannel(memory);
  EXPECT_TRUE(channel->status().ok());
  ASSERT_TRUE(channel->Close(1s).ok());
  EXPECT_EQ(channel->status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(channel->Put({{from.data(), 0, 8}}, [](const absl::Status&) {}).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(channel->Flush([](const absl::Status&) {}).code(), absl::StatusCode::kUnavailable);
}

TEST(OwnMemoryTest, CanBeMeasured) {
  std::vector<std::byte> memory(2 << 20);
  const auto channel = MakeOwnMemoryChannel(memory);
  const auto cost = MeasureWriteCost(*channel, 1 << 20, 1 << 20, 1s);
  ASSERT_TRUE(cost.ok()) << cost.status();
  EXPECT_GT(cost->bytes_per_s, 1e8);
}

}  // namespace
}  // namespace spl::transport
