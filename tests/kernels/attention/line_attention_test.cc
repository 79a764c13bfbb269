// Prefill attention over lines (VisibilityRule::kLines): against the definition, against dense attention when every
// tile is set, and beside heads that see everything or a band.
#include <algorithm>
#include <set>

#include "kernels/attention/attention.h"
#include "kernels/selection/loopserve/line_tiles.h"
#include "tests/kernels/support/paged_kv.h"
#include "tests/support/line_tile_words.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

struct HeadLines {
  std::vector<int32_t> columns;
  std::vector<uint64_t> tiles, masks;
  LineVisibility view;
};

HeadLines MakeLines(Random& random, const LineRows& rows, bool dense) {
  const int32_t n = rows.num_keys();
  std::set<int32_t> columns, offsets = {0};
  for (int32_t k = random.Int(0, 150); k > 0; --k) columns.insert(random.Int(0, n - 1));
  for (int32_t k = random.Int(0, 4); k > 0; --k) offsets.insert(random.Int(0, n - 1));
  HeadLines h;
  h.columns.assign(columns.begin(), columns.end());
  const std::vector<int32_t> o(offsets.begin(), offsets.end());
  h.view = {.first_position = rows.first_position,
            .num_rows = rows.num_rows,
            .tile_words = test::LineTileWords(n),
            .column_words = static_cast<int32_t>(h.columns.size() + 63) / 64};
  h.tiles.resize(static_cast<size_t>(h.view.num_row_tiles() * h.view.tile_words));
  h.masks.resize(static_cast<size_t>(h.view.num_row_tiles() * h.view.column_words));
  LinesToTiles({rows, h.columns, o, dense, h.view.tile_words, h.view.column_words, h.tiles.data(), h.masks.data()});
  h.columns.resize(static_cast<size_t>(64 * h.view.column_words));
  h.view.tiles = h.tiles.data();
  h.view.column_masks = h.masks.data();
  h.view.columns = h.columns.data();
  return h;
}

bool PageIsSeen(const HeadLines& h, int32_t page) {
  for (int32_t t = 0; t < h.view.num_row_tiles(); ++t) {
    if (h.tiles[static_cast<size_t>(t * h.view.tile_words + page / 64)] >> (page % 64) & 1) return true;
    for (int32_t i = 0; i < 64 * h.view.column_words; ++i) {
      if ((h.masks[static_cast<size_t>(t * h.view.column_words + i / 64)] >> (i % 64) & 1) &&
          h.columns[static_cast<size_t>(i)] / 64 == page)
        return true;
    }
  }
  return false;
}

struct Case {
  int32_t kv_heads, group, head_dim;
  DType dtype;
  LineRows rows;
};

// One sequence; every head has lines unless `other` says otherwise. Pages that no row sees are not resident.
struct Problem {
  Problem(Random& random, const Case& c, bool dense = false)
      : pool(c.dtype, c.head_dim, c.kv_heads * ((c.rows.num_keys() + 63) / 64) + 2),
        shape{c.kv_heads * c.group, c.kv_heads, c.head_dim, 1.0f / std::sqrt(static_cast<float>(c.head_dim))},
        rows(c.rows) {
    pool.Shuffle(random);
    for (int32_t h = 0; h < c.kv_heads; ++h) lines.push_back(MakeLines(random, rows, dense));
    for (int32_t h = 0; h < c.kv_heads; ++h) {
      streams.push_back(MakeStream(random, rows.num_keys(), c.head_dim));
      pool.Place(streams.back(), [&](int32_t page) { return !PageIsSeen(lines[static_cast<size_t>(h)], page); });
    }
    for (int32_t h = 0; h < c.kv_heads; ++h) {
      views.push_back(streams[static_cast<size_t>(h)].view());
      views.back().visibility = {.rule = VisibilityRule::kLines, .lines = &lines[static_cast<size_t>(h)].view};
    }
    for (int32_t i = 0; i < rows.num_rows; ++i) positions.push_back(rows.first_position + i);
    q = random.Normals(static_cast<size_t>(rows.num_rows) * shape.num_qo_heads * shape.head_dim);
  }

  struct Result {
    std::vector<float> out, lse;
  };
  template <typename Op>
  Result Run(const Op& op, const KernelContext& ctx, int32_t last_rows = 0) const {
    Result r{std::vector<float>(q.size(), -7), std::vector<float>(q.size() / shape.head_dim, -7)};
    const PrefillSequence sequence{0, rows.num_rows, positions, views};
    const absl::Status status = op(ctx, {.shape = shape,
                                         .pool = pool.view(),
                                         .q = q.data(),
                                         .q_row_stride = int64_t{shape.num_qo_heads} * shape.head_dim,
                                         .out = r.out.data(),
                                         .lse = r.lse.data(),
                                         .sequences = {&sequence, 1},
                                         .last_rows = last_rows});
    EXPECT_TRUE(status.ok()) << status;
    return r;
  }

  TestPool pool;
  AttentionShape shape;
  LineRows rows;
  std::vector<HeadLines> lines;
  std::vector<TestStream> streams;
  std::vector<HeadStreamView> views;
  std::vector<int32_t> positions;
  std::vector<float> q;
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const LineRows rows : {LineRows{0, 1}, LineRows{0, 64}, LineRows{0, 300}, LineRows{37, 29}, LineRows{1000, 200},
                              LineRows{4095, 130}}) {
    cases.push_back({2, 2, 64, DType::kBF16, rows});
    cases.push_back({1, 3, 24, DType::kF32, rows});
    cases.push_back({2, 2, 64, DType::kE4M3, rows});
  }
  return cases;
}

class LineAttention : public ::testing::TestWithParam<CpuIsa> {};

TEST_P(LineAttention, EqualsReference) {
  Random random(21);
  TestContext t(GetParam(), 3);
  for (const Case& c : Cases()) {
    const Problem p(random, c);
    const auto want = p.Run(ref::PrefillAttention, t.ctx), got = p.Run(cpu::PrefillAttention, t.ctx);
    ExpectClose(got.out, want.out, DType::kF32, "out");
    ExpectClose(got.lse, want.lse, DType::kF32, "lse");
  }
}

// Limit: every tile set is dense causal attention, bit by bit.
TEST_P(LineAttention, AllTilesAreDense) {
  Random random(22);
  TestContext t(GetParam(), 2);
  for (const Case& c : Cases()) {
    Problem p(random, c, true);
    const auto got = p.Run(cpu::PrefillAttention, t.ctx);
    for (HeadStreamView& view : p.views) view.visibility = {};
    const auto want = p.Run(cpu::PrefillAttention, t.ctx);
    EXPECT_TRUE(BitwiseEqual(got.out, want.out));
    EXPECT_TRUE(BitwiseEqual(got.lse, want.lse));
  }
}

TEST_P(LineAttention, StandsBesideOtherRulesAndTakesLastRows) {
  Random random(23);
  TestContext t(GetParam(), 2);
  Problem p(random, {3, 2, 64, DType::kBF16, {50, 170}}, true);
  const HeadLines some = MakeLines(random, p.rows, false);
  p.views[1].visibility = {.rule = VisibilityRule::kBand, .num_sinks = 5, .window = 40};
  p.views[2].visibility = {.rule = VisibilityRule::kLines, .lines = &some.view};
  const auto want = p.Run(ref::PrefillAttention, t.ctx), got = p.Run(cpu::PrefillAttention, t.ctx);
  ExpectClose(got.out, want.out, DType::kF32, "out");
  const auto last = p.Run(cpu::PrefillAttention, t.ctx, 90);
  const size_t row = static_cast<size_t>(p.shape.num_qo_heads) * p.shape.head_dim, first = (170 - 90) * row;
  EXPECT_TRUE(BitwiseEqual(std::span(last.out).subspan(first), std::span(got.out).subspan(first)));
  EXPECT_TRUE(
      std::all_of(last.out.begin(), last.out.begin() + static_cast<int64_t>(first), [](float x) { return x == -7; }));
}

// Tri-shape (docs/methods/baselines.md): a band, then the last rows again over everything.
TEST_P(LineAttention, TriShapeIsTwoCalls) {
  Random random(24);
  TestContext t(GetParam(), 2);
  Problem p(random, {2, 2, 64, DType::kBF16, {0, 500}}, true);
  for (HeadStreamView& view : p.views)
    view.visibility = {.rule = VisibilityRule::kBand, .num_sinks = 16, .window = 100};
  const auto band = p.Run(cpu::PrefillAttention, t.ctx);
  for (HeadStreamView& view : p.views) view.visibility = {};
  const auto last = p.Run(cpu::PrefillAttention, t.ctx, 100);
  const auto dense = p.Run(ref::PrefillAttention, t.ctx);
  const size_t row = static_cast<size_t>(p.shape.num_qo_heads) * p.shape.head_dim, first = 400 * row;
  ExpectClose(std::span(last.out).subspan(first), std::span(dense.out).subspan(first), DType::kF32, "last rows");
  EXPECT_EQ(last.out.front(), -7);
  EXPECT_NE(band.out.back(), dense.out.back());
}

TEST_P(LineAttention, ErrorsNameTheField) {
  Random random(25);
  TestContext t(GetParam(), 1);
  const Problem p(random, {1, 1, 64, DType::kF32, {10, 100}});
  const auto message = [&](const auto& change) {
    LineVisibility v = p.lines[0].view;
    std::vector<HeadStreamView> views = p.views;
    views[0].visibility.lines = &v;
    std::vector<int32_t> positions = p.positions;
    change(v, views, positions);
    const PrefillSequence sequence{0, static_cast<int32_t>(positions.size()), positions, views};
    std::vector<float> out(p.q.size());
    return std::string(cpu::PrefillAttention(t.ctx, {.shape = p.shape,
                                                     .pool = p.pool.view(),
                                                     .q = p.q.data(),
                                                     .q_row_stride = 64,
                                                     .out = out.data(),
                                                     .sequences = {&sequence, 1}})
                           .message());
  };
  const auto has = [&](const char* what, const auto& change) {
    EXPECT_NE(message(change).find(what), std::string::npos) << what << ": " << message(change);
  };
  using Views = std::vector<HeadStreamView>;
  using Positions = std::vector<int32_t>;
  EXPECT_EQ(message([](LineVisibility&, Views&, Positions&) {}), "");
  has("`lines`", [](LineVisibility&, Views& views, Positions&) { views[0].visibility.lines = nullptr; });
  has("rows", [](LineVisibility& v, Views&, Positions&) { v.num_rows = 99; });
  has("position", [](LineVisibility& v, Views&, Positions&) { v.first_position = 9; });
  has("positions", [](LineVisibility&, Views&, Positions& positions) { positions[5] = positions[4]; });
  has("tile_words", [](LineVisibility& v, Views&, Positions&) { v.tile_words = 0; });
  has("tiles", [](LineVisibility& v, Views&, Positions&) { v.tiles = nullptr; });
  has("column_masks", [](LineVisibility& v, Views&, Positions&) { v.column_words = 1, v.column_masks = nullptr; });
  const DecodeAttentionArgs decode{
      .shape = p.shape, .pool = p.pool.view(), .q = p.q.data(), .q_row_stride = 64, .streams = p.views};
  EXPECT_NE(std::string(ValidateDecodeAttention(decode).message()).find("prefill"), std::string::npos);
}

INSTANTIATE_TEST_SUITE_P(Isa, LineAttention, ::testing::ValuesIn(MachineIsas()), IsaParam);

}  // namespace
}  // namespace spl::kernels
