// HeavyHitters on a GPU, through the interface that the engine uses, against an oracle in double. Skipped where there
// is no GPU.
#include <gtest/gtest.h>

#include <cstring>

#include "tests/kernels/support/hitting_batch.h"
#include "tests/kernels/support/selecting_device.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

using CudaHeavyHittersTest = CudaSelecting;

HeavyHittersArgs ArgsOf(const SelectTokensArgs& like) {
  return {.shape = like.shape,
          .pool = like.pool,
          .q = like.q,
          .q_row_stride = like.q_row_stride,
          .attention = like.weights,
          .attention_stride = like.weights_stride,
          .lists = like.lists,
          .layer = like.layer};
}

// The positions that a stream keeps, in a copy of the device's pool.
std::vector<int32_t> KeptIn(HittingBatch& batch, const std::vector<std::byte>& pool, size_t stream) {
  const TestSequence& s = batch.batch().sequence_of(stream);
  const std::vector<int32_t>& pages = s.compact[stream % static_cast<size_t>(batch.shape().kv_heads)];
  const size_t page_bytes = batch.batch().pool().view().page_bytes();
  const auto per_page = HeavyHitterPages{s.budget, page_bytes}.words_per_page();
  const auto word = [&](int64_t i) {
    int32_t value = 0;
    const size_t page = static_cast<size_t>(pages[static_cast<size_t>(i / per_page)]);
    std::memcpy(&value, pool.data() + page * page_bytes + static_cast<size_t>(i % per_page) * 4, 4);
    return value;
  };
  std::vector<int32_t> kept;
  for (int32_t i = 0; i < word(0); ++i) kept.push_back(word(HeavyHitterPages::kPosition + 2 * int64_t{i}));
  return kept;
}

void RunCase(const Backend& cuda, const SelectingShape& shape, const std::vector<std::pair<int32_t, int32_t>>& lengths,
             uint64_t seed) {
  constexpr int32_t kSteps = 60;
  Random random(seed);
  HittingBatch batch(random, shape, lengths, kSteps);
  SelectingBatch& b = batch.batch();
  const auto stride = static_cast<size_t>(batch.most());
  DeviceSide device(cuda, b, static_cast<int64_t>(stride), static_cast<int64_t>(stride), DerivedKeyType(shape.dtype));
  for (int32_t step = 0; step < kSteps; ++step) {
    batch.NextStep(random);
    for (size_t i = 0; i < b.sequences().size(); ++i) device.UploadToken(i, b.sequences()[i].kv_len - 1);
    device.Stage();
    const HeavyHittersArgs args = ArgsOf(device.Args());
    ExpectOk(device.session().RunStep(13, [&] { return cuda.HeavyHitters(device.ctx(), args); }));
    const std::vector<int32_t> tokens = device.Tokens(), counts = device.Counts();
    const std::vector<float> paid = device.Weights();
    const std::vector<std::byte> pool = device.Pool();
    for (size_t stream = 0; stream < batch.num_streams(); ++stream) {
      const auto count = static_cast<size_t>(counts[stream]);
      ASSERT_LE(count, stride);
      const std::vector<int32_t> list(&tokens[stream * stride], &tokens[stream * stride] + count);
      const std::vector<float> attention(&paid[stream * stride], &paid[stream * stride] + count);
      ASSERT_TRUE(batch.Agrees(stream, list, attention, KeptIn(batch, pool, stream)))
          << "seed " << seed << ", step " << step;
    }
  }
  EXPECT_TRUE(batch.HasChanged()) << "seed " << seed;
  device.ExpectOnlyCompactPagesWritten();
}

TEST_F(CudaHeavyHittersTest, EvictsTheLeastOfWhatAllStepsPaid) {
  uint64_t seed = 4400;
  RunCase(*cuda_, {2, 4, 128, 16, DType::kBF16}, {{40, 16}, {90, 32}, {200, 32}}, ++seed);
  RunCase(*cuda_, {1, 1, 64, 16, DType::kF32}, {{40, 16}, {300, 64}}, ++seed);
  RunCase(*cuda_, {2, 3, 16, 8, DType::kBF16}, {{90, 31}}, ++seed);
  RunCase(*cuda_, {1, 20, 256, 16, DType::kBF16}, {{90, 32}}, ++seed);
  RunCase(*cuda_, {2, 2, 64, 16, DType::kE4M3}, {{40, 16}, {200, 32}}, ++seed);
}

TEST_F(CudaHeavyHittersTest, SaysWhatIsMissing) {
  Random random(4500);
  HittingBatch batch(random, {1, 2, 64, 16, DType::kBF16}, {{30, 8}}, 4);
  DeviceSide device(*cuda_, batch.batch(), 9, 9, DType::kBF16);
  device.Stage();
  HeavyHittersArgs args = ArgsOf(device.Args());
  args.attention = nullptr;
  EXPECT_EQ(cuda_->HeavyHitters(device.ctx(), args).code(), absl::StatusCode::kInvalidArgument);
  args = ArgsOf(device.Args());
  args.shape.num_qo_heads = 33;
  args.q_row_stride = 33 * 64;
  EXPECT_EQ(cuda_->HeavyHitters(device.ctx(), args).code(), absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace spl::kernels
