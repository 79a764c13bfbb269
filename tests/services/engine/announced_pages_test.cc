// When a prefill engine announces the pages of a prompt to whoever sends them.
#include "services/base/fault_point.h"
#include "tests/services/engine/engines_fixture.h"

namespace spl::engine {
namespace {

class AnnouncedPagesTest : public EnginesTest {
 protected:
  struct Event {
    int32_t layer = 0, page = 0;
    uint64_t passes = 0;  // that had begun, or were about to
    bool early = false;
  };

  void Start() {
    EnginesTest::Start(16384, 16384);
    ASSERT_TRUE(ArmFault("engine.prefill.step", *ParseFaultAction("drop@1000000")).ok());  // only counts
  }

  // Computes the text exactly, so that prompts can copy it.
  void Keep(const std::vector<int32_t>& text, const PositionRange& document) {
    Ask(text, [&](PrefillRequest& request) {
      request.reuse.policy = "exact";
      request.segments = {{document, kDocs}};
    });
  }

  // The prompt's announcements, in their order.
  std::vector<Event> EventsOf(const std::vector<int32_t>& prompt, const std::vector<PositionRange>& documents,
                              const ReuseOptions& reuse) {
    std::vector<Event> events;  // the engine thread's until the prompt has ended
    const uint64_t before = FaultHits("engine.prefill.step");
    outcome_ = Ask(prompt, [&](PrefillRequest& request) {
      request.reuse = reuse;
      for (const PositionRange& document : documents) request.segments.push_back({document, kDocs});
      request.layers_a_fence = layers_a_fence_;
      request.on_layer = [&events, before](const LayerReady& ready) {
        for (const PageRange& pages : ready.pages) {
          for (int32_t page = pages.begin; page < pages.end; ++page)
            events.push_back({ready.layer, page, FaultHits("engine.prefill.step") - before, ready.early});
        }
      };
    });
    EXPECT_EQ(events.size(), static_cast<size_t>(num_layers()) * PagesFor(static_cast<int64_t>(prompt.size())));
    return events;
  }

  static int32_t num_layers() { return model_->config().num_layers; }
  // Pages [first, end) that are announced, in any layer, before `page` is in layer 0: of rows that the first slice
  // computes.
  static int64_t CountBefore(const std::vector<Event>& events, int32_t page, const PageRange& pages) {
    int64_t count = 0;
    for (const Event& event : events) {
      if (event.layer == 0 && event.page == page) break;
      count += event.page >= pages.begin && event.page < pages.end;
    }
    return count;
  }

  const ScopedFaults guard_;
  int32_t layers_a_fence_ = 1;
  std::shared_ptr<Outcome> outcome_;
  std::mt19937 random_{23};
};

// Such copies are final in all layers before any row is computed.
TEST_F(AnnouncedPagesTest, CopiesInTheirOwnContextComeBeforeTheFirstLayer) {
  Start();
  const auto document = RandomPrompt(random_, 600);
  Keep(Concatenate({RandomPrompt(random_, 20), document, RandomPrompt(random_, 20)}), {20, 620});
  const auto prompt = Concatenate({RandomPrompt(random_, 30), document, RandomPrompt(random_, 40)});
  const std::vector<Event> events = EventsOf(prompt, {{30, 630}}, {.policy = "sparsex"});
  ASSERT_EQ(outcome_->stats.copied.same_context, 600);
  ASSERT_EQ(outcome_->stats.recomputed_tokens, 0);
  EXPECT_EQ(CountBefore(events, 0, {1, 9}), 8 * num_layers());
}

// The chosen rows are known when the probe has run, and pages without any are final: they are not announced with the
// layers of the next pass, which computes the others.
TEST_F(AnnouncedPagesTest, CopiesWithoutAChosenRowComeBeforeTheChosenOnes) {
  Start();
  const auto first = RandomPrompt(random_, 500), second = RandomPrompt(random_, 500);
  for (const auto& document : {first, second}) Keep(Concatenate({document, RandomPrompt(random_, 20)}), {0, 500});
  const auto prompt = Concatenate({RandomPrompt(random_, 100), first, second, RandomPrompt(random_, 40)});
  const std::vector<Event> events =
      EventsOf(prompt, {{100, 600}, {600, 1100}},
               {.policy = "sparsex", .recompute_share = 0, .recompute_min = 2, .score_pool = 0, .probe_layers = 4});
  ASSERT_EQ(outcome_->stats.copied.isolated + outcome_->stats.copied.foreign, 1000);
  ASSERT_GT(outcome_->stats.recomputed_tokens, 0);
  // At least ten of pages 2 to 16 have neither an edge nor one of two chosen rows.
  EXPECT_GE(CountBefore(events, 0, {2, 17}), 10 * num_layers());
  for (const Event& event : events) {
    if (event.layer == 0 && event.page == 0) {
      EXPECT_EQ(event.passes, 2u) << "a page that is computed in the second pass";
    }
  }
}

// Above dense layers no row is chosen yet, but the copy in its own context is known.
TEST_F(AnnouncedPagesTest, CopiesInTheirOwnContextDoNotWaitForTheRecoveryOfOthers) {
  Start();
  const auto first = RandomPrompt(random_, 500), second = RandomPrompt(random_, 500);
  for (const auto& document : {first, second})
    Keep(Concatenate({RandomPrompt(random_, 20), document, RandomPrompt(random_, 20)}), {20, 520});
  const auto prompt = Concatenate({RandomPrompt(random_, 30), first, second, RandomPrompt(random_, 40)});
  for (const int32_t probe_layers : {0, 4}) {
    const std::vector<Event> events = EventsOf(
        prompt, {{30, 530}, {530, 1030}}, {.policy = "sparsex", .recompute_max = 16, .probe_layers = probe_layers});
    ASSERT_EQ(outcome_->stats.copied.same_context, 500);
    ASSERT_EQ(outcome_->stats.copied.isolated + outcome_->stats.copied.foreign, 500);
    int64_t in_first_pass = 0;
    for (const Event& event : events) in_first_pass += event.page >= 1 && event.page < 8 && event.passes == 1;
    EXPECT_EQ(in_first_pass, 7 * num_layers()) << probe_layers;
  }
}

// Fewer fences leave no layer of a pass for later, also in passes that end within the layers of one, at a layer of
// which only keys are computed for instance.
TEST_F(AnnouncedPagesTest, LayersThatComeTogetherComeWithTheirPass) {
  Start();
  const auto first = RandomPrompt(random_, 500), second = RandomPrompt(random_, 500);
  for (const auto& document : {first, second}) Keep(Concatenate({document, RandomPrompt(random_, 20)}), {0, 500});
  for (const int32_t layers : {1, 5, 8, 100}) {
    layers_a_fence_ = layers;
    for (const Event& event : EventsOf(RandomPrompt(random_, 300), {}, {.policy = "exact"}))
      EXPECT_FALSE(event.early) << layers << ": layer " << event.layer << ", page " << event.page;
    const auto prompt = Concatenate({RandomPrompt(random_, 100), first, second, RandomPrompt(random_, 40)});
    const std::vector<Event> events =
        EventsOf(prompt, {{100, 600}, {600, 1100}}, {.policy = "sparsex", .dense_layers = 3, .recompute_max = 16});
    ASSERT_GT(outcome_->stats.recomputed_tokens, 0);
    for (const Event& event : events) {
      EXPECT_FALSE(event.page == 0 && event.early) << layers << ": layer " << event.layer;
    }
  }
}

}  // namespace
}  // namespace spl::engine
