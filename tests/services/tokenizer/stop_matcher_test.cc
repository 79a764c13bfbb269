#include <gtest/gtest.h>

#include <random>

#include "services/tokenizer/tokenizer.h"

namespace spl::tokenizer {
namespace {

struct Outcome {
  std::string text;
  int stop_idx = -1;
  bool operator==(const Outcome&) const = default;
};

// The definition: the first position where some stop string ends; of those that end there, the longest.
Outcome Naive(const std::string& text, const std::vector<std::string>& stops) {
  for (size_t end = 1; end <= text.size(); ++end) {
    Outcome best;
    for (size_t i = 0; i < stops.size(); ++i) {
      const size_t n = stops[i].size();
      if (n == 0 || n > end || text.compare(end - n, n, stops[i]) != 0) continue;
      if (best.stop_idx < 0 || n > stops[best.stop_idx].size()) best = {text.substr(0, end - n), static_cast<int>(i)};
    }
    if (best.stop_idx >= 0) return best;
  }
  return {text, -1};
}

TEST(StopMatcherTest, RandomTextInRandomPieces) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 rng(seed);
  const auto random_text = [&](size_t max) {
    std::string text(rng() % (max + 1), ' ');
    for (char& c : text) c = static_cast<char>('a' + rng() % 2);
    return text;
  };
  int num_stopped = 0;
  for (int i = 0; i < 20000; ++i) {
    std::vector<std::string> stops(rng() % 4);
    for (std::string& stop : stops) stop = random_text(5);
    const std::string text = random_text(20);
    const Outcome expected = Naive(text, stops);
    StopMatcher matcher(stops);
    Outcome found;
    for (size_t pos = 0; pos < text.size();) {
      const size_t n = std::min<size_t>(1 + rng() % 6, text.size() - pos);
      const StopMatcher::Result result = matcher.Append(text.substr(pos, n));
      pos += n;
      EXPECT_TRUE(found.stop_idx < 0 || result.text.empty()) << "text after the stop";
      if (found.stop_idx < 0) {
        found.text += result.text;
        found.stop_idx = result.stop_idx;
        EXPECT_EQ(result.stopped, result.stop_idx >= 0);
      }
    }
    found.text += matcher.Finish();
    ASSERT_EQ(found, expected) << text;
    num_stopped += found.stop_idx >= 0;
  }
  EXPECT_GT(num_stopped, 1000);
}

TEST(StopMatcherTest, HoldsBackOnlyWhatMayBecomeAMatch) {
  StopMatcher matcher({"<stop>", "END"});
  EXPECT_EQ(matcher.Append("hello <").text, "hello ");
  EXPECT_EQ(matcher.Append("st").text, "");
  EXPECT_EQ(matcher.Append("ay EN").text, "<stay ");
  const auto result = matcher.Append("D and more");
  EXPECT_TRUE(result.stopped);
  EXPECT_EQ(result.stop_idx, 1);
  EXPECT_EQ(result.text, "");
  EXPECT_EQ(matcher.Append("x").text, "");
  EXPECT_EQ(matcher.Finish(), "");
}

TEST(StopMatcherTest, WithoutStopsEverythingPasses) {
  StopMatcher matcher({});
  EXPECT_EQ(matcher.Append("abc").text, "abc");
  EXPECT_EQ(matcher.Finish(), "");
}

TEST(StopMatcherTest, FinishGivesWhatWasHeldBack) {
  StopMatcher matcher({"abc"});
  EXPECT_EQ(matcher.Append("xab").text, "x");
  EXPECT_EQ(matcher.Finish(), "ab");
  EXPECT_EQ(matcher.Finish(), "");
}

}  // namespace
}  // namespace spl::tokenizer
