// How the memory of a device becomes page pools when no size is given.
#include "services/worker_flags/kv_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <memory>

#include "services/base/byte_size_option.h"
#include "services/engine/execution/parallel_executor.h"
#include "services/engine/execution/workspace_bytes.h"
#include "tests/support/fake_device_backend.h"
#include "tests/support/paths.h"

namespace spl {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kGiB = 1ull << 30;

// A model whose sequences of 128K tokens have 16 GiB of KV.
KvPoolNeed Need(const std::string& name, std::optional<uint64_t> bytes = std::nullopt) {
  return {.name = name,
          .bytes = bytes,
          .max_context = 131'072,
          .sequence_bytes = 16 * kGiB,
          .max_sequences = 64,
          .num_ranks = 1,
          .other_bytes = kGiB};
}
KvRoom Gpu(uint64_t free_bytes, uint64_t total_bytes = 80 * kGiB) {
  return {.on_host = false, .free_bytes = free_bytes, .total_bytes = total_bytes};
}
KvRoom Host(uint64_t free_bytes) { return {.on_host = true, .free_bytes = free_bytes, .total_bytes = 2 * free_bytes}; }

std::vector<uint64_t> Divide(const KvRoom& room, const std::vector<KvPoolNeed>& pools) {
  const auto sizes = DivideKvRoom(room, pools);
  EXPECT_TRUE(sizes.ok()) << sizes.status();
  std::vector<uint64_t> bytes;
  if (!sizes.ok()) return bytes;
  for (const KvPoolSize& size : *sizes) bytes.push_back(size.bytes);
  return bytes;
}

TEST(KvMarginTest, IsSixPercentAndAtLeastAGibibyte) {
  EXPECT_EQ(KvMargin(8 * kGiB), kGiB);
  EXPECT_NEAR(static_cast<double>(KvMargin(80 * kGiB)), 4.8 * kGiB, 1);
}

TEST(DivideKvRoomTest, AGpusPoolsShareWhatIsLeft) {
  const uint64_t left = 60 * kGiB - KvMargin(80 * kGiB);
  EXPECT_EQ(Divide(Gpu(60 * kGiB), {Need("decode")}), (std::vector<uint64_t>{left - kGiB}));
  const uint64_t half = (left - 2 * kGiB) / 2;
  const auto two = Divide(Gpu(60 * kGiB), {Need("prefill"), Need("decode")});
  ASSERT_EQ(two.size(), 2u);
  EXPECT_EQ(two[0], half);
  EXPECT_NEAR(static_cast<double>(two[1]), static_cast<double>(half), 1);
  // A size that was given stays, and the other pool has the rest.
  EXPECT_EQ(Divide(Gpu(60 * kGiB), {Need("prefill", 10 * kGiB), Need("decode")}),
            (std::vector<uint64_t>{10 * kGiB, left - 12 * kGiB}));
  EXPECT_THAT(DivideKvRoom(Gpu(60 * kGiB), std::vector{Need("decode")})->front().why,
              HasSubstr("60.0 GiB of 80.0 GiB free behind the weights"));
}

TEST(DivideKvRoomTest, WithRanksAPoolLiesOnAllOfThem) {
  KvPoolNeed split = Need("decode");
  split.num_ranks = 4;
  const uint64_t left = 60 * kGiB - KvMargin(80 * kGiB) - kGiB;
  EXPECT_EQ(Divide(Gpu(60 * kGiB), {split}), (std::vector<uint64_t>{4 * left}));
}

TEST(DivideKvRoomTest, APoolIsNoLargerThanItsSequencesNeed) {
  KvPoolNeed small = Need("decode");
  small.sequence_bytes = kGiB / 8;
  small.max_sequences = 16;
  EXPECT_EQ(Divide(Gpu(60 * kGiB), {small}), (std::vector<uint64_t>{2 * kGiB}));
  // The other one has the rest.
  const auto two = Divide(Gpu(60 * kGiB), {Need("prefill"), small});
  EXPECT_EQ(two[1], 2 * kGiB);
  EXPECT_EQ(two[0], 60 * kGiB - KvMargin(80 * kGiB) - 4 * kGiB);
}

TEST(DivideKvRoomTest, AFullGpuNamesWhatTakesItAndWhatToSet) {
  const auto full = DivideKvRoom(Gpu(5 * kGiB), std::vector{Need("decode")});
  EXPECT_EQ(full.status().code(), absl::StatusCode::kResourceExhausted);
  const std::string message(full.status().message());
  EXPECT_THAT(message, HasSubstr("5.0 GiB of the GPU's 80.0 GiB"));
  EXPECT_THAT(message, HasSubstr("margin of 4.8 GiB"));
  EXPECT_THAT(message, HasSubstr("give --kv-bytes a size"));
  EXPECT_TRUE(DivideKvRoom(Gpu(5 * kGiB), std::vector{Need("decode", kGiB)}).ok()) << "a given size is not judged";
}

TEST(DivideKvRoomTest, OnTheCpuTheyGetAQuarter) {
  KvPoolNeed small = Need("prefill");
  small.sequence_bytes = kGiB;
  EXPECT_EQ(Divide(Host(40 * kGiB), {small, small}), (std::vector<uint64_t>{5 * kGiB, 5 * kGiB}));
  EXPECT_EQ(Divide(Host(4000 * kGiB), {small}), (std::vector<uint64_t>{8 * kGiB})) << "eight sequences at most";
  // One sequence needs more than the quarter: up to the half.
  EXPECT_EQ(Divide(Host(100 * kGiB), {Need("decode")}), (std::vector<uint64_t>{25 * kGiB}));
  EXPECT_EQ(Divide(Host(40 * kGiB), {Need("decode")}), (std::vector<uint64_t>{16 * kGiB}));
  EXPECT_EQ(Divide(Host(20 * kGiB), {Need("decode")}), (std::vector<uint64_t>{10 * kGiB}));
  EXPECT_EQ(Divide(Host(40 * kGiB), {Need("prefill"), Need("decode")}), (std::vector<uint64_t>{10 * kGiB, 10 * kGiB}));
  const auto full = DivideKvRoom(Host(10 << 20), std::vector{Need("decode")});
  EXPECT_THAT(std::string(full.status().message()), HasSubstr("--kv-bytes auto: 10.0 MiB of memory are available"));
}

// Counts what is allocated on it.
class CountingBackend final : public test::FakeDeviceBackend {
 public:
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> Allocate(size_t bytes) const override {
    allocated += bytes;
    return FakeDeviceBackend::Allocate(bytes);
  }
  mutable std::atomic<uint64_t> allocated{0};
};

class KvPoolOfAModelTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto model = engine::Model::Load(test::kTinyModel, engine::Devices{backend_});
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
  }
  std::shared_ptr<CountingBackend> backend_ = std::make_shared<CountingBackend>();
  std::shared_ptr<const engine::Model> model_;
};

TEST_F(KvPoolOfAModelTest, WorkspaceIsNoLessThanAnExecutorTakes) {
  for (const int32_t rows : {64, 512, 2048}) {
    const auto memory = engine::AllocateKvMemory(*model_, engine::PagesForTokens(model_->config(), 4096));
    ASSERT_TRUE(memory.ok()) << memory.status();
    const uint64_t before = backend_->allocated;
    const engine::ExecutorOptions options{.num_threads = 1, .max_rows = rows};
    auto executor = engine::ParallelExecutor::Create(model_, memory->pages, options);
    ASSERT_TRUE(executor.ok()) << executor.status();
    const uint64_t taken = backend_->allocated - before;
    const uint64_t bound = engine::WorkspaceBytes(*model_, options);
    EXPECT_GE(bound, taken) << rows;
    const engine::ExecutorOptions fewer{.num_threads = 1, .max_rows = rows / 2};
    EXPECT_GT(bound, engine::WorkspaceBytes(*model_, fewer)) << "it grows with the rows";
  }
}

TEST_F(KvPoolOfAModelTest, TakesWhatTheDeviceHas) {
  backend_->memory = {.free_bytes = 4 * kGiB, .total_bytes = 8 * kGiB};
  const KvPoolNeed needs[] = {NeedOfPool("prefill", std::nullopt, *model_, {.max_rows = 512}),
                              NeedOfPool("decode", std::nullopt, *model_, {.max_rows = 64})};
  const auto bytes = SizeKvPools(*model_, needs);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  ASSERT_EQ(bytes->size(), 2u);
  EXPECT_LE((*bytes)[0] + (*bytes)[1] + needs[0].other_bytes + needs[1].other_bytes, 3 * kGiB);
  EXPECT_GT((*bytes)[0], kGiB);
  // A token of splice-tiny has 12 layers of 4 KV heads of 64 K and 64 V values in bf16.
  EXPECT_EQ(TokensOfPool(needs[0], 12 * 4 * 2 * 64 * 2 * 1000), 1000);
  backend_->memory.free_bytes = kGiB;
  EXPECT_EQ(SizeKvPools(*model_, needs).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(ByteSizeOrAutoOptionTest, TakesBoth) {
  const auto parse = [](const std::string& text, std::optional<uint64_t> before) {
    CLI::App app;
    AddByteSizeOrAutoOption(app, "--kv-bytes", before, "memory");
    app.parse("--kv-bytes " + text);
    return before;
  };
  EXPECT_EQ(parse("auto", kGiB), std::nullopt);
  EXPECT_EQ(parse("2GiB", std::nullopt), 2 * kGiB);
  EXPECT_THROW(parse("automatic", std::nullopt), CLI::ValidationError);
  CLI::App app;
  std::optional<uint64_t> bytes;
  EXPECT_THAT(AddByteSizeOrAutoOption(app, "--kv-bytes", bytes, "memory")->get_description(),
              HasSubstr("(default auto)"));
}

}  // namespace
}  // namespace spl
