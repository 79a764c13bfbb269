#include "services/router/http/stored_responses.h"

#include <gtest/gtest.h>

namespace spl::router {
namespace {

using std::chrono::seconds;

StoredResponses::Owner OwnerOf(uint8_t first) { return {first}; }
StoredResponse Sized(size_t bytes) { return {.response = "{}", .items = std::string(bytes, ' '), .session = "s"}; }

class StoredResponsesTest : public ::testing::Test {
 protected:
  Metrics metrics_;
  const StoredResponses::Owner a_ = OwnerOf(1), b_ = OwnerOf(2);
  StoredResponses::Clock::time_point now_{};
};

TEST_F(StoredResponsesTest, OwnersSeeTheirOwn) {
  StoredResponses table({}, metrics_);
  table.Add(a_, "r", {.response = "x", .items = "[]", .session = "s"}, now_);
  ASSERT_NE(table.Find(a_, "r", now_), nullptr);
  EXPECT_EQ(table.Find(a_, "r", now_)->response, "x");
  EXPECT_EQ(table.Find(b_, "r", now_), nullptr);
  EXPECT_FALSE(table.Erase(b_, "r", now_));
  EXPECT_TRUE(table.Erase(a_, "r", now_));
  EXPECT_FALSE(table.Erase(a_, "r", now_));
  EXPECT_EQ(table.Find(a_, "r", now_), nullptr);
  EXPECT_EQ(table.num_entries(), 0u);
  EXPECT_EQ(table.num_bytes(), 0u);
}

TEST_F(StoredResponsesTest, TheMetricsSayWhatIsKept) {
  StoredResponses table({.ttl = seconds(10)}, metrics_);
  const auto expect = [&](int entries, size_t bytes, int missed) {
    const std::string text = metrics_.Render();
    for (const std::string& line : {"splice_router_stored_responses " + std::to_string(entries),
                                    "splice_router_stored_response_bytes " + std::to_string(bytes),
                                    "splice_router_stored_responses_missed_total " + std::to_string(missed)})
      EXPECT_NE(text.find("\n" + line + "\n"), std::string::npos) << line << " is not in\n" << text;
  };
  expect(0, 0, 0);
  table.Add(a_, "1", Sized(100), now_);
  table.Add(b_, "2", Sized(300), now_ + seconds(5));
  expect(2, table.num_bytes(), 0);
  EXPECT_GT(table.num_bytes(), 400u);
  EXPECT_EQ(table.Find(a_, "2", now_ + seconds(5)), nullptr);
  expect(2, table.num_bytes(), 1);
  EXPECT_EQ(table.Find(a_, "1", now_ + seconds(12)), nullptr) << "it has expired";
  expect(1, table.num_bytes(), 2);
  EXPECT_TRUE(table.Erase(b_, "2", now_ + seconds(12)));
  expect(0, 0, 2);
}

TEST_F(StoredResponsesTest, UseRenewsTheLease) {
  StoredResponses table({.ttl = seconds(10)}, metrics_);
  table.Add(a_, "old", Sized(1), now_);
  table.Add(a_, "used", Sized(1), now_);
  EXPECT_NE(table.Find(a_, "used", now_ + seconds(9)), nullptr);
  EXPECT_EQ(table.Find(a_, "old", now_ + seconds(10)), nullptr);
  EXPECT_NE(table.Find(a_, "used", now_ + seconds(18)), nullptr);
  EXPECT_EQ(table.num_entries(), 1u);
  EXPECT_EQ(table.Find(a_, "used", now_ + seconds(28)), nullptr);
  EXPECT_EQ(table.num_bytes(), 0u);
}

// Whoever keeps the most loses the response that was not used for longest.
TEST_F(StoredResponsesTest, RoomIsMadeByTheOneWhoKeepsTheMost) {
  StoredResponses table({.max_bytes = 100'000}, metrics_);
  table.Add(b_, "b", Sized(20'000), now_);
  for (const char* id : {"1", "2", "3"}) table.Add(a_, id, Sized(20'000), now_);
  EXPECT_NE(table.Find(a_, "1", now_), nullptr);  // "2" is the oldest now
  table.Add(b_, "c", Sized(30'000), now_);
  EXPECT_LE(table.num_bytes(), 100'000u);
  EXPECT_EQ(table.Find(a_, "2", now_), nullptr);
  for (const char* id : {"1", "3"}) EXPECT_NE(table.Find(a_, id, now_), nullptr) << id;
  for (const char* id : {"b", "c"}) EXPECT_NE(table.Find(b_, id, now_), nullptr) << id;
}

TEST_F(StoredResponsesTest, EntriesAreBounded) {
  StoredResponses table({.max_entries = 3}, metrics_);
  for (const char* id : {"1", "2", "3", "4"}) table.Add(a_, id, Sized(1), now_);
  EXPECT_EQ(table.num_entries(), 3u);
  EXPECT_EQ(table.Find(a_, "1", now_), nullptr);
}

TEST_F(StoredResponsesTest, OneThatIsTooLargeIsNotKept) {
  StoredResponses table({.max_bytes = 1000}, metrics_);
  table.Add(a_, "r", Sized(2000), now_);
  EXPECT_EQ(table.num_entries(), 0u);
  EXPECT_EQ(table.num_bytes(), 0u);
  StoredResponses none({.max_bytes = 0}, metrics_);
  none.Add(a_, "r", Sized(1), now_);
  EXPECT_FALSE(none.enabled());
  EXPECT_EQ(none.Find(a_, "r", now_), nullptr);
}

}  // namespace
}  // namespace spl::router
