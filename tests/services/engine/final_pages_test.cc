// Pages that a push may send while their prompt is computed: each page once, not before it is final, and as soon as it
// is.
#include "services/engine/runtime/final_pages.h"

#include <gmock/gmock.h>

#include <map>
#include <utility>

#include "tests/services/engine/segments_fixture.h"

namespace spl::engine {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(PagesWithoutTest, APageWithAnyRowIsLeftOut) {
  const auto without = [](PositionRanges rows, int32_t num_tokens, int32_t end = INT32_MAX) {
    return PagesWithout(rows, num_tokens, end);
  };
  EXPECT_THAT(without({}, 200), ElementsAre(PageRange{0, 4}));
  EXPECT_THAT(without({{0, 200}}, 200), IsEmpty());
  EXPECT_THAT(without({{63, 64}, {128, 129}}, 200), ElementsAre(PageRange{1, 2}, PageRange{3, 4}));
  EXPECT_THAT(without({{63, 65}}, 200), ElementsAre(PageRange{2, 4}));
  EXPECT_THAT(without({{130, 131}, {140, 150}}, 256), ElementsAre(PageRange{0, 2}, PageRange{3, 4}));
  EXPECT_THAT(without({}, 200, 199), ElementsAre(PageRange{0, 3})) << "the page of position 199 is not final";
  EXPECT_THAT(without({}, 200, 192), ElementsAre(PageRange{0, 3}));
  EXPECT_THAT(without({}, 200, 0), IsEmpty());
}

TEST(GivenPagesTest, GivesAPageOnceForALayer) {
  GivenPages given(2);
  const PageRanges first{{2, 4}, {6, 7}}, second{{0, 8}};
  EXPECT_THAT(given.Give(0, first), ElementsAre(PageRange{2, 4}, PageRange{6, 7}));
  EXPECT_THAT(given.Give(0, first), IsEmpty());
  EXPECT_THAT(given.Give(0, second), ElementsAre(PageRange{0, 2}, PageRange{4, 6}, PageRange{7, 8}));
  EXPECT_THAT(given.Give(1, second), ElementsAre(PageRange{0, 8}));
  EXPECT_THAT(given.Give(1, {}), IsEmpty());
}

class FinalPagesTest : public SegmentsFixture {
 protected:
  // Takes the pages of a prompt as a push does, with the checksums that they have then.
  class Watch {
   public:
    Watch(FinalPagesTest& test, const Layout& layout, const ReuseOptions& reuse, const HeadClassMap* map)
        : test_(test),
          layout_(layout),
          kv_(layout.prefix ? std::shared_ptr<SequenceKv>(layout.prefix->Fork().value())
                            : std::make_shared<SequenceKv>(*test.pool_, KvShapeOf(test.model_->config()))),
          policy_(MakeRecoveryPolicy(reuse, test.model_->config(), map).value()) {
      EXPECT_TRUE(kv_->Reserve(static_cast<int64_t>(layout.tokens.size())).ok());
      run_.emplace(layout.tokens, layout.hits, *kv_, *policy_);
    }

    void RunToEnd() {
      TakeNow(nullptr);
      num_prefix_ = num_given();
      EXPECT_EQ(num_prefix_, int64_t{num_layers()} * (kv_->num_tokens() / kernels::kPageTokens));
      ASSERT_TRUE(run_->Begin(*test_.executor_).ok());
      TakeNow(test_.executor_.get());
      num_before_ = num_given() - num_prefix_;
      while (!run_->done() && !testing::Test::HasFailure()) {
        const PrefillSlice slice = run_->Next(test_.executor_->max_rows());
        ASSERT_FALSE(slice.tokens.empty());
        const absl::Status status = test_.executor_->Prefill({&slice, 1}, run_->layers(), [&](int32_t layer) {
          const auto fence = test_.executor_->RecordFence();
          EXPECT_TRUE(fence == nullptr || fence->Wait().ok());
          Take(layer, PromptRun::Final::kWithPass, slice.positions);
          return true;
        });
        ASSERT_TRUE(status.ok()) << status;
        ASSERT_TRUE(run_->Finish(*test_.executor_).ok());
        TakeNow(test_.executor_.get());
      }
      Check();
    }

    int64_t num_prefix() const { return num_prefix_; }
    int64_t num_before() const { return num_before_; }  // given before the first pass, without the prefix
    int64_t num_between() const { return num_given() - num_prefix_ - num_before_ - num_with_pass_; }
    const PromptRun& run() const { return *run_; }

   private:
    int32_t num_layers() const { return kv_->shape().num_layers; }
    int64_t num_given() const { return static_cast<int64_t>(given_.size()); }

    void TakeNow(ParallelExecutor* executor) {
      if (executor != nullptr) {
        const auto fence = executor->RecordFenceOfAll();
        ASSERT_TRUE(fence.ok()) << fence.status();
        EXPECT_TRUE(*fence == nullptr || (*fence)->Wait().ok());
      }
      for (int32_t layer = 0; layer < num_layers(); ++layer) Take(layer, PromptRun::Final::kNow, {});
    }

    void Take(int32_t layer, PromptRun::Final when, std::span<const int32_t> rows) {
      for (const PageRange& range : run_->TakeFinalPages(layer, when)) {
        for (int32_t page = range.begin; page < range.end; ++page) {
          EXPECT_TRUE(given_.emplace(std::pair(layer, page), Checksums(layer, page)).second)
              << "page " << page << " of layer " << layer << " twice";
          if (when == PromptRun::Final::kNow) continue;
          ++num_with_pass_;
          EXPECT_TRUE(
              std::any_of(rows.begin(), rows.end(), [&](int32_t p) { return p / kernels::kPageTokens == page; }))
              << "page " << page << " of layer " << layer << " was final before the pass";
        }
      }
    }

    std::vector<uint32_t> Checksums(int32_t layer, int32_t page) const {
      std::vector<int32_t> pages;
      for (int32_t head = 0; head < kv_->shape().num_kv_heads; ++head)
        pages.push_back(kv_->stream(layer, head)[static_cast<size_t>(page)]);
      std::vector<uint32_t> crcs(pages.size());
      EXPECT_TRUE(test_.pool_->ChecksumPages(pages, crcs.data()).ok());
      return crcs;
    }

    void Check() const {
      const KeptTokens kept{run_->layout().num_tokens, {run_->kept().begin(), run_->kept().end()}};
      for (int32_t layer = 0; layer < num_layers(); ++layer) {
        for (int32_t page = 0; page < PagesFor(kv_->num_tokens()); ++page) {
          if (!kept.layers.empty() && !kept.KeepsPage(layer, page)) continue;
          const auto found = given_.find({layer, page});
          ASSERT_NE(found, given_.end()) << "page " << page << " of layer " << layer << " was never given";
          EXPECT_EQ(found->second, Checksums(layer, page))
              << "page " << page << " of layer " << layer << " was written after it was given";
        }
      }
    }

    FinalPagesTest& test_;
    const Layout& layout_;
    const std::shared_ptr<SequenceKv> kv_;
    const std::unique_ptr<RecoveryPolicy> policy_;
    std::optional<PromptRun> run_;
    std::map<std::pair<int32_t, int32_t>, std::vector<uint32_t>> given_;  // (layer, page)
    int64_t num_prefix_ = 0, num_before_ = 0, num_with_pass_ = 0;
  };

  // A copy of `length` tokens, which were computed behind 10 tokens of instructions, at the end of `layout`.
  void AddDocument(std::mt19937& random, Layout& layout, int32_t length) {
    constexpr int32_t kLead = 10;
    const Tokens text = layout.texts.emplace_back(RandomTokens(random, kLead + length));
    layout.sources.push_back(Exact(text));
    layout.hits.push_back({SourceOf(layout.sources.back(), text, kLead, kLead + length, kLead), 0,
                           static_cast<int32_t>(layout.tokens.size()), length});
    layout.tokens.insert(layout.tokens.end(), text.begin() + kLead, text.end());
  }
  void AddFresh(std::mt19937& random, Layout& layout, int32_t length) {
    const Tokens fresh = RandomTokens(random, length);
    layout.tokens.insert(layout.tokens.end(), fresh.begin(), fresh.end());
  }
};

// Whatever the method and the layout.
TEST_P(FinalPagesTest, EveryPageIsGivenOnceAndNotWrittenAfterwards) {
  std::mt19937 random = SeededRandom("final pages");
  const HeadClassMap map = [&] {
    std::vector<HeadClass> classes(8);
    for (size_t i = 0; i < classes.size(); i += 2) classes[i] = {.is_global = false, .window = 40, .sinks = 4};
    return HeadClassMap(4, 2, std::move(classes));
  }();
  int64_t num_before = 0, num_between = 0;
  for (int round = 0; round < 40 && !HasFailure(); ++round) {
    const Layout layout = RandomLayout(random, 700);
    for (const char* policy : {"exact", "naive", "epic", "cacheblend", "sparsex", "splice", "splice+", "redknot",
                               "samkv", "samkv compact", "samkv means"}) {
      ReuseOptions reuse{.policy = policy};
      Layout prompt{layout.tokens, layout.hits, layout.prefix, {}, {}, {}};
      if (reuse.policy == "exact" || reuse.policy == "redknot") prompt.hits.clear();
      if (std::string_view(policy).starts_with("samkv")) {
        reuse = {.policy = "samkv", .budget_ratio = 0.4, .compact = reuse.policy == "samkv compact"};
        if (std::string_view(policy).ends_with("means")) reuse.choose = "means";
      } else if (random() % 2 == 0) {  // by default copies in their own context are left as they are
        reuse.dense_layers = Between(random, -1, 4);
        if (reuse.dense_layers < 0) reuse.probe_layers = Between(random, 0, 4);
        reuse.recompute_share = 0.1;
        reuse.recompute_min = Between(random, 0, 20);
        reuse.link_tokens = Between(random, -1, 10);
      } else {
        reuse.recompute_min = Between(random, 0, 20);
        reuse.probe_layers = Between(random, -1, 4);
      }
      SCOPED_TRACE(testing::Message() << policy << ", round " << round);
      Watch watch(*this, prompt, reuse, &map);
      watch.RunToEnd();
      num_before += watch.num_before();
      num_between += watch.num_between();
    }
  }
  EXPECT_GT(num_before, 0);
  EXPECT_GT(num_between, 0);
}

// A copy in its own context is not computed afresh, and is final when it has been made: in all layers, while other
// copies of the prompt are being recovered, by a probe or above dense layers.
TEST_P(FinalPagesTest, CopiesInTheirOwnContextAreFinalBeforeTheFirstPass) {
  std::mt19937 random = SeededRandom("own context");
  Layout layout;
  AddFresh(random, layout, 20);
  AddDocument(random, layout, 400);  // behind 20 tokens of instructions only: positions [20, 420)
  AddDocument(random, layout, 300);  // behind another document, that it has not seen
  AddFresh(random, layout, 30);
  for (const bool probes : {false, true}) {
    ReuseOptions reuse{.policy = "sparsex", .recompute_max = 8};
    reuse.probe_layers = probes ? 2 : 0;
    Watch watch(*this, layout, reuse, nullptr);
    watch.RunToEnd();
    EXPECT_GT(watch.run().recomputed_tokens(), 0);
    EXPECT_EQ(watch.num_before(), 4 * 5) << "pages 1 to 5 of four layers";
  }
}

// Rows are chosen before they are computed, and the pages of all others are final then.
TEST_P(FinalPagesTest, PagesWithoutAChosenRowAreFinalWhenRowsAreChosen) {
  std::mt19937 random = SeededRandom("chosen rows");
  Layout layout;
  AddFresh(random, layout, 100);  // more than may differ in front of the same context
  AddDocument(random, layout, 500);
  AddDocument(random, layout, 300);
  AddFresh(random, layout, 30);
  const ReuseOptions reuse{.policy = "sparsex", .recompute_share = 0, .recompute_min = 3, .probe_layers = 2};
  Watch watch(*this, layout, reuse, nullptr);
  watch.RunToEnd();
  EXPECT_EQ(watch.num_before(), 0);
  // Twelve pages hold only copies; two of them an edge, and three at most a chosen row with its neighbours.
  EXPECT_GE(watch.num_between(), 4 * 4);
}

INSTANTIATE_TEST_SUITE_P(Devices, FinalPagesTest, testing::Values("cpu", "ranks", "cuda"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace spl::engine
