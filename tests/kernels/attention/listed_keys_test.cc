// Attention over a list is attention over the list's keys by themselves, with rows at the number of entries that they
// see: by the reference on both sides.
#include "kernels/attention/listed_keys.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/kernels/support/kernel_test_util.h"
#include "tests/kernels/support/paged_kv.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

TEST(ListedKeysTest, RowsByHand) {
  const std::vector<int32_t> list = {2, 5, 6, 90}, positions = {0, 1, 2, 3, 5, 7, 7, 80};
  const auto rows = ListRows(list, positions);
  ASSERT_TRUE(rows.ok()) << rows.status();
  EXPECT_EQ(rows->positions, (std::vector<int32_t>{-1, -1, 0, 0, 1, 2, 2, 2}));
  EXPECT_EQ(rows->num_empty, 2);
  EXPECT_EQ(rows->list.size(), 3u);  // nobody sees 90
  EXPECT_EQ(rows->num_pages(), 1);
  const auto nothing = ListRows({}, positions);
  ASSERT_TRUE(nothing.ok());
  EXPECT_EQ(nothing->num_empty, 8);
  EXPECT_EQ(nothing->num_pages(), 0);
  for (const auto& bad : std::vector<std::vector<int32_t>>{{-1, 3}, {3, 3}, {4, 3}})
    EXPECT_EQ(ListRows(bad, positions).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(ListedKeysTest, HeadsWithEqualListsGoTogether) {
  const std::vector<int32_t> a = {1, 2, 3}, same = a, b = {1, 2, 4};
  const auto list = [](const std::vector<int32_t>& of) {
    return HeadStreamView{{}, 9, {.rule = VisibilityRule::kList, .indices = of}};
  };
  const std::vector<HeadStreamView> heads = {list(a), {{}, 9, {}}, list(b), list(same)};
  const std::vector<ListedHeads> groups = GroupByList(heads);
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_EQ(groups[0].kv_heads, (std::vector<int32_t>{0, 3}));
  EXPECT_EQ(groups[1].kv_heads, (std::vector<int32_t>{2}));
}

TEST(ListedKeysTest, WhatIsListedMustBeThere) {
  const std::vector<int32_t> table = {7, kNoPage, 3};
  const std::vector<int32_t> list = {0, 63, 128, 190}, positions = {500};
  EXPECT_EQ(ListRows(list, positions)->resident, (std::vector<int32_t>{0, 2}));
  ExpectOk(CheckResident(std::vector<int32_t>{0, 2}, table));
  const absl::Status absent = CheckResident(std::vector<int32_t>{0, 1}, table);
  EXPECT_EQ(absent.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(absent.message()), ::testing::HasSubstr("page 1"));
  EXPECT_FALSE(CheckResident(std::vector<int32_t>{3}, table).ok());
}

TEST(ListedKeysTest, GatheredKeysGiveTheSameAttention) {
  Random random(1);
  constexpr int32_t kDim = 16, kGroup = 3, kLength = 500;
  for (int round = 0; round < 20; ++round) {
    TestStream stream = MakeStream(random, kLength, kDim), gathered;
    const int32_t share = random.Int(1, 10);
    for (int32_t j = random.Int(0, 200); j < kLength; ++j) {
      if (random.Int(0, share) == 0) stream.indices.push_back(j);
    }
    stream.visibility.rule = VisibilityRule::kList;
    std::vector<int32_t> positions;
    for (int32_t p = random.Int(0, 40); p < kLength; p += random.Int(1, 30)) positions.push_back(p);
    const auto rows = ListRows(stream.indices, positions);
    ASSERT_TRUE(rows.ok());
    gathered.kv_len = static_cast<int32_t>(rows->list.size());
    for (const int32_t j : rows->list) {
      const auto at = static_cast<std::ptrdiff_t>(j) * kDim;
      gathered.k.insert(gathered.k.end(), stream.k.begin() + at, stream.k.begin() + at + kDim);
      gathered.v.insert(gathered.v.end(), stream.v.begin() + at, stream.v.begin() + at + kDim);
    }
    TestPool pool(DType::kF32, kDim, 20);
    pool.Place(stream);
    pool.Place(gathered);
    const auto count = static_cast<int32_t>(positions.size());
    const std::vector<float> q = random.Normals(static_cast<size_t>(count * kGroup * kDim));
    const auto attend = [&](const TestStream& of, std::span<const int32_t> at, int32_t first) {
      std::vector<float> out(q.size()), lse(static_cast<size_t>(count * kGroup), -INFINITY);
      const HeadStreamView view = of.view();
      const PrefillSequence sequence{first, count, at.subspan(static_cast<size_t>(first)), {&view, 1}};
      ExpectOk(ref::PrefillAttention({}, {.shape = {kGroup, 1, kDim, 0.25f},
                                          .pool = pool.view(),
                                          .q = q.data(),
                                          .q_row_stride = kGroup * kDim,
                                          .out = out.data(),
                                          .lse = lse.data(),
                                          .sequences = {&sequence, 1}}));
      out.insert(out.end(), lse.begin(), lse.end());
      return out;
    };
    ExpectClose(attend(gathered, rows->positions, rows->num_empty), attend(stream, positions, 0), DType::kF32,
                "gathered keys");
  }
}

}  // namespace
}  // namespace spl::kernels
