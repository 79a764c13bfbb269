// The operations of decode steps that choose tokens, on the CUDA backend against the reference: staged batches, steps,
// recorded graphs, attention over the lists. Skipped where there is no GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include "kernels/backend/backend.h"
#include "tests/kernels/support/kernel_test_util.h"
#include "tests/kernels/support/selecting_batch.h"
#include "tests/kernels/support/selecting_device.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

struct HostLists {
  std::vector<int32_t> tokens, counts;
  std::vector<float> weights;
  std::vector<SelectingSequence> views;
  SelectTokensArgs args;

  HostLists(SelectingBatch& b, int64_t stride, int64_t weights_stride)
      : tokens(b.num_streams() * static_cast<size_t>(stride), 0),
        counts(b.num_streams(), 0),
        weights(b.num_streams() * static_cast<size_t>(weights_stride), 0.0f) {
    for (TestSequence& s : b.sequences()) views.push_back(s.view());
    args.shape = b.shape().attention();
    args.pool = b.pool().view();
    args.num_dims = b.shape().num_dims;
    args.q = b.q().data();
    args.q_row_stride = b.shape().q_width();
    args.sequences = views;
    args.lists = {tokens.data(), counts.data(), stride};
    args.weights = weights.data();
    args.weights_stride = weights_stride;
  }
};

using CudaSelectionTest = CudaSelecting;

struct Case {
  SelectingShape shape;
  std::vector<std::pair<int32_t, int32_t>> lengths;
  int32_t budget;
  int steps;
  double held = 0;                              // every other sequence only holds so much of what it had
  std::optional<DType> q_dtype = std::nullopt;  // unless it is DerivedKeyType
};

// Every other sequence, from the second on.
void HoldSome(Random& random, SelectingBatch& b, double share) {
  for (size_t i = 1; i < b.sequences().size() && share > 0; i += 2) b.HoldSome(random, i, i % 4 == 1 ? 64 : 3, share);
}

// Steps as a decode engine makes them, recorded from the second one on where nothing but staged memory changes.
void RunCase(const Backend& cuda, const Case& c, uint64_t seed) {
  Random random(seed), steps(seed + 1);
  SelectingBatch b(random, c.shape, c.lengths);
  b.Write();
  HoldSome(random, b, c.held);
  for (float& x : b.q()) x = ToFloat(ToBf16(x));
  int64_t longest = 0;
  for (const auto& [kv_len, max_len] : c.lengths) longest = std::max<int64_t>(longest, max_len);
  DeviceSide device(cuda, b, c.budget, longest, c.q_dtype.value_or(DerivedKeyType(c.shape.dtype)));
  for (int step = 0; step < c.steps; ++step) {
    for (TestSequence& s : b.sequences()) {
      s.step.selects = steps.Int(0, 5) > 0;
      s.step.refresh |= steps.Int(0, 3) == 0;
      s.budget = steps.Int(1, c.budget);
      s.recent = steps.Int(1, s.budget);
    }
    for (float& x : b.q()) x = ToFloat(ToBf16(steps.Normal()));
    device.Stage();
    ExpectOk(device.session().RunStep(1, [&] { return cuda.SelectTokens(device.ctx(), device.Args()); }));
    HostLists want(b, c.budget, longest);
    ExpectOk(ref::SelectTokens({}, want.args));
    const std::vector<std::byte> pool = device.Pool();
    ASSERT_TRUE(std::ranges::equal(pool, b.pool().bytes())) << "compact keys, seed " << seed << ", step " << step;
    const std::vector<int32_t> tokens = device.Tokens(), counts = device.Counts();
    const std::vector<float> weights = device.Weights();
    for (size_t stream = 0; stream < b.num_streams(); ++stream) {
      const TestSequence& s = b.sequence_of(stream);
      if (!s.step.selects) continue;
      const std::string what = "seed " + std::to_string(seed) + ", step " + std::to_string(step) + ", stream " +
                               std::to_string(stream) + ", kv_len " + std::to_string(s.kv_len) + ", budget " +
                               std::to_string(s.budget);
      const int32_t* valid =
          s.dims.data() + (stream % c.shape.kv_heads * 2 + (s.step.parity ^ s.step.refresh)) * c.shape.num_dims;
      const std::vector<int32_t> dims = device.Dims(stream / c.shape.kv_heads);
      EXPECT_TRUE(std::equal(valid, valid + c.shape.num_dims, dims.data() + (valid - s.dims.data()))) << what;
      ASSERT_EQ(counts[stream], want.counts[stream]) << what;
      const size_t head = stream % static_cast<size_t>(c.shape.kv_heads);
      const int32_t num = s.candidates(head);
      const std::span<const float> w = std::span(want.weights).subspan(stream * longest, static_cast<size_t>(num));
      ExpectClose(std::span(weights).subspan(stream * longest, static_cast<size_t>(num)), w, DType::kF32,
                  what + " weights");
      EXPECT_TRUE(SameChoice(s.NumbersOf(head, std::span(tokens).subspan(stream * c.budget, counts[stream])),
                             s.NumbersOf(head, want.args.lists.of(static_cast<int64_t>(stream))), w, num - s.recent))
          << what;
    }
    for (size_t i = 0; i < b.sequences().size(); ++i) {
      TestSequence& s = b.sequences()[i];
      if (s.step.selects) s.Advance();
      if (steps.Int(0, 3) > 0 && s.kv_len < s.max_len) {
        b.Append(i);
        device.UploadToken(i, s.kv_len - 1);
      }
    }
  }
}

// Lengths, and how far they grow: around the ends of tiles and of compact pages.
const std::vector<std::pair<int32_t, int32_t>> kMixed = {{1, 20},      {63, 90},  {64, 80},
                                                         {1000, 1030}, {37, 300}, {2100, 2130}};

TEST_F(CudaSelectionTest, TensorCoreShapesEqualTheReference) {
  uint64_t seed = 700;
  const DType bf16 = DType::kBF16;
  RunCase(*cuda_, {{2, 4, 128, 16, bf16}, kMixed, 200, 14}, ++seed);
  RunCase(*cuda_, {{1, 1, 64, 16, bf16}, kMixed, 64, 8}, ++seed);
  RunCase(*cuda_, {{1, 16, 128, 16, bf16}, kMixed, 128, 6}, ++seed);
  RunCase(*cuda_, {{2, 9, 64, 16, bf16}, kMixed, 300, 6}, ++seed);
  RunCase(*cuda_, {{2, 4, 128, 16, bf16}, {{16384, 16400}, {8191, 8200}}, 2048, 5}, ++seed);
  RunCase(*cuda_, {{1, 4, 128, 16, bf16}, {{70001, 70020}}, 2048, 4}, ++seed);
}

TEST_F(CudaSelectionTest, SparseStreamsEqualTheReference) {
  uint64_t seed = 730;
  const DType bf16 = DType::kBF16;
  RunCase(*cuda_, {{2, 4, 128, 16, bf16}, kMixed, 200, 14, 0.5}, ++seed);
  RunCase(*cuda_, {{2, 9, 64, 16, bf16}, kMixed, 300, 10, 0.8}, ++seed);
  RunCase(*cuda_, {{1, 1, 64, 16, bf16}, kMixed, 20, 10, 0}, ++seed);
  RunCase(*cuda_, {{2, 4, 128, 16, bf16}, {{400, 420}, {16384, 16420}, {8191, 8200}}, 512, 40, 0.25}, ++seed);
  RunCase(*cuda_, {{1, 4, 128, 16, bf16}, {{10, 20}, {70001, 70020}}, 2048, 6, 0.7}, ++seed);  // a list of many pages
  RunCase(*cuda_, {{2, 2, 64, 8, DType::kF32}, kMixed, 200, 10, 0.5}, ++seed);
  RunCase(*cuda_, {{1, 3, 96, 96, bf16}, kMixed, 64, 8, 0.3}, ++seed);
}

// What is listed, and the ends of it that a step asks for; everybody else's lists stay.
TEST_F(CudaSelectionTest, ListsOfCandidatesEqualTheReference) {
  for (const uint64_t seed : {770u, 771u, 772u, 773u}) {
    Random random(seed);
    const DType dtype = seed == 772 ? DType::kF32 : seed == 773 ? DType::kE4M3 : DType::kBF16;
    const SelectingShape shape{2, 1, seed == 771 ? 40 : 64, 8, dtype};
    SelectingBatch b(random, shape, {{50, 60}, {2, 20}, {900, 920}, {30000, 30020}, {64, 80}, {9000, 9020}});
    b.Write();
    HoldSome(random, b, 0.6);
    constexpr int64_t kStride = 20000;
    DeviceSide device(*cuda_, b, kStride, 1, DerivedKeyType(shape.dtype));
    for (int step = 0; step < 8; ++step) {
      device.SetLists(std::vector<int32_t>(b.num_streams() * kStride, -9), std::vector<int32_t>(b.num_streams(), -9));
      for (TestSequence& s : b.sequences()) {
        s.step.selects = random.Int(0, 3) == 0;
        s.step.num_sinks = random.Int(0, 40);
        s.step.window = random.Int(0, 2) == 0 ? 0 : random.Int(1, 10000);
      }
      device.Stage();
      const ListCandidatesArgs on_device{
          .pool = device.pool(), .num_kv_heads = shape.kv_heads, .lists = device.lists(), .layer = DeviceSide::kLayer};
      ExpectOk(device.session().RunStep(21, [&] { return cuda_->ListCandidates(device.ctx(), on_device); }));
      HostLists want(b, kStride, 1);
      std::ranges::fill(want.tokens, -9);
      std::ranges::fill(want.counts, -9);
      ExpectOk(ref::ListCandidates({}, {.pool = b.pool().view(),
                                        .num_kv_heads = shape.kv_heads,
                                        .sequences = want.views,
                                        .lists = want.args.lists}));
      EXPECT_EQ(device.Counts(), want.counts) << "seed " << seed << ", step " << step;
      EXPECT_EQ(device.Tokens(), want.tokens) << "seed " << seed << ", step " << step;
      for (size_t i = 0; i < b.sequences().size(); ++i) {
        b.Append(i);
        device.UploadToken(i, b.sequences()[i].kv_len - 1);
      }
    }
  }
}

TEST_F(CudaSelectionTest, OtherShapesEqualTheReference) {
  uint64_t seed = 750;
  const std::vector<std::pair<int32_t, int32_t>> mixed = {{1, 20}, {63, 90}, {500, 530}, {37, 300}, {2100, 2130}};
  RunCase(*cuda_, {{2, 2, 64, 8, DType::kF32}, mixed, 200, 8}, ++seed);
  RunCase(*cuda_, {{1, 3, 96, 96, DType::kBF16}, mixed, 64, 6}, ++seed);
  RunCase(*cuda_, {{1, 5, 32, 4, DType::kF32}, mixed, 128, 6}, ++seed);
  RunCase(*cuda_, {{1, 4, 128, 16, DType::kF32}, {{33000, 33010}}, 1024, 3}, ++seed);
  RunCase(*cuda_, {{1, 20, 128, 16, DType::kBF16}, mixed, 64, 4}, ++seed);
}

// Compact keys of bf16 beside codes: by tensor cores and by plain loops, with rows of 16-byte chunks and with others,
// and with compact pages that hold 1, 2 and up to 16 tiles.
TEST_F(CudaSelectionTest, ShapesOfCodesEqualTheReference) {
  uint64_t seed = 810;
  const DType e4m3 = DType::kE4M3;
  RunCase(*cuda_, {{2, 4, 128, 16, e4m3}, kMixed, 200, 14}, ++seed);
  RunCase(*cuda_, {{1, 1, 64, 16, e4m3}, kMixed, 64, 8}, ++seed);
  RunCase(*cuda_, {{2, 9, 64, 16, e4m3}, kMixed, 300, 6}, ++seed);
  RunCase(*cuda_, {{1, 2, 40, 16, e4m3}, kMixed, 100, 8}, ++seed);
  RunCase(*cuda_, {{2, 4, 128, 16, e4m3}, {{16384, 16400}, {8191, 8200}}, 2048, 5}, ++seed);
  RunCase(*cuda_, {{2, 4, 128, 8, e4m3}, kMixed, 200, 8}, ++seed);
  RunCase(*cuda_, {{2, 2, 64, 8, e4m3}, kMixed, 200, 8}, ++seed);
  RunCase(*cuda_, {{1, 3, 40, 20, e4m3}, kMixed, 64, 8}, ++seed);
  RunCase(*cuda_, {{1, 3, 96, 96, e4m3}, kMixed, 64, 6}, ++seed);
  RunCase(*cuda_, {{1, 20, 128, 16, e4m3}, kMixed, 64, 4}, ++seed);
  RunCase(*cuda_, {{1, 4, 128, 8, e4m3}, {{33000, 33010}}, 1024, 3}, ++seed);
  RunCase(*cuda_, {{2, 2, 64, 16, e4m3}, kMixed, 100, 6, 0, DType::kF32}, ++seed);
}

TEST_F(CudaSelectionTest, SparseStreamsOfCodesEqualTheReference) {
  uint64_t seed = 830;
  const DType e4m3 = DType::kE4M3;
  RunCase(*cuda_, {{2, 4, 128, 16, e4m3}, kMixed, 200, 14, 0.5}, ++seed);
  RunCase(*cuda_, {{2, 9, 64, 16, e4m3}, kMixed, 300, 10, 0.8}, ++seed);
  RunCase(*cuda_, {{2, 4, 64, 16, e4m3}, {{400, 420}, {16384, 16420}, {8191, 8200}}, 512, 20, 0.25}, ++seed);
  RunCase(*cuda_, {{2, 2, 64, 8, e4m3}, kMixed, 200, 10, 0.5}, ++seed);
  RunCase(*cuda_, {{1, 5, 128, 8, e4m3}, kMixed, 100, 8, 0.4}, ++seed);
  RunCase(*cuda_, {{1, 3, 40, 20, e4m3}, kMixed, 64, 8, 0.3}, ++seed);
}

// Weights of which many are equal: ties to the lower position, however many candidates that makes.
TEST_F(CudaSelectionTest, TiesGoToTheLowerPosition) {
  for (const int period : {1, 2, 7, 1000}) {
    Random random(790);
    SelectingBatch b(random, {2, 4, 128, 16}, {{20000, 20000}, {300, 300}});
    for (size_t stream = 0; stream < b.num_streams(); ++stream) {
      TestStream& s = b.stream(stream);
      for (size_t i = static_cast<size_t>(period) * 128; i < s.k.size(); ++i) s.k[i] = s.k[i - period * 128];
    }
    b.Write();
    for (float& x : b.q()) x = ToFloat(ToBf16(x));
    for (TestSequence& s : b.sequences()) s.budget = 200, s.recent = 3;
    DeviceSide device(*cuda_, b, 200, 20000, DType::kBF16);
    device.Stage();
    ExpectOk(cuda_->SelectTokens(device.ctx(), device.Args()));
    const std::vector<float> weights = device.Weights();
    const std::vector<int32_t> tokens = device.Tokens();
    for (size_t stream = 0; stream < b.num_streams(); ++stream) {
      const int32_t kv_len = b.sequence_of(stream).kv_len;
      std::vector<int32_t> want(static_cast<size_t>(kv_len - 3));
      std::iota(want.begin(), want.end(), 0);
      const float* w = &weights[stream * 20000];
      std::stable_sort(want.begin(), want.end(), [&](int32_t x, int32_t y) { return w[x] > w[y]; });
      want.resize(197);
      for (int32_t j = kv_len - 3; j < kv_len; ++j) want.push_back(j);
      std::sort(want.begin(), want.end());
      EXPECT_TRUE(std::ranges::equal(std::span(tokens).subspan(stream * 200, 200), want))
          << "period " << period << ", stream " << stream;
    }
  }
}

TEST_F(CudaSelectionTest, BatchAndBucketChangeNoBit) {
  const auto run = [&](const std::vector<bool>& selects) {
    Random random(800);
    SelectingBatch b(random, {2, 4, 128, 16}, {{900, 900}, {3000, 3000}, {12000, 12000}});
    b.Write();
    for (float& x : b.q()) x = ToFloat(ToBf16(x));
    for (size_t i = 0; i < 3; ++i) b.sequences()[i].step.selects = selects[i];
    DeviceSide device(*cuda_, b, 64, 12000, DType::kBF16);
    device.Stage();
    ExpectOk(cuda_->SelectTokens(device.ctx(), device.Args()));
    return device.Weights();
  };
  const std::vector<float> all = run({true, true, true});
  for (size_t only = 0; only < 3; ++only) {
    const std::vector<float> alone = run({only == 0, only == 1, only == 2});
    const size_t kv_len = only == 0 ? 900 : only == 1 ? 3000 : 12000;
    for (size_t stream = 2 * only; stream < 2 * only + 2; ++stream) {
      EXPECT_TRUE(BitwiseEqual(std::span(alone).subspan(stream * 12000, kv_len),
                               std::span(all).subspan(stream * 12000, kv_len)));
    }
  }
}

// Attention over lists against the reference; the same bits for the identity list whatever made it; streams that see
// everything or a band beside it.
TEST_F(CudaSelectionTest, AttentionOverLists) {
  uint64_t seed = 850;
  struct Shape {
    SelectingShape shape;
    std::vector<std::pair<int32_t, int32_t>> lengths;
    int32_t budget;
  };
  const Shape shapes[] = {{{2, 4, 128, 16, DType::kBF16}, {{1, 1}, {63, 63}, {700, 700}, {5000, 5000}}, 300},
                          {{2, 1, 64, 16, DType::kBF16}, {{65, 65}, {2000, 2000}}, 129},
                          {{1, 16, 128, 16, DType::kBF16}, {{4500, 4500}, {300, 300}}, 4400},
                          {{2, 2, 64, 16, DType::kF32}, {{1, 1}, {65, 65}, {900, 900}}, 200},
                          {{1, 3, 96, 96, DType::kBF16}, {{600, 600}}, 128},
                          {{2, 4, 128, 16, DType::kE4M3}, {{1, 1}, {63, 63}, {700, 700}, {5000, 5000}}, 300},
                          {{2, 1, 64, 16, DType::kE4M3}, {{65, 65}, {2000, 2000}}, 129},
                          {{1, 16, 128, 16, DType::kE4M3}, {{4500, 4500}, {300, 300}}, 4400},
                          {{1, 3, 96, 96, DType::kE4M3}, {{600, 600}}, 128}};
  for (const Shape& shape : shapes) {
    Random random(++seed);
    SelectingBatch b(random, shape.shape, shape.lengths);
    b.Write();
    for (float& x : b.q()) x = ToFloat(ToBf16(x));
    for (TestSequence& s : b.sequences()) s.budget = shape.budget, s.recent = 1;
    DeviceSide device(*cuda_, b, 5000, 5000, DerivedKeyType(shape.shape.dtype));
    const int32_t heads = shape.shape.kv_heads;
    std::vector<int32_t> tokens(b.num_streams() * 5000), counts(b.num_streams());
    const auto fill = [&](bool identity) {
      for (size_t stream = 0; stream < b.num_streams(); ++stream) {
        const int32_t kv_len = b.sequence_of(stream).kv_len;
        std::vector<int32_t> all(static_cast<size_t>(kv_len));
        std::iota(all.begin(), all.end(), 0);
        if (!identity) {
          std::vector<int32_t> some;
          std::ranges::sample(all, std::back_inserter(some), std::min(kv_len, shape.budget), random.engine());
          all = some;
        }
        std::ranges::copy(all, tokens.begin() + static_cast<int64_t>(stream) * 5000);
        counts[stream] = static_cast<int32_t>(all.size());
      }
      device.SetLists(tokens, counts);
    };
    const auto reference = [&](const std::vector<HeadStreamView>& streams) {
      std::vector<float> out(b.q().size());
      DecodeAttentionArgs a;
      a.shape = b.shape().attention();
      a.pool = b.pool().view();
      a.q = b.q().data();
      a.q_row_stride = b.shape().q_width();
      a.out = out.data();
      a.streams = streams;
      a.lists = {tokens.data(), counts.data(), 5000};
      ExpectOk(ref::DecodeAttention({}, a));
      return out;
    };
    // By the rule of the whole launch, then by plans.
    std::vector<HeadStreamView> streams;
    std::vector<HeadVisibility> plan;
    for (size_t stream = 0; stream < b.num_streams(); ++stream)
      streams.push_back({b.stream(stream).page_table, b.sequence_of(stream).kv_len, {VisibilityRule::kSelected}});
    for (size_t i = 0; i < b.sequences().size(); ++i) {
      for (int32_t layer = 0; layer < DeviceSide::kLayers; ++layer) {
        for (int32_t h = 0; h < heads; ++h) plan.push_back({VisibilityRule::kSelected});
      }
    }
    fill(false);
    device.FillOut(0xff);
    device.Stage(plan, 1);
    ExpectOk(cuda_->DecodeAttention(device.ctx(), device.AttentionArgs(streams)));
    const std::vector<float> whole = device.Out();
    ExpectClose(whole, reference(streams), DerivedKeyType(shape.shape.dtype),
                "rule of the launch, seed " + std::to_string(seed));
    DecodeAttentionArgs planned = device.AttentionArgs(streams);
    planned.staged_plans = true;
    device.FillOut(0xff);
    ExpectOk(device.session().RunStep(2, [&] { return cuda_->DecodeAttention(device.ctx(), planned); }));
    EXPECT_TRUE(BitwiseEqual(device.Out(), whole)) << "seed " << seed;
    // A third of the streams sees everything, a third a band; the others' bits stay.
    for (size_t stream = 0; stream < b.num_streams(); ++stream) {
      HeadVisibility v = {VisibilityRule::kSelected};
      if (stream % 3 == 1) v = {VisibilityRule::kFull};
      if (stream % 3 == 2) v = {VisibilityRule::kBand, 4, 100, {}};
      streams[stream].visibility = v;
      plan[(stream / heads * DeviceSide::kLayers + DeviceSide::kLayer) * heads + stream % heads] = v;
    }
    device.Stage(plan, 2);
    planned.streams = streams;
    for (int run = 0; run < 3; ++run) {
      device.FillOut(0xff);
      ExpectOk(device.session().RunStep(3, [&] { return cuda_->DecodeAttention(device.ctx(), planned); }));
      const std::vector<float> mixed = device.Out();
      ExpectClose(mixed, reference(streams), DerivedKeyType(shape.shape.dtype), "mixed, seed " + std::to_string(seed));
      const size_t width = static_cast<size_t>(shape.shape.group) * shape.shape.head_dim;
      for (size_t stream = 0; stream < b.num_streams(); stream += 3)
        EXPECT_TRUE(BitwiseEqual(std::span(mixed).subspan(stream * width, width),
                                 std::span(whole).subspan(stream * width, width)));
    }
    // The identity list is every position, and close to dense.
    fill(true);
    std::ranges::fill(plan, HeadVisibility{VisibilityRule::kSelected});
    device.Stage(plan, 3);
    std::vector<HeadStreamView> full = streams;
    for (HeadStreamView& s : streams) s.visibility = {VisibilityRule::kSelected};
    for (HeadStreamView& s : full) s.visibility = {VisibilityRule::kFull};
    ExpectOk(cuda_->DecodeAttention(device.ctx(), device.AttentionArgs(streams)));
    const std::vector<float> identity = device.Out();
    ExpectClose(identity, reference(full), DerivedKeyType(shape.shape.dtype), "identity, seed " + std::to_string(seed));
    // Made by SelectTokens: the same bits.
    for (TestSequence& s : b.sequences()) s.budget = 5000;
    device.Stage(plan, 3);
    ExpectOk(cuda_->SelectTokens(device.ctx(), device.Args(false)));
    ExpectOk(cuda_->DecodeAttention(device.ctx(), device.AttentionArgs(streams)));
    EXPECT_TRUE(BitwiseEqual(device.Out(), identity)) << "seed " << seed;
  }
}

// Quest: bounds, scores and whole granules; and given scores of single positions.
TEST_F(CudaSelectionTest, PageBoundsAndTopTokensEqualTheReference) {
  uint64_t seed = 880;
  const SelectingShape shapes[] = {
      {2, 4, 128, 16, DType::kBF16}, {2, 4, 128, 16, DType::kBF16}, {1, 1, 64, 16, DType::kF32},
      {1, 1, 64, 16, DType::kF32},   {1, 7, 40, 8, DType::kBF16},   {1, 7, 40, 8, DType::kBF16},
      {2, 4, 128, 16, DType::kE4M3}, {2, 4, 128, 16, DType::kE4M3}, {1, 7, 48, 8, DType::kE4M3},
      {1, 7, 48, 8, DType::kE4M3},   {2, 12, 64, 16, DType::kBF16}, {2, 12, 64, 16, DType::kBF16},
      {1, 1, 128, 16, DType::kE4M3}, {1, 1, 128, 16, DType::kE4M3}};
  for (const SelectingShape& shape : shapes) {  // each without lists, then with some
    Random random(++seed), steps(seed + 100);
    const std::vector<std::pair<int32_t, int32_t>> lengths = {{1, 40}, {15, 40}, {16, 64}, {1000, 1100}, {9000, 9040}};
    SelectingBatch b(random, shape, lengths, BoundPageTokens(shape.dtype));
    b.Write();
    HoldSome(random, b, seed % 2 == 0 ? 0.4 : 0);
    constexpr int64_t kStride = 9040 / kBoundTokens + 1, kBudget = 512;
    DeviceSide device(*cuda_, b, kBudget, 9040, DerivedKeyType(shape.dtype));
    for (int step = 0; step < 6; ++step) {
      for (TestSequence& s : b.sequences()) {
        s.step.selects = steps.Int(0, 5) > 0;
        s.budget = steps.Int(1, kBudget / kBoundTokens) * kBoundTokens;
        s.recent = steps.Int(1, s.budget);
      }
      for (float& x : b.q()) x = ToFloat(ToBf16(steps.Normal()));
      device.Stage();
      const SelectTokensArgs like = device.Args();  // its weights are the scores here
      PageBoundScoresArgs bounds{.shape = like.shape,
                                 .pool = like.pool,
                                 .q = like.q,
                                 .q_row_stride = like.q_row_stride,
                                 .scores = like.weights,
                                 .scores_stride = kStride,
                                 .layer = DeviceSide::kLayer};
      TopTokensArgs top{.scores = like.weights,
                        .scores_stride = kStride,
                        .granularity = kBoundTokens,
                        .num_kv_heads = shape.kv_heads,
                        .pool = like.pool,
                        .lists = device.lists(),
                        .layer = DeviceSide::kLayer};
      ExpectOk(device.session().RunStep(4, [&] {
        const absl::Status status = cuda_->PageBoundScores(device.ctx(), bounds);
        return status.ok() ? cuda_->TopTokens(device.ctx(), top) : status;
      }));
      HostLists host(b, kBudget, kStride);
      bounds.pool = b.pool().view();
      bounds.q = b.q().data();
      bounds.sequences = host.views;
      bounds.scores = host.weights.data();
      ExpectOk(ref::PageBoundScores({}, bounds));
      ASSERT_TRUE(std::ranges::equal(device.Pool(), b.pool().bytes())) << "seed " << seed << ", step " << step;
      // The device's own scores, so that the choice is the same to the last position.
      std::vector<float> scores = device.Weights();
      top.scores = scores.data();
      top.pool = b.pool().view();
      top.sequences = host.views;
      top.lists = host.args.lists;
      ExpectOk(ref::TopTokens({}, top));
      const std::vector<int32_t> tokens = device.Tokens(), counts = device.Counts();
      for (size_t stream = 0; stream < b.num_streams(); ++stream) {
        const TestSequence& s = b.sequence_of(stream);
        if (!s.step.selects) continue;
        const std::string what = "seed " + std::to_string(seed) + ", step " + std::to_string(step) + ", stream " +
                                 std::to_string(stream) + ", kv_len " + std::to_string(s.kv_len);
        const int32_t num = s.candidates(stream % static_cast<size_t>(shape.kv_heads));
        const size_t granules = static_cast<size_t>((num + kBoundTokens - 1) / kBoundTokens);
        ExpectClose(std::span(scores).subspan(stream * kStride, granules),
                    std::span(host.weights).subspan(stream * kStride, granules), DType::kF32, what);
        EXPECT_TRUE(std::ranges::equal(std::span(tokens).subspan(stream * kBudget, counts[stream]),
                                       top.lists.of(static_cast<int64_t>(stream))))
            << what;
      }
      for (size_t i = 0; i < lengths.size(); ++i) {
        TestSequence& s = b.sequences()[i];
        if (s.step.selects) s.Advance();
        if (s.kv_len < s.max_len) {
          b.Append(i);
          device.UploadToken(i, s.kv_len - 1);
        }
      }
    }
  }
}

TEST_F(CudaSelectionTest, TopTokensOfUnusualScores) {
  Random random(895);
  SelectingBatch b(random, {1, 1, 64, 16}, {{1, 1}, {5000, 5000}, {40000, 40000}, {33333, 33333}});
  b.Write();
  for (int round = 0; round < 6; ++round) {
    const int32_t budget = round < 3 ? 300 : 5000;
    DeviceSide device(*cuda_, b, budget, 40000, DType::kBF16);
    for (TestSequence& s : b.sequences()) s.budget = budget, s.recent = random.Int(1, budget);
    std::vector<float> scores = random.Normals(4 * 40000);
    for (size_t i = 0; i < scores.size(); ++i) {
      if (round % 3 == 1) scores[i] = static_cast<float>(random.Int(0, 3));
      if (round % 3 == 2) scores[i] = 1.0f + 1e-6f * scores[i];
      if (random.Int(0, 999) == 0) scores[i] = std::numeric_limits<float>::quiet_NaN();
      if (random.Int(0, 999) == 0) scores[i] = std::numeric_limits<float>::infinity();
    }
    device.Stage();
    float* on_device = device.Args().weights;
    ExpectOk(cuda_->Copy(CopyKind::kUpload, on_device, scores.data(), scores.size() * 4));
    TopTokensArgs top{.scores = on_device,
                      .scores_stride = 40000,
                      .num_kv_heads = 1,
                      .lists = device.lists(),
                      .layer = DeviceSide::kLayer};
    ExpectOk(cuda_->TopTokens(device.ctx(), top));
    HostLists host(b, budget, 1);
    top.scores = scores.data();
    top.sequences = host.views;
    top.lists = host.args.lists;
    ExpectOk(ref::TopTokens({}, top));
    const std::vector<int32_t> tokens = device.Tokens(), counts = device.Counts();
    EXPECT_EQ(counts, host.counts);
    for (size_t stream = 0; stream < 4; ++stream) {
      EXPECT_TRUE(std::ranges::equal(std::span(tokens).subspan(stream * budget, counts[stream]),
                                     top.lists.of(static_cast<int64_t>(stream))))
          << "round " << round << ", stream " << stream;
    }
  }
}

// LoopServe: sequences that begin to record one after the other, so that steps record, join and choose side by side.
struct WindowCase {
  SelectingShape shape;
  std::vector<int32_t> lengths;  // at the first step
  int32_t window, budget, steps;
  double held = 0;
};

class WindowBatch {
 public:
  WindowBatch(Random& random, const WindowCase& c)
      : c_(c), max_len_(*std::ranges::max_element(c.lengths) + c.steps), since_(c.lengths.size(), -1) {
    const QueryWindow layout{.head_dim = c.shape.head_dim,
                             .group = c.shape.group,
                             .window = c.window,
                             .budget = c.budget,
                             .query_dtype = DType::kF32,  // the reference's; the device's are no longer
                             .page_bytes = KvPageBytes(c.shape.dtype, c.shape.head_dim)};
    std::vector<std::pair<int32_t, int32_t>> lengths;
    for (const int32_t length : c.lengths) lengths.emplace_back(length, max_len_);
    const auto pages = static_cast<int32_t>(layout.num_pages());
    batch_ = std::make_unique<SelectingBatch>(random, c.shape, lengths, std::max(max_len_ / pages, 1));
    batch_->Write();
    HoldSome(random, *batch_, c.held);
    for (TestSequence& s : batch_->sequences()) s.budget = c.budget, s.recent = std::min(c.budget, 3);
    for (TestSequence& s : batch_->sequences()) s.step = {.listed = !s.listed.empty()};
  }

  // What sequence i does in step `step`; it begins to record in step i.
  void Plan(int32_t step) {
    chooses_ = false;
    for (size_t i = 0; i < since_.size(); ++i) {
      const int32_t recorded = step - static_cast<int32_t>(i);
      TestSequence& s = batch_->sequences()[i];
      if (recorded < 0) continue;
      if (since_[i] >= 0) ++since_[i];
      const bool refresh = recorded + 1 >= c_.window && (since_[i] < 0 || since_[i] == c_.window);
      if (refresh) since_[i] = 0;
      s.step = {.selects = since_[i] >= 0,
                .refresh = refresh,
                .compact_len = recorded,
                .records = true,
                .listed = !s.listed.empty()};
      chooses_ |= refresh;
    }
  }
  QueryWindowArgs Args(const SelectTokensArgs& like) const {
    return {.shape = like.shape,
            .pool = like.pool,
            .window = c_.window,
            .q = like.q,
            .q_row_stride = like.q_row_stride,
            .sequences = like.sequences,
            .scores = like.weights,
            .scores_stride = like.weights_stride,
            .lists = like.lists,
            .layer = like.layer,
            .chooses = chooses_,
            .listed = c_.held > 0};
  }
  SelectingBatch& batch() { return *batch_; }
  bool chooses() const { return chooses_; }
  int32_t max_len() const { return max_len_; }
  int64_t stride() const { return int64_t{c_.budget} + c_.window; }

 private:
  const WindowCase c_;
  const int32_t max_len_;
  std::vector<int32_t> since_;
  bool chooses_ = false;
  std::unique_ptr<SelectingBatch> batch_;
};

void RunWindowCase(const Backend& cuda, const WindowCase& c, uint64_t seed) {
  Random random(seed), steps(seed + 1);
  WindowBatch w(random, c);
  SelectingBatch& b = w.batch();
  b.sequences()[0].compact[0].clear();  // a head that never chooses
  const int64_t stride = w.stride(), longest = w.max_len();
  DeviceSide device(cuda, b, stride, longest, DerivedKeyType(c.shape.dtype));
  device.SetLists(std::vector<int32_t>(b.num_streams() * static_cast<size_t>(stride), -9),
                  std::vector<int32_t>(b.num_streams(), -9));
  std::vector<std::vector<int32_t>> before(b.num_streams());
  for (int32_t step = 0; step < c.steps; ++step) {
    w.Plan(step);
    for (float& x : b.q()) x = steps.Normal() * (c.shape.dtype == DType::kF32 ? 1.0f : 2.0f);
    if (c.shape.dtype != DType::kF32) {
      for (float& x : b.q()) x = ToFloat(ToBf16(x));
    }
    device.Stage();
    const QueryWindowArgs args = w.Args(device.Args());
    ExpectOk(
        device.session().RunStep(w.chooses() ? 12 : 11, [&] { return cuda.ChooseByQueryWindow(device.ctx(), args); }));
    HostLists want(b, stride, longest);
    ExpectOk(ref::ChooseByQueryWindow({}, w.Args(want.args)));
    const std::vector<int32_t> tokens = device.Tokens(), counts = device.Counts();
    const std::vector<float> scores = device.Weights();
    for (size_t stream = 0; stream < b.num_streams(); ++stream) {
      const TestSequence& s = b.sequence_of(stream);
      const std::string what = "seed " + std::to_string(seed) + ", step " + std::to_string(step) + ", stream " +
                               std::to_string(stream) + ", kv_len " + std::to_string(s.kv_len);
      if (!s.step.selects || stream == 0) {
        EXPECT_EQ(counts[stream], -9) << what;
        continue;
      }
      ASSERT_EQ(counts[stream], want.counts[stream]) << what;
      const std::vector<int32_t> got(&tokens[stream * stride], &tokens[stream * stride] + counts[stream]);
      if (!s.step.refresh) {
        before[stream].push_back(s.kv_len - 1);
        EXPECT_EQ(got, before[stream]) << what;
      } else if (const size_t head = stream % static_cast<size_t>(c.shape.kv_heads); s.candidates(head) > s.budget) {
        const auto num = static_cast<size_t>(s.candidates(head));
        const std::span<const float> ref_scores = std::span(want.weights).subspan(stream * longest, num);
        ExpectClose(std::span(scores).subspan(stream * longest, num), ref_scores, DType::kF32, what + " scores");
        EXPECT_TRUE(SameChoice(s.NumbersOf(head, got),
                               s.NumbersOf(head, want.args.lists.of(static_cast<int64_t>(stream))), ref_scores,
                               s.candidates(head) - s.recent))
            << what;
      } else {
        EXPECT_TRUE(std::ranges::equal(got, want.args.lists.of(static_cast<int64_t>(stream)))) << what;
      }
      before[stream] = got;
    }
    for (size_t i = 0; i < b.sequences().size(); ++i) {
      b.Append(i);
      device.UploadToken(i, b.sequences()[i].kv_len - 1);
    }
  }
  device.ExpectOnlyCompactPagesWritten();
}

TEST_F(CudaSelectionTest, QueryWindowsOfTensorCoreShapesEqualTheReference) {
  uint64_t seed = 1000;
  const DType bf16 = DType::kBF16;
  RunWindowCase(*cuda_, {{2, 4, 128, 16, bf16}, {40, 63, 64, 300, 1000, 2040}, 16, 60, 40}, ++seed);
  RunWindowCase(*cuda_, {{1, 1, 64, 16, bf16}, {1, 64, 500, 1020}, 5, 48, 20}, ++seed);
  RunWindowCase(*cuda_, {{1, 16, 128, 16, bf16}, {700, 1500}, 16, 200, 36}, ++seed);  // four chunks of queries
  RunWindowCase(*cuda_, {{2, 9, 64, 16, bf16}, {300, 4000}, 7, 300, 18}, ++seed);
  RunWindowCase(*cuda_, {{1, 3, 64, 16, bf16}, {1100, 200}, 1, 100, 6}, ++seed);  // every step chooses
  RunWindowCase(*cuda_, {{2, 4, 128, 16, bf16}, {20000, 9000}, 16, 1024, 20}, ++seed);
  RunWindowCase(*cuda_, {{1, 4, 64, 16, bf16}, {140000}, 4, 1024, 6}, ++seed);  // splits of more than 1024 keys
}

TEST_F(CudaSelectionTest, QueryWindowsOfSparseStreamsEqualTheReference) {
  uint64_t seed = 1070;
  const DType bf16 = DType::kBF16;
  RunWindowCase(*cuda_, {{2, 4, 128, 16, bf16}, {40, 63, 64, 300, 1000, 2040}, 16, 60, 40, 0.5}, ++seed);
  RunWindowCase(*cuda_, {{1, 16, 128, 16, bf16}, {700, 1500}, 16, 200, 36, 0.7}, ++seed);
  RunWindowCase(*cuda_, {{2, 9, 64, 16, bf16}, {300, 4000}, 7, 300, 18, 0.4}, ++seed);
  RunWindowCase(*cuda_, {{2, 4, 128, 16, bf16}, {9000, 20000}, 16, 1024, 20, 0.25}, ++seed);
  RunWindowCase(*cuda_, {{1, 4, 64, 16, bf16}, {500, 140000}, 4, 1024, 6, 0.9}, ++seed);
  RunWindowCase(*cuda_, {{2, 2, 64, 8, DType::kF32}, {40, 63, 1200, 900}, 8, 60, 20, 0.5}, ++seed);
  RunWindowCase(*cuda_, {{1, 3, 96, 96, bf16}, {64, 900}, 5, 48, 12, 0.6}, ++seed);
}

TEST_F(CudaSelectionTest, QueryWindowsOfOtherShapesEqualTheReference) {
  uint64_t seed = 1050;
  RunWindowCase(*cuda_, {{2, 2, 64, 8, DType::kF32}, {40, 63, 1200}, 8, 60, 20}, ++seed);
  RunWindowCase(*cuda_, {{1, 3, 96, 96, DType::kBF16}, {64, 900}, 5, 48, 12}, ++seed);
  RunWindowCase(*cuda_, {{1, 20, 128, 16, DType::kBF16}, {300}, 32, 64, 40}, ++seed);  // 640 queries
  RunWindowCase(*cuda_, {{1, 5, 40, 8, DType::kF32}, {2500, 1}, 3, 128, 8}, ++seed);
  RunWindowCase(*cuda_, {{2, 4, 128, 16, DType::kE4M3}, {40, 63, 1200}, 8, 60, 20}, ++seed);
  RunWindowCase(*cuda_, {{1, 3, 64, 16, DType::kE4M3}, {64, 900}, 5, 48, 12, 0.6}, ++seed);
}

// The scores and the list of a stream are the same bits alone, in a batch, and in a recording for longer streams.
TEST_F(CudaSelectionTest, QueryWindowBatchAndBucketChangeNoBit) {
  const WindowCase all{{2, 4, 128, 16, DType::kBF16}, {900, 3000, 12000}, 4, 64, 0};
  const auto run = [&](const std::vector<bool>& takes_part) {
    Random random(1090);
    WindowBatch w(random, all);
    SelectingBatch& b = w.batch();
    DeviceSide device(*cuda_, b, w.stride(), w.max_len(), DType::kBF16);
    for (int32_t step = 0; step < 4; ++step) {
      for (float& x : b.q()) x = ToFloat(ToBf16(random.Normal()));
      for (size_t i = 0; i < takes_part.size(); ++i) {
        const bool chooses = takes_part[i] && step == 3;
        b.sequences()[i].step = {.selects = chooses, .refresh = chooses, .compact_len = step, .records = takes_part[i]};
      }
      device.Stage();
      QueryWindowArgs args = w.Args(device.Args());
      args.chooses = true;
      ExpectOk(cuda_->ChooseByQueryWindow(device.ctx(), args));
      ExpectOk(device.session().Synchronize());  // before the next queries are written over these
    }
    return std::pair(device.Weights(), device.Tokens());
  };
  const auto [scores, tokens] = run({true, true, true});
  for (size_t only = 0; only < 3; ++only) {
    const auto [alone, list] = run({only == 0, only == 1, only == 2});
    for (size_t stream = 2 * only; stream < 2 * only + 2; ++stream) {
      EXPECT_TRUE(BitwiseEqual(std::span(alone).subspan(stream * 12000, all.lengths[only]),
                               std::span(scores).subspan(stream * 12000, all.lengths[only])));
      EXPECT_TRUE(
          std::ranges::equal(std::span(list).subspan(stream * 68, 64), std::span(tokens).subspan(stream * 68, 64)));
    }
  }
}

TEST_F(CudaSelectionTest, SaysWhatIsMissing) {
  Random random(870);
  SelectingBatch b(random, {1, 1, 64, 16}, {{70, 70}});
  b.Write();
  DeviceSide device(*cuda_, b, 16, 70, DType::kBF16);
  EXPECT_EQ(cuda_->SelectTokens(device.ctx(), device.Args()).code(), absl::StatusCode::kFailedPrecondition);
  device.Stage();
  SelectTokensArgs a = device.Args();
  a.num_dims = 12;
  EXPECT_EQ(cuda_->SelectTokens(device.ctx(), a).code(), absl::StatusCode::kInvalidArgument);
  a = device.Args();
  a.lists.counts = nullptr;
  EXPECT_EQ(cuda_->SelectTokens(device.ctx(), a).code(), absl::StatusCode::kInvalidArgument);
  ExpectOk(cuda_->SelectTokens(device.ctx(), device.Args()));
  ExpectOk(device.session().Synchronize());
}

}  // namespace
}  // namespace spl::kernels
