// Conversations as the benchmark holds them: what is sent turn by turn, and what becomes of the answers.
#include "tools/cli/conversation_bench.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <set>

namespace spl::cli {
namespace {

using testing::HasSubstr;

// Answers every turn with two tokens and remembers what it was asked.
class RecordingGenerator final : public TextGenerator {
 public:
  absl::StatusOr<TextResult> Generate(const TextRequest& request, const OnText&) override {
    if (fail_at == requests.size()) return absl::UnavailableError("gone");
    requests.push_back(request);
    if (stop_at == requests.size()) stop = true;
    const auto length = static_cast<int64_t>(request.ids.size());
    return TextResult{.text = "ab",
                      .prompt_tokens = length,
                      .cached_tokens = length / 2,
                      .ttft_s = static_cast<double>(length) * 1e-3,
                      .receipt = {{"tokens", {{"computed", length - length / 2}, {"held", length / 2}}},
                                  {"bytes", {{"moved", 1'000'000}}}}};
  }
  absl::StatusOr<std::vector<int32_t>> Tokenize(const std::string&) override { return std::vector<int32_t>{901, 902}; }
  std::string description() const override { return "a recorder"; }

  size_t fail_at = SIZE_MAX, stop_at = SIZE_MAX;
  std::atomic<bool> stop{false};
  std::vector<TextRequest> requests;
};

ConversationOptions Small() {
  ConversationOptions options;
  options.turns = 3;
  options.first_tokens = 10;
  options.turn_tokens = 4;
  options.answer_tokens = 2;
  options.conversations = 2;
  options.alphabet = {1, 2, 3};
  options.methods = {"exact", "loopserve/sparcas"};
  return options;
}

TEST(ConversationBench, TurnsCarryTheHistoryAndTheSession) {
  RecordingGenerator generator;
  const auto turns = MeasureConversations(generator, Small(), nullptr);
  ASSERT_TRUE(turns.ok()) << turns.status();
  ASSERT_EQ(turns->size(), 9u);  // alone and two methods, three turns
  ASSERT_EQ(generator.requests.size(), 18u);
  std::set<std::string> sessions, namespaces_alone;
  for (size_t i = 0; i < generator.requests.size(); ++i) {
    const TextRequest& request = generator.requests[i];
    const size_t turn = i % 3;
    EXPECT_EQ(request.ids.size(), 10 + turn * 6);
    EXPECT_EQ(request.max_tokens, 2);
    if (turn > 0) {
      const auto& before = generator.requests[i - 1].ids;
      EXPECT_TRUE(std::equal(before.begin(), before.end(), request.ids.begin()));
      EXPECT_EQ(request.ids[before.size()], 901);
      EXPECT_EQ(request.ids[before.size() + 1], 902);
    }
    if (i < 6) {
      EXPECT_EQ(request.reuse, "exact");
      EXPECT_EQ(request.reuse_options["publish"], false);
      EXPECT_FALSE(request.reuse_options.contains("session"));
      namespaces_alone.insert(request.reuse_options["namespace"].get<std::string>());
    } else {
      EXPECT_EQ(request.reuse, i < 12 ? "exact" : "loopserve");
      EXPECT_EQ(request.decode, i < 12 ? "" : "sparcas");
      EXPECT_EQ(request.reuse_options["session"], request.reuse_options["namespace"]);
      sessions.insert(request.reuse_options["session"].get<std::string>());
    }
    // The methods hear the same texts.
    EXPECT_EQ(request.ids, generator.requests[i % 6].ids);
  }
  EXPECT_EQ(sessions.size(), 4u);
  EXPECT_EQ(namespaces_alone.size(), 6u) << "every turn by itself";
  const ConversationTurn& last = turns->back();
  EXPECT_EQ(last.method, "loopserve/sparcas");
  EXPECT_EQ(last.turn, 3);
  EXPECT_EQ(last.prompt_tokens, 22);
  EXPECT_EQ(last.computed_tokens, 11);
  EXPECT_NEAR(last.ttft_s, 0.022, 1e-9);
  EXPECT_EQ(last.held_tokens, 11);
  EXPECT_EQ(last.moved_bytes, 1'000'000);
  EXPECT_THAT(ConversationText(*turns), HasSubstr("loopserve/sparcas        3       22       11        11       22.0"));
  EXPECT_THAT(ConversationText(*turns), HasSubstr("       11      1.00\n"));
  EXPECT_EQ(ConversationJson(*turns, Small())["turns"].size(), 9u);
  EXPECT_THAT(ConversationPage(*turns), HasSubstr("<polyline"));
}

TEST(ConversationBench, ErrorsEndIt) {
  RecordingGenerator generator;
  generator.fail_at = 4;
  EXPECT_EQ(MeasureConversations(generator, Small(), nullptr).status().code(), absl::StatusCode::kUnavailable);
  ConversationOptions empty = Small();
  empty.alphabet.clear();
  EXPECT_EQ(MeasureConversations(generator, empty, nullptr).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(ConversationBench, AStoppedMeasurementKeepsItsTurns) {
  RecordingGenerator generator;
  generator.stop_at = 8;  // the second turn of the first conversation with "exact"
  ConversationOptions options = Small();
  options.stop = &generator.stop;
  const auto turns = MeasureConversations(generator, options, nullptr);
  ASSERT_TRUE(turns.ok()) << turns.status();
  EXPECT_EQ(generator.requests.size(), 8u);
  ASSERT_EQ(turns->size(), 5u);  // three of "alone", two of "exact"
  EXPECT_EQ(turns->back().method, "exact");
  EXPECT_EQ(turns->back().turn, 2);
}

}  // namespace
}  // namespace spl::cli
