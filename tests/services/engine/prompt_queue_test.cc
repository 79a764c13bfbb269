// Which prompt of a prefill engine goes first, and which KV is evicted for it.
#include "services/engine/runtime/prompt_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "services/engine/runtime/page_budget.h"

namespace spl::engine {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using Job = PromptQueue::Job;

const PromptQueue::Time kNow = PromptQueue::Time() + 1h;

Job MakeJob(const std::string& id, size_t num_tokens, std::chrono::milliseconds waited, bool background = false) {
  auto job = std::make_shared<PrefillJob>();
  job->request.id = id;
  job->request.tokens.resize(num_tokens);
  job->request.background = background;
  job->submitted = kNow - waited;
  return job;
}

std::vector<std::string> Ids(const std::vector<Job>& jobs) {
  std::vector<std::string> ids;
  for (const Job& job : jobs) ids.push_back(job->request.id);
  return ids;
}

TEST(PromptQueueTest, OverdueThenShortThenLowPriority) {
  PromptQueue queue;
  const std::vector<Job> jobs = {MakeJob("long", 900, 1s),     MakeJob("background", 5, 3s, true),
                                 MakeJob("overdue", 800, 3s),  MakeJob("short", 10, 1s),
                                 MakeJob("short too", 10, 1s), MakeJob("oldest", 1000, 4s),
                                 MakeJob("on time", 800, 2s),  MakeJob("late background", 7, 11s, true)};
  queue.Wait(jobs);
  std::vector<Job> order;
  while (const Job next = queue.NextWaiting(kNow)) {
    order.push_back(next);
    queue.Remove(next);
  }
  const auto expected =
      ElementsAre("late background", "oldest", "overdue", "short", "short too", "on time", "long", "background");
  EXPECT_THAT(Ids(order), expected);
  EXPECT_FALSE(queue.has_waiting());
  for (const Job& job : jobs) queue.Run(job);
  EXPECT_THAT(Ids(queue.RunningInOrder(kNow)), expected) << "prompts that run take turns in the same order";
}

TEST(PromptQueueTest, WhatIsCancelledOrLateLeaves) {
  PromptQueue queue;
  const Job kept = MakeJob("kept", 1, 0s), cancelled = MakeJob("cancelled", 1, 0s), late = MakeJob("late", 1, 0s);
  queue.Wait(std::vector{cancelled, kept});
  queue.Run(late);
  late->request.deadline = kNow;
  *cancelled->request.cancelled = true;
  kept->request.deadline = kNow + 1ms;
  EXPECT_THAT(Ids(queue.TakeDead(kNow)), ElementsAre("cancelled", "late"));
  EXPECT_EQ(queue.num_running(), 0u);
  EXPECT_THAT(Ids(queue.TakeAll()), ElementsAre("kept"));
  EXPECT_THAT(queue.TakeAll(), testing::IsEmpty());
}

class PageBudgetTest : public testing::Test {
 protected:
  static constexpr KvShape kShape{.num_layers = 1, .num_kv_heads = 1};
  static constexpr int32_t kPages = 8;
  static constexpr chunk::Digest kNamespace{1};
  PageBudgetTest() : memory_(kPages * 2 * 64 * 8 * sizeof(float)) {}

  static std::vector<int32_t> Text(int32_t first) { return std::vector<int32_t>(128, first); }
  std::shared_ptr<SequenceKv> TwoPages() {
    auto kv = std::make_shared<SequenceKv>(pool_, kShape);
    EXPECT_TRUE(kv->Reserve(128).ok());
    kv->set_num_tokens(128);
    return kv;
  }
  // One of each kind, two pages each: the pool is full.
  void Fill() {
    local_.prefixes.Insert(chunk::MakePrefixKeys({}, kNamespace, Text(1)), *TwoPages());
    local_.segments.Insert(
        kNamespace, std::make_shared<SegmentSource>(*TwoPages(), 0, Text(2), SourceContext{.isolated = true}), true);
    local_.segments.Insert(kNamespace,
                           std::make_shared<SegmentSource>(*TwoPages(), 0, Text(3), SourceContext{.isolated = true}));
    local_.sessions.Keep({"talk", kNamespace}, chunk::MakePrefixKeys({}, kNamespace, Text(4)), "exact", TwoPages(),
                         kNow);
    EXPECT_EQ(pool_.num_free(), 0);
  }
  // Which of these are here: prefix, ordinary segment, session, frozen segment.
  std::vector<bool> Here() const {
    const SegmentIndex::Stats segments = local_.segments.stats();
    return {local_.prefixes.size() > 0, segments.num_sources > segments.num_frozen,
            local_.sessions.stats().num_sessions > 0, segments.num_frozen > 0};
  }

  std::vector<char> memory_;
  PagePool pool_{{reinterpret_cast<std::byte*>(memory_.data()), kernels::DType::kF32, 8, kPages}};
  LocalKv local_{PrefixIndex(pool_), SegmentIndex({}), SessionTable(kPages, 1h)};
};

TEST_F(PageBudgetTest, KnowledgeBasesGoLast) {
  Fill();
  PageBudget budget(pool_, local_, 0.9, nullptr);
  EXPECT_TRUE(budget.MakeRoom(0, false));
  EXPECT_THAT(Here(), ElementsAre(true, true, true, true));
  EXPECT_TRUE(budget.MakeRoom(2, false));
  EXPECT_THAT(Here(), ElementsAre(false, true, true, true));
  EXPECT_TRUE(budget.MakeRoom(3, false));
  EXPECT_THAT(Here(), ElementsAre(false, false, true, true));
  EXPECT_TRUE(budget.MakeRoom(6, false));
  EXPECT_THAT(Here(), ElementsAre(false, false, false, true));
  EXPECT_FALSE(budget.MakeRoom(8, false));
  EXPECT_THAT(Here(), ElementsAre(false, false, false, true)) << "pages will return: frozen text stays";
  EXPECT_TRUE(budget.MakeRoom(8, true));
  EXPECT_EQ(pool_.num_free(), kPages);
  EXPECT_FALSE(budget.MakeRoom(kPages + 1, true));
}

TEST_F(PageBudgetTest, FrozenTextBeyondItsShareGoesFirst) {
  Fill();
  PageBudget budget(pool_, local_, 0.2, nullptr);
  EXPECT_TRUE(budget.MakeRoom(1, false));
  EXPECT_THAT(Here(), ElementsAre(true, true, true, false));
}

TEST_F(PageBudgetTest, WhatOthersKeepIsAskedForBeforeSegments) {
  Fill();
  auto spare = std::vector<std::shared_ptr<SequenceKv>>();
  PageBudget budget(pool_, local_, 0.9, [&] {
    if (spare.empty()) return false;
    spare.pop_back();
    return true;
  });
  EXPECT_TRUE(budget.MakeRoom(2, false));
  spare.push_back(TwoPages());
  EXPECT_TRUE(budget.MakeRoom(2, false));
  EXPECT_TRUE(spare.empty());
  EXPECT_THAT(Here(), ElementsAre(false, true, true, true));
}

TEST_F(PageBudgetTest, SequencesAreOutUntilTheLastUserLetsGo) {
  PageBudget budget(pool_, local_, 0.9, nullptr);
  EXPECT_FALSE(budget.HasHandedOut());
  auto kv = TwoPages();
  budget.HandOut(kv);
  EXPECT_TRUE(budget.HasHandedOut());
  kv.reset();
  EXPECT_FALSE(budget.HasHandedOut());
}

}  // namespace
}  // namespace spl::engine
