// What observers of a pass are called with, and that their choice of rows is what feed-forward runs.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "services/engine/engine.h"
#include "services/engine/execution/observers/layer_observer.h"
#include "services/engine/recovery/exact.h"
#include "tests/support/paths.h"

namespace spl::engine {
namespace {

// Writes down its calls in layers 0 and 1.
class Recorder final : public LayerObserver {
 public:
  Recorder(std::string name, std::vector<std::string>& calls) : name_(std::move(name)), calls_(calls) {}
  void BeginPass(std::span<const int32_t> positions) override {
    calls_.push_back(fmt::format("{} pass {}..{}", name_, positions.front(), positions.back()));
  }
  absl::Status BeforeKv(const LayerView& view) override { return Note("before", view); }
  absl::Status AfterKv(const LayerView& view) override { return Note("after", view); }
  bool wants_lse(int32_t layer, const LayerPlan&) const override { return layer == 1; }
  absl::Status AfterAttention(const LayerView& view) override {
    return Note(view.attention.lse != nullptr ? "attention with lse" : "attention", view);
  }
  absl::StatusOr<bool> ChooseFfnRows(const LayerView& view, std::vector<int32_t>&) override {
    return Note("ffn", view).ok() && false;
  }

 private:
  absl::Status Note(const char* what, const LayerView& view) {
    EXPECT_EQ(view.num_rows(), static_cast<int32_t>(view.rows.positions.size()));
    if (view.layer < 2)
      calls_.push_back(
          fmt::format("{} {} {} rows {}..{}", name_, view.layer, what, view.rows.row_begin, view.rows.row_end));
    return absl::OkStatus();
  }

  const std::string name_;
  std::vector<std::string>& calls_;
};

// Chooses these rows of its slice.
class RowChooser final : public LayerObserver {
 public:
  explicit RowChooser(std::vector<int32_t> rows) : rows_(std::move(rows)) {}
  absl::StatusOr<bool> ChooseFfnRows(const LayerView& view, std::vector<int32_t>& rows) override {
    for (const int32_t row : rows_) rows.push_back(view.rows.row_begin + row);
    return true;
  }

 private:
  const std::vector<int32_t> rows_;
};

class ObserversTest : public testing::Test {
 protected:
  void SetUp() override {
    auto model = Model::Load(test::kTinyModel, kernels::MakeCpuBackend());
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *model;
    auto memory = AllocateKvMemory(*model_, PagesForTokens(model_->config(), 512));
    ASSERT_TRUE(memory.ok()) << memory.status();
    memory_.emplace(*std::move(memory));
    pool_ = std::make_unique<PagePool>(memory_->pages, model_->backends());
    auto executor = Executor::Create(model_, memory_->pages.rank(0), {.max_rows = 256});
    ASSERT_TRUE(executor.ok()) << executor.status();
    executor_ = *std::move(executor);
    std::iota(positions_.begin(), positions_.end(), 0);
    for (auto& kv : kvs_) {
      kv = std::make_unique<SequenceKv>(*pool_, KvShapeOf(model_->config()));
      ASSERT_TRUE(kv->Reserve(64).ok());
    }
    policy_ = std::make_unique<ExactPolicy>(model_->config());
  }
  PrefillSlice Slice(size_t sequence, size_t num_tokens, const ObserverList* observers) {
    return {.tokens = std::span(tokens_).first(num_tokens),
            .positions = std::span(positions_).first(num_tokens),
            .kv = kvs_[sequence].get(),
            .policy = policy_.get(),
            .observers = observers};
  }
  // Logits behind the last row of two slices of 20 and 10 tokens.
  std::vector<float> Logits(const ObserverList* first, const ObserverList* second) {
    const std::vector<PrefillSlice> slices = {Slice(0, 20, first), Slice(1, 10, second)};
    const absl::Status ran = executor_->Prefill(slices, PassLayers{{0, model_->config().num_layers}});
    EXPECT_TRUE(ran.ok()) << ran;
    const std::vector<int32_t> last = {19, 29};
    EXPECT_TRUE(executor_->ComputeLogits(last).ok());
    const auto logits = executor_->Logits();
    return {logits->begin(), logits->end()};
  }

  std::shared_ptr<const Model> model_;
  std::optional<KvMemory> memory_;
  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<Executor> executor_;
  std::vector<int32_t> tokens_ = std::vector<int32_t>(64, 77), positions_ = std::vector<int32_t>(64);
  std::array<std::unique_ptr<SequenceKv>, 2> kvs_;
  std::unique_ptr<ExactPolicy> policy_;
};

TEST_F(ObserversTest, AreCalledLayerByLayerSliceBySliceAndChangeNothing) {
  const std::vector<float> want = Logits(nullptr, nullptr);
  std::vector<std::string> calls;
  Recorder a("a", calls), b("b", calls), c("c", calls);
  const ObserverList first = {&a, &b}, second = {&c};
  EXPECT_EQ(Logits(&first, &second), want);
  std::vector<std::string> expected = {"a pass 0..19", "b pass 0..19", "c pass 0..9"};
  for (const int layer : {0, 1}) {
    for (const char* what : {"before", "after", layer == 1 ? "attention with lse" : "attention", "ffn"}) {
      for (const char* name : {"a", "b", "c"})
        expected.push_back(fmt::format("{} {} {} rows {}", name, layer, what, name[0] == 'c' ? "20..30" : "0..20"));
    }
  }
  EXPECT_EQ(calls, expected);
}

TEST_F(ObserversTest, OnlyChosenRowsRunThroughFeedForward) {
  const std::vector<float> all = Logits(nullptr, nullptr);
  std::vector<int32_t> every(10);
  std::iota(every.begin(), every.end(), 0);
  RowChooser same(every), last({9}), none({0});
  const ObserverList with_all = {&same}, with_last = {&last}, with_first = {&none};
  EXPECT_EQ(Logits(nullptr, &with_all), all) << "all rows of the one slice, and all of the other";
  const auto vocab = static_cast<size_t>(model_->config().vocab_size);
  const auto same_logits = [&](const std::vector<float>& got, size_t row) {
    return std::equal(all.begin() + static_cast<int64_t>(row * vocab),
                      all.begin() + static_cast<int64_t>((row + 1) * vocab),
                      got.begin() + static_cast<int64_t>(row * vocab));
  };
  for (const ObserverList* chosen : {&with_last, &with_first}) {
    const std::vector<float> got = Logits(nullptr, chosen);
    EXPECT_TRUE(same_logits(got, 0)) << "a slice without observers is dense";
    EXPECT_FALSE(same_logits(got, 1));
  }
}

}  // namespace
}  // namespace spl::engine
