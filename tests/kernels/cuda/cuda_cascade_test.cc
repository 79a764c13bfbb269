// ChooseByQueryWindow in front of SelectTokens on a GPU, through the interface that the engine uses, against an oracle
// in double. Skipped where there is no GPU.
#include <gtest/gtest.h>

#include <cstring>

#include "tests/kernels/support/cascade_batch.h"
#include "tests/kernels/support/selecting_device.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

using CudaCascadeTest = CudaSelecting;

// The list of a stream's outer choice, in a copy of the device's pool.
std::vector<int32_t> KeptOnDevice(CascadeBatch& batch, const std::vector<std::byte>& pool, size_t stream) {
  const TestSequence& s = batch.batch().sequence_of(stream);
  const std::vector<int32_t>& pages = s.compact[stream % static_cast<size_t>(batch.batch().shape().kv_heads)];
  const QueryWindow& window = batch.window();
  const auto entry = [&](int64_t i) {
    int32_t value = 0;
    const int64_t page = pages[static_cast<size_t>(window.query_pages() + i / window.entries_per_page())];
    const std::byte* from = pool.data() + page * static_cast<int64_t>(window.page_bytes);
    std::memcpy(&value, from + i % window.entries_per_page() * 4, sizeof(value));
    return value;
  };
  std::vector<int32_t> kept;
  if (!batch.outer().selects) return kept;  // nothing was kept yet
  for (int32_t i = 0; i < entry(0); ++i) kept.push_back(entry(1 + int64_t{i}));
  return kept;
}

void RunCase(const Backend& cuda, const SelectingShape& shape, const std::vector<int32_t>& lengths,
             const CascadeSizes& sizes, uint64_t seed) {
  const int32_t steps = 3 * sizes.window + 8;
  Random random(seed);
  const DType q_dtype = DerivedKeyType(shape.dtype);
  CascadeBatch batch(random, shape, lengths, sizes, steps, q_dtype);
  SelectingBatch& b = batch.batch();
  DeviceSide device(cuda, b, batch.stride(), batch.longest(), q_dtype);
  const auto lists = [&] {
    const std::vector<int32_t> tokens = device.Tokens(), counts = device.Counts();
    std::vector<std::vector<int32_t>> all;
    for (size_t stream = 0; stream < b.num_streams(); ++stream) {
      const auto begin = tokens.begin() + static_cast<int64_t>(stream) * batch.stride();
      all.emplace_back(begin, begin + std::clamp<int64_t>(counts[stream], 0, batch.stride()));
    }
    return all;
  };
  for (int32_t step = 0; step < steps; ++step) {
    batch.NextStep(random);
    if (step > 0) {
      for (size_t i = 0; i < b.sequences().size(); ++i) device.UploadToken(i, b.sequences()[i].kv_len - 1);
    }
    const auto list_begin = static_cast<int32_t>(batch.window().query_pages());
    const StagedOuter outer{.step = batch.outer(),
                            .budget = sizes.candidates,
                            .list_begin = list_begin,
                            .list_pages = static_cast<int32_t>(batch.window().num_pages()) - list_begin};
    device.Stage({}, 0, &outer);
    SelectTokensArgs inner = device.Args(false);
    inner.after_outer = true;
    const SelectTokensArgs like = device.Args();
    const QueryWindowArgs choice{.shape = like.shape,
                                 .pool = like.pool,
                                 .window = sizes.window,
                                 .q = like.q,
                                 .q_row_stride = like.q_row_stride,
                                 .scores = like.weights,
                                 .scores_stride = like.weights_stride,
                                 .lists = like.lists,
                                 .layer = like.layer,
                                 .chooses = batch.outer().refresh,
                                 .outer = true};
    const uint64_t key = batch.outer().refresh ? 22 : batch.outer().selects ? 21 : 20;
    ExpectOk(device.session().RunStep(key, [&]() -> absl::Status {
      if (absl::Status s = cuda.ChooseByQueryWindow(device.ctx(), choice); !s.ok()) return s;
      return batch.outer().selects ? cuda.SelectTokens(device.ctx(), inner) : absl::OkStatus();
    }));
    const std::vector<std::vector<int32_t>> chosen = lists();
    const std::vector<std::byte> pool = device.Pool();
    for (size_t stream = 0; stream < b.num_streams(); ++stream) {
      ASSERT_TRUE(batch.Agrees(stream, KeptOnDevice(batch, pool, stream), chosen[stream]))
          << "seed " << seed << ", step " << step;
    }
  }
  EXPECT_TRUE(batch.HasChosen()) << "seed " << seed;
}

TEST_F(CudaCascadeTest, ChoosesAmongWhatIsKept) {
  uint64_t seed = 5400;
  const DType bf16 = DType::kBF16;
  RunCase(*cuda_, {2, 4, 128, 16, bf16}, {20, 90, 300, 700}, {.window = 16, .candidates = 120, .budget = 40}, ++seed);
  RunCase(*cuda_, {2, 4, 128, 16, bf16}, {3000, 9000}, {.window = 4, .candidates = 2048, .budget = 512}, ++seed);
  RunCase(*cuda_, {2, 2, 64, 8, DType::kF32}, {40, 500}, {.window = 6, .candidates = 120, .budget = 40}, ++seed);
  RunCase(*cuda_, {1, 3, 64, 64, bf16}, {700}, {.window = 1, .candidates = 120, .budget = 40}, ++seed);
  RunCase(*cuda_, {2, 2, 64, 16, DType::kE4M3}, {90, 300}, {.window = 8, .candidates = 120, .budget = 40}, ++seed);
}

}  // namespace
}  // namespace spl::kernels
