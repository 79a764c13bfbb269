// Blending of K and V: by hand, and around pages whose other rows stay. The CUDA variant: cuda_backend_test.
#include "kernels/kv_copy/fuse_rows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/kernels/support/kernel_test_util.h"
#include "tests/kernels/support/paged_kv.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using ::testing::ElementsAre;
using Floats = std::vector<float>;

TEST(FuseRowTest, BlendsByTheCosine) {
  Floats fresh = {2, 0};
  FuseRow(Floats{3, 0}, fresh);  // cos 1: the new one
  EXPECT_THAT(fresh, ElementsAre(2, 0));
  fresh = {1, 0};
  FuseRow(Floats{0, 1}, fresh);  // cos 0: the old one
  EXPECT_THAT(fresh, ElementsAre(0, 1));
  fresh = {5, 0};
  FuseRow(Floats{3, 4}, fresh);  // cos 0.6
  EXPECT_FLOAT_EQ(fresh[0], 0.6f * 5 + 0.4f * 3);
  EXPECT_FLOAT_EQ(fresh[1], 0.4f * 4);
  fresh = {1, 2};
  FuseRow(Floats{0, 0}, fresh);  // no direction: the old one
  EXPECT_THAT(fresh, ElementsAre(0, 0));
  // theta = 1 is overwriting, to the bit.
  Random random(1);
  const Floats row = random.Normals(64);
  fresh = row;
  FuseRow(row, fresh);
  EXPECT_EQ(fresh, row);
}

TEST(FuseRowsTest, BlendsTheRowsThatItIsGiven) {
  Random random(2);
  TestContext context(DetectCpuIsa());
  constexpr int32_t kDim = 16, kHeads = 2, kLength = 150;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kE4M3}) {
    TestPool pool(dtype, kDim, 10);
    pool.Shuffle(random);
    std::vector<TestStream> streams, fresh;
    std::vector<std::span<const int32_t>> tables;
    for (int32_t h = 0; h < kHeads; ++h) {
      streams.push_back(MakeStream(random, kLength, kDim));
      pool.Place(streams.back());
    }
    for (const TestStream& s : streams) tables.push_back(s.page_table);
    const std::vector<int32_t> positions = {3, 60, 64, 100, 149}, ids = {0, 2, 4};
    std::vector<std::byte> saved(FusedRowsBytes(dtype, kDim, static_cast<int64_t>(ids.size()) * kHeads * 2));
    FuseRowsArgs args{.pool = pool.view(),
                      .num_kv_heads = kHeads,
                      .rows = {7, 12, positions, tables},
                      .row_ids = ids,
                      .saved = saved.data()};
    ExpectOk(cpu::FuseRows(context.ctx, args));
    for (TestStream& s : streams) {
      fresh.push_back(MakeStream(random, kLength, kDim));
      fresh.back().page_table = s.page_table;
      for (float& x : fresh.back().k) x *= 37;  // another scale than the old row's
      for (const int32_t p : positions) pool.WriteToken(fresh.back(), p);
    }
    args.step = FuseStep::kBlend;
    ExpectOk(cpu::FuseRows(context.ctx, args));
    const auto round = [&](Floats row) {
      if (dtype == DType::kE4M3) {
        std::vector<uint8_t> codes(kDim);
        const uint8_t scale = QuantizeRow(row.data(), kDim, codes.data());
        WidenRow(codes.data(), scale, kDim, row.data());
      }
      for (float& x : row) x = dtype == DType::kBF16 ? ToFloat(ToBf16(x)) : x;
      return row;
    };
    const auto rounded = [&](const Floats& all, int32_t j) {
      return round(Floats(all.begin() + j * kDim, all.begin() + (j + 1) * kDim));
    };
    for (int32_t h = 0; h < kHeads; ++h) {
      for (int32_t j = 0; j < kLength; ++j) {
        const bool written = std::find(positions.begin(), positions.end(), j) != positions.end();
        const bool blended = j == 3 || j == 64 || j == 149;
        for (const bool value : {false, true}) {
          const Floats old_row = rounded(value ? streams[h].v : streams[h].k, j);
          Floats want = written ? rounded(value ? fresh[h].v : fresh[h].k, j) : old_row;
          if (blended) FuseRow(old_row, want);
          const int32_t page = streams[h].page_table[j / 64];
          const std::byte* half = value ? pool.view().v(page) : pool.view().k(page);
          Floats got(kDim);
          LoadKvRow(dtype, kDim, half, j % 64, got.data());
          ASSERT_EQ(got, blended ? round(want) : want) << h << ", " << j;
        }
      }
    }
    args.row_ids = std::span(positions).first(1);  // row 3 is one, row 60 is not
    ExpectOk(cpu::FuseRows(context.ctx, args));
    args.row_ids = std::span(positions).subspan(1, 1);
    EXPECT_EQ(cpu::FuseRows(context.ctx, args).code(), absl::StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace spl::kernels
