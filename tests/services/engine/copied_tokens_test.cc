// Engines that know where their copies come from: what a prompt's statistics say of its copies, here and through a
// store, and what becomes of copies that have seen other text.
#include "tests/services/engine/engines_fixture.h"
#include "tests/support/background_idle.h"
#include "tests/support/seeded_random.h"

namespace spl::engine {
namespace {

class CopiedTokensTest : public EnginesTest {
 protected:
  void SetUp() override {
    random_ = test::SeededRandom("copied tokens");
    lead_ = RandomPrompt(random_, 30);
    other_lead_ = RandomPrompt(random_, 21);
    first_ = RandomPrompt(random_, 150);
    second_ = RandomPrompt(random_, 200);
    question_ = RandomPrompt(random_, 9);
  }
  void StartEngines(bool canonical, bool empty_store = true) {
    if (empty_store) store_ = std::make_shared<FakeStore>();
    PrefillEngineOptions options;
    options.canonical_prefill = canonical;
    options.store = store_;
    Start(8192, 8192, options);
  }
  // [lead][texts, each of them a segment][question]
  std::shared_ptr<Outcome> AskAbout(const std::vector<int32_t>& lead, const std::vector<std::vector<int32_t>>& texts,
                                    bool publish = true, bool frozen = false) {
    std::vector<int32_t> prompt = lead;
    std::vector<ReuseSpan> segments;
    for (const auto& text : texts) {
      const auto begin = static_cast<int32_t>(prompt.size()), size = static_cast<int32_t>(text.size());
      segments.push_back({{begin, begin + size}, kDocs, frozen});
      prompt = Concatenate({prompt, text});
    }
    return Ask(Concatenate({prompt, question_}), [&](PrefillRequest& r) {
      r.segments = segments;
      r.reuse.policy = "sparsex";
      r.reuse.probe_layers = probe_layers_;
      r.publish = publish;
    });
  }
  static std::vector<int64_t> Copied(const Outcome& outcome) {
    const CopiedTokens& copied = outcome.stats.copied;
    return {copied.same_context, copied.isolated, copied.foreign};
  }
  using Are = std::vector<int64_t>;  // same context, isolated, foreign

  std::mt19937 random_;
  int32_t probe_layers_ = 0;  // of the next prompts
  std::vector<int32_t> lead_, other_lead_, first_, second_, question_;
  std::shared_ptr<FakeStore> store_;
};

TEST_F(CopiedTokensTest, AreCountedByWhatTheyHaveSeen) {
  StartEngines(false);
  EXPECT_EQ(Copied(*AskAbout(lead_, {first_, second_})), (Are{0, 0, 0}));
  const auto same = AskAbout(other_lead_, {first_, second_}, false);
  EXPECT_EQ(Copied(*same), (Are{350, 0, 0}));
  EXPECT_EQ(same->stats.recomputed_tokens, 0);
  EXPECT_EQ(same->stats.computed_tokens, 30);
  EXPECT_FALSE(same->stats.exact);
  const auto turned = AskAbout(other_lead_, {second_, first_}, false);
  EXPECT_EQ(Copied(*turned), (Are{0, 150, 200})) << "the first began its prompt";
  EXPECT_GT(turned->stats.recomputed_tokens, 0);
  EXPECT_EQ(turned->stats.probe_layers, 0);
  probe_layers_ = -1;
  EXPECT_EQ(AskAbout(other_lead_, {second_, first_}, false)->stats.probe_layers, 0) << "30 of 380 tokens are fresh";
  probe_layers_ = 2;
  const auto probed = AskAbout(other_lead_, {second_, first_}, false);
  EXPECT_EQ(probed->stats.probe_layers, 2);
  EXPECT_GT(probed->stats.recomputed_tokens, 0);
  EXPECT_EQ(AskAbout(other_lead_, {first_, second_}, false)->stats.probe_layers, 0) << "nothing had to be chosen";
  probe_layers_ = 0;

  // Through the store the same: a chunk says behind which text it was computed.
  ASSERT_TRUE(store_->WaitForSize(6 + 3 + 4)) << "the prompt's chunks, and those of the segments";
  StartEngines(false, false);
  const auto fetched = AskAbout(other_lead_, {first_, second_}, false);
  EXPECT_GT(fetched->stats.fetched_bytes, 0);
  EXPECT_EQ(Copied(*fetched), (Are{350, 0, 0}));
  EXPECT_EQ(fetched->stats.recomputed_tokens, 0);
  EXPECT_EQ(fetched->tokens, same->tokens);
  EXPECT_EQ(Copied(*AskAbout(other_lead_, {second_, first_}, false)), (Are{0, 150, 200}));
  // Chunks of an older build do not say it.
  for (const auto& text : {first_, second_}) {
    for (const auto& key : SegmentIndex(model_->kv_fingerprint()).KeysOf(kDocs, text)) {
      chunk::Chunk chunk = *store_->Find(key);
      chunk.header.context = {};
      store_->Remove(key);
      ASSERT_TRUE(store_->Put({&chunk, 1}, SteadyTime::max()).ok());
    }
  }
  StartEngines(false, false);
  EXPECT_EQ(Copied(*AskAbout(other_lead_, {first_, second_}, false)), (Are{0, 0, 350}));
}

TEST_F(CopiedTokensTest, AreComputedByThemselvesWhereTheyHaveSeenOtherText) {
  StartEngines(true);
  (void)AskAbout(lead_, {first_, second_}, true, true);
  const auto third = RandomPrompt(random_, 100);
  // The new document has no source behind the copy of the other, which has seen the first.
  EXPECT_EQ(Copied(*AskAbout(lead_, {second_, third})), (Are{0, 0, 200}));
  ASSERT_TRUE(test::WaitBackgroundIdle(*prefill_));
  EXPECT_EQ(prefill_->canonical_stats().num_computed, 2u);
  EXPECT_EQ(prefill_->segment_stats().num_sources, 3u) << "the new one took the place of the old one";
  EXPECT_EQ(prefill_->segment_stats().num_frozen, 2u) << "which was frozen";
  const auto again = AskAbout(other_lead_, {third, second_});
  EXPECT_EQ(Copied(*again), (Are{100, 200, 0})) << "both were computed behind the first prompt's lead";
  // Nothing is left to be replaced.
  ASSERT_TRUE(test::WaitBackgroundIdle(*prefill_));
  EXPECT_EQ(prefill_->canonical_stats().num_computed, 2u);
  // The first has still seen what it saw.
  EXPECT_EQ(Copied(*AskAbout(other_lead_, {first_}, false)), (Are{150, 0, 0}));

  // Not where the request may not be kept, and not without the option.
  StartEngines(true);
  (void)AskAbout(lead_, {first_, second_});
  (void)AskAbout(lead_, {second_}, false);
  ASSERT_TRUE(test::WaitBackgroundIdle(*prefill_));
  EXPECT_EQ(prefill_->canonical_stats().num_computed, 0u);
  StartEngines(false);
  (void)AskAbout(lead_, {first_, second_});
  (void)AskAbout(lead_, {second_});
  ASSERT_TRUE(test::WaitBackgroundIdle(*prefill_));
  EXPECT_EQ(Copied(*AskAbout(lead_, {second_}, false)), (Are{0, 0, 200}));
}

}  // namespace
}  // namespace spl::engine
