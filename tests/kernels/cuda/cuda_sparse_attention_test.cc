// SparseAttention on the CUDA backend against the reference and against itself: staged batches, steps, recorded graphs,
// clusters of both sizes. Skipped where no GPU serves it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/backend/backend.h"
#include "tests/kernels/support/selecting_device.h"
#include "tests/kernels/support/sparse_batch.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

using CudaSparseAttentionTest = CudaSelecting;

struct Case {
  SelectingShape shape;
  std::vector<std::pair<int32_t, int32_t>> lengths;
  int32_t budget;
  int steps;
  Keys keys = Keys::kNormal;
};

// Steps as a decode engine makes them, recorded from the second one on.
void RunCase(const Backend& cuda, const Case& c, uint64_t seed) {
  Random random(seed), steps(seed + 1);
  SelectingBatch b(random, c.shape, c.lengths, PackedPageTokens(c.shape));
  for (size_t stream = 0; stream < b.num_streams(); ++stream) ShapeKeys(random, c.shape, c.keys, b.stream(stream));
  b.Write();
  for (TestSequence& s : b.sequences()) s.recent = steps.Int(kPackedRecentMin, std::min(c.budget, 90));
  int64_t longest = 0;
  for (const auto& [kv_len, max_len] : c.lengths) longest = std::max<int64_t>(longest, max_len);
  DeviceSide device(cuda, b, c.budget, longest, DerivedKeyType(c.shape.dtype));
  auto lse = cuda.Allocate(b.num_streams() * static_cast<size_t>(c.shape.group) * sizeof(float)).value();
  auto mass = cuda.Allocate(b.num_streams() * sizeof(float)).value();
  for (int step = 0; step < c.steps; ++step) {
    for (TestSequence& s : b.sequences()) {
      s.step.selects = steps.Int(0, 5) > 0;
      s.step.refresh |= steps.Int(0, 3) == 0;
      s.budget = steps.Int(s.recent, c.budget);
    }
    for (float& x : b.q()) x = ToFloat(ToBf16(steps.Normal()));
    device.Stage();
    device.FillOut(0xab);
    const std::vector<float> unwritten(b.num_streams(), SparseCall::kUntouched);
    ExpectOk(cuda.Copy(CopyKind::kUpload, mass->data(), unwritten.data(), mass->size()));
    ExpectOk(device.session().RunStep(1, [&] {
      SparseAttentionArgs args = device.SparseArgs(static_cast<float*>(lse->data()));
      args.kept_mass = static_cast<float*>(mass->data());
      return cuda.SparseAttention(device.ctx(), args);
    }));
    SparseCall want(b, c.budget, longest);
    ExpectOk(ref::SparseAttention({}, want.args));
    const std::vector<int32_t> tokens = device.Tokens(), counts = device.Counts();
    const std::vector<float> weights = device.Weights(), out = device.Out(), got_lse = device.Download<float>(*lse),
                             got_mass = device.Download<float>(*mass);
    const float untouched = ToFloat(bf16{0xabab});
    for (size_t stream = 0; stream < b.num_streams(); ++stream) {
      const TestSequence& s = b.sequence_of(stream);
      const std::string what = "seed " + std::to_string(seed) + ", step " + std::to_string(step) + ", stream " +
                               std::to_string(stream) + ", kv_len " + std::to_string(s.kv_len) + ", budget " +
                               std::to_string(s.budget) + ", recent " + std::to_string(s.recent);
      const size_t row = static_cast<size_t>(c.shape.group) * c.shape.head_dim;
      const std::span<const float> own = std::span(out).subspan(stream * row, row);
      EXPECT_NEAR(got_mass[stream], want.kept_mass[stream], 0.03) << what;
      if (!s.step.selects) {
        for (const float x : own) ASSERT_EQ(x, untouched) << what;
        continue;
      }
      if (s.step.refresh) {
        const std::vector<int32_t> dims = device.Dims(stream / c.shape.kv_heads);
        const std::span<const int32_t> valid = b.dims(stream);
        EXPECT_TRUE(std::equal(valid.begin(), valid.end(), dims.data() + (valid.data() - s.dims.data()))) << what;
      }
      ASSERT_EQ(counts[stream], want.counts[stream]) << what;
      const std::span<const int32_t> list = std::span(tokens).subspan(stream * c.budget, counts[stream]);
      if (s.kv_len <= s.budget) {
        EXPECT_TRUE(std::ranges::equal(list, want.list(stream))) << what;
      } else {
        const int32_t choosable = s.kv_len - s.recent;
        const std::span<const float> w = want.w(stream, choosable);
        if (s.budget > s.recent)
          ExpectClose(std::span(weights).subspan(stream * longest, static_cast<size_t>(choosable)), w, DType::kF32,
                      what + " weights");
        std::vector<float> padded(w.begin(), w.end());
        padded.resize(static_cast<size_t>(s.kv_len), 0);
        EXPECT_TRUE(SameChoice(list, want.list(stream), padded, choosable)) << what;
      }
      std::vector<float> want_out, want_lse;
      ReferenceAttention(b, stream, list, want_out, want_lse);
      ExpectClose(own, want_out, DType::kBF16, what + " out");
      ExpectClose(std::span(got_lse).subspan(stream * c.shape.group, c.shape.group), want_lse, LseSizes(want_lse),
                  DType::kF32, what + " lse");
      if (::testing::Test::HasFatalFailure()) return;
    }
    for (size_t i = 0; i < b.sequences().size(); ++i) {
      TestSequence& s = b.sequences()[i];
      if (s.step.selects) s.Advance();
      for (int n = steps.Int(0, 3); n > 0 && s.kv_len < s.max_len; --n) {
        b.Append(i);
        device.UploadToken(i, s.kv_len - 1);
      }
    }
  }
}

const std::vector<std::pair<int32_t, int32_t>> kMixed = {{1, 20},      {63, 90},   {64, 80},    {150, 170},
                                                         {1000, 1030}, {191, 300}, {2100, 2130}};

TEST_F(CudaSparseAttentionTest, EqualsTheReferenceOverSteps) {
  uint64_t seed = 1700;
  RunCase(*cuda_, {SparseShape(2, 4, 128), kMixed, 200, 14}, ++seed);
  RunCase(*cuda_, {SparseShape(1, 1, 64), kMixed, 100, 10}, ++seed);
  RunCase(*cuda_, {SparseShape(2, 8, 128), kMixed, 300, 10}, ++seed);
  RunCase(*cuda_, {SparseShape(3, 5, 64), kMixed, 300, 10}, ++seed);
  RunCase(*cuda_, {SparseShape(1, 2, 128), kMixed, 1000, 10}, ++seed);
  RunCase(*cuda_,
          {SparseShape(8, 4, 128), {{4000, 4020}, {3000, 3020}, {5000, 5020}, {4500, 4600}, {6000, 6010}}, 512, 4},
          ++seed);
}

TEST_F(CudaSparseAttentionTest, PagesOfE4M3EqualTheReference) {
  uint64_t seed = 1790;
  RunCase(*cuda_, {SparseShape(2, 4, 128, DType::kE4M3), kMixed, 200, 14}, ++seed);
  RunCase(*cuda_, {SparseShape(1, 1, 64, DType::kE4M3), kMixed, 100, 10}, ++seed);
  RunCase(*cuda_, {SparseShape(2, 8, 128, DType::kE4M3), kMixed, 300, 10}, ++seed);
  RunCase(*cuda_, {SparseShape(3, 5, 64, DType::kE4M3), kMixed, 300, 10}, ++seed);
  RunCase(*cuda_, {SparseShape(8, 4, 128, DType::kE4M3), {{4000, 4020}, {3000, 3020}, {5000, 5020}}, 512, 4}, ++seed);
  RunCase(*cuda_, {SparseShape(1, 4, 128, DType::kE4M3), {{16384, 16400}, {8191, 8200}}, 2048, 4}, ++seed);
  for (const Keys keys : {Keys::kSinks, Keys::kHeavyTail, Keys::kEqual, Keys::kZero})
    RunCase(*cuda_, {SparseShape(2, 4, 128, DType::kE4M3), kMixed, 200, 6, keys}, ++seed);
}

TEST_F(CudaSparseAttentionTest, LongContexts) {
  uint64_t seed = 1720;
  RunCase(*cuda_, {SparseShape(1, 4, 128), {{16384, 16400}, {8191, 8200}}, 2048, 4}, ++seed);
  RunCase(*cuda_, {SparseShape(1, 4, 128), {{70001, 70020}}, 3000, 3}, ++seed);
}

TEST_F(CudaSparseAttentionTest, KeysAsRealAttentionHasThem) {
  uint64_t seed = 1740;
  for (const Keys keys : {Keys::kSinks, Keys::kHeavyTail, Keys::kEqual, Keys::kZero}) {
    RunCase(*cuda_, {SparseShape(2, 4, 128), kMixed, 200, 6, keys}, ++seed);
    RunCase(*cuda_, {SparseShape(1, 8, 64), {{9000, 9010}, {3000, 3010}}, 1024, 3, keys}, ++seed);
  }
}

// A sequence alone (clusters of 8) and in a batch that is large enough for clusters of 4.
TEST_F(CudaSparseAttentionTest, TheBatchChangesNoBit) {
  const SelectingShape shape = SparseShape(8, 4, 128);
  const std::vector<std::pair<int32_t, int32_t>> many(9, {5000, 5010});
  std::vector<std::vector<float>> out(2), weights(2), kept_mass(2);
  std::vector<std::vector<int32_t>> tokens(2);
  for (int batch = 0; batch < 2; ++batch) {
    Random random(1760 + static_cast<uint64_t>(batch)), keys(1759);  // the first sequence of both is the same
    SelectingBatch b(random, shape, batch == 0 ? std::vector{many[0]} : many, PackedPageTokens(shape));
    for (size_t stream = 0; stream < 8; ++stream) {
      b.stream(stream).k = keys.Normals(b.stream(stream).k.size());
      b.stream(stream).v = keys.Normals(b.stream(stream).v.size());
    }
    b.Write();
    for (TestSequence& s : b.sequences()) s.budget = 700, s.recent = 64;
    Random queries(1761);
    for (float& x : b.q()) x = ToFloat(ToBf16(queries.Normal()));
    DeviceSide device(*cuda_, b, 1024, 5010, DerivedKeyType(shape.dtype));
    device.Stage();
    auto mass = cuda_->Allocate(b.num_streams() * sizeof(float)).value();
    SparseAttentionArgs args = device.SparseArgs();
    ExpectOk(cuda_->SparseAttention(device.ctx(), args));
    const std::vector<float> without = device.Out();
    args.kept_mass = static_cast<float*>(mass->data());
    ExpectOk(cuda_->SparseAttention(device.ctx(), args));
    EXPECT_TRUE(BitwiseEqual(device.Out(), without)) << "to ask for the mass changes no bit";
    kept_mass[batch] = device.Download<float>(*mass);
    kept_mass[batch].resize(8);
    out[batch] = device.Out();
    tokens[batch] = device.Tokens();
    weights[batch] = device.Weights();
    out[batch].resize(static_cast<size_t>(shape.q_width()));
    tokens[batch].resize(8 * 1024);
    weights[batch].resize(8 * 5010);
    for (int32_t h = 0; h < 8; ++h) {
      std::fill(tokens[batch].begin() + h * 1024 + 700, tokens[batch].begin() + (h + 1) * 1024, 0);
      std::fill(weights[batch].begin() + h * 5010 + 5000 - 64, weights[batch].begin() + (h + 1) * 5010, 0.0f);
    }
  }
  EXPECT_EQ(tokens[0], tokens[1]);
  EXPECT_TRUE(BitwiseEqual(weights[0], weights[1]));
  EXPECT_TRUE(BitwiseEqual(out[0], out[1]));
  EXPECT_TRUE(BitwiseEqual(kept_mass[0], kept_mass[1]));
  EXPECT_LT(kept_mass[0][0], 0.9f) << "some of the attention lies elsewhere";
}

// DecodeAttention leaves alone what SparseAttention has written, by rules of the call and by staged plans.
TEST_F(CudaSparseAttentionTest, AttentionSkipsStreamsThatAreServedElsewhere) {
  Random random(1780);
  const SelectingShape shape = SparseShape(4, 4, 128);
  SelectingBatch b(random, shape, {{300, 310}, {200, 210}}, PackedPageTokens(shape));
  b.Write();
  DeviceSide device(*cuda_, b, 128, 310, DerivedKeyType(shape.dtype));
  std::vector<HeadVisibility> plan;
  std::vector<HeadStreamView> streams;
  const auto rule_of = [](size_t h) { return h % 2 == 0 ? VisibilityRule::kElsewhere : VisibilityRule::kFull; };
  for (size_t stream = 0; stream < b.num_streams(); ++stream)
    streams.push_back({b.stream(stream).page_table, b.sequence_of(stream).kv_len, {rule_of(stream % 4)}});
  for (size_t i = 0; i < 2 * 2 * 4; ++i) plan.push_back({rule_of(i % 4)});
  for (const bool staged : {false, true}) {
    device.Stage(staged ? std::span<const HeadVisibility>(plan) : std::span<const HeadVisibility>(), 7);
    device.FillOut(0xab);
    DecodeAttentionArgs args = device.AttentionArgs(streams);
    args.staged_plans = staged;
    ExpectOk(cuda_->DecodeAttention(device.ctx(), args));
    const std::vector<float> out = device.Out();
    for (size_t stream = 0; stream < b.num_streams(); ++stream) {
      bool touched = false;
      for (size_t i = 0; i < 4 * 128; ++i) touched |= out[stream * 4 * 128 + i] != ToFloat(bf16{0xabab});
      EXPECT_EQ(touched, stream % 2 == 1) << stream << (staged ? " staged" : "");
    }
  }
}

}  // namespace
}  // namespace spl::kernels
