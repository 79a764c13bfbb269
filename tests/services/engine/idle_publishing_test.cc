// When finished prompts put their chunks into the store: while no prompt is there, but not too late.
#include "tests/services/engine/stored_prompts_fixture.h"

namespace spl::engine {
namespace {

// While a prompt is held for its chunks, which never come, another one ends and has chunks to publish.
class IdlePublishingTest : public StoredPromptsTest {
 protected:
  void HoldAPrompt() {
    held_prompt_ = RandomPrompt(random_, 300);
    StartWithStored({&held_prompt_, 1});
    options_.fetch_by_cost = false;
    Start(8192, 8192, options_);
    store_->BlockGetsOf(KeyOf(held_prompt_, 0));
    held_ = Submit(held_prompt_, Greedy(2));
    ASSERT_TRUE(store_->WaitForBlockedGet());
  }
  void Run(size_t length) {
    auto other = Submit(RandomPrompt(random_, length), Greedy(2));
    ASSERT_TRUE(other->Wait() && other->status.ok()) << other->status;
  }
  void LetGo() {
    store_->BlockGetsOf(std::nullopt);
    ASSERT_TRUE(held_->Wait());
  }
  std::vector<int32_t> held_prompt_;
  std::shared_ptr<Outcome> held_;
};

TEST_F(IdlePublishingTest, WaitsUntilNoPromptIsThere) {
  options_.publish_delay_max = 600s;
  HoldAPrompt();
  Run(300);
  EXPECT_FALSE(store_->WaitForSize(5, 300ms));
  LetGo();
  EXPECT_TRUE(store_->WaitForSize(4 + 4));
}

TEST_F(IdlePublishingTest, ButNotForEver) {
  options_.publish_delay_max = 1ms;
  HoldAPrompt();
  Run(300);
  EXPECT_TRUE(store_->WaitForSize(4 + 4));
  LetGo();
}

// A prompt of many documents: each of them is offered by itself.
TEST_F(IdlePublishingTest, AllDocumentsOfAPromptWait) {
  options_.publish_delay_max = 600s;
  options_.publish_share = 1;
  HoldAPrompt();
  const auto prompt = RandomPrompt(random_, 40 * 65);
  (void)Ask(prompt, [&](PrefillRequest& r) {
    for (int32_t i = 0; i < 40; ++i) r.segments.push_back({{i * 65, i * 65 + 65}, chunk::Digest{7}});
  });
  LetGo();
  EXPECT_TRUE(store_->WaitForSize(4 + 40 + 80)) << store_->size();
}

// Runs that wait hold pages, and prompts need some.
TEST_F(IdlePublishingTest, NorWhileItHoldsTooManyPages) {
  options_.publish_delay_max = 600s;
  options_.publish_share = 40 * 64.0 / 8192;
  HoldAPrompt();
  for (int i = 0; i < 9; ++i) Run(300);  // 36 chunks wait
  EXPECT_FALSE(store_->WaitForSize(5, 100ms));
  Run(300);
  Run(300);  // is not taken
  EXPECT_TRUE(store_->WaitForSize(4 + 4));
  LetGo();
}

TEST_F(IdlePublishingTest, NorWhileTooMuchWaits) {
  options_.publish_delay_max = 600s;
  options_.max_publish_queued = 1;
  HoldAPrompt();
  Run(300);  // the publisher has it, and waits
  ASSERT_TRUE(test::Eventually([&] {
    Run(300);  // fills the queue, sooner or later
    return store_->size() >= 4 + 4;
  }));
  LetGo();
}

}  // namespace
}  // namespace spl::engine
