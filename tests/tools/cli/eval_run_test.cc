// Turns: what is asked of the model, what the history of a later turn holds, and how the report breaks answers down.
#include "tools/cli/eval_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "services/methods/methods.h"
#include "tools/cli/eval_suite.h"

namespace spl::cli {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

// One token per byte, and answers of a function of the prompt's text.
class ScriptedGenerator final : public TextGenerator {
 public:
  explicit ScriptedGenerator(std::function<std::string(const std::string&)> answer) : answer_(std::move(answer)) {}

  std::string description() const override { return "script"; }
  absl::StatusOr<std::vector<int32_t>> Tokenize(const std::string& text) override {
    return std::vector<int32_t>(text.begin(), text.end());
  }
  absl::StatusOr<TextResult> Generate(const TextRequest& request, const OnText&) override {
    prompts.emplace_back(request.ids.begin(), request.ids.end());
    requests.push_back(request);
    return TextResult{.text = answer_(prompts.back()),
                      .prompt_tokens = static_cast<int64_t>(request.ids.size()),
                      .ttft_s = 0.001 * static_cast<double>(prompts.size())};
  }

  std::vector<std::string> prompts;
  std::vector<TextRequest> requests;

 private:
  const std::function<std::string(const std::string&)> answer_;
};

EvalSample ThreeTurns() {
  const auto text = [](const char* t) { return EvalSegment{EvalSegment::Kind::kNew, t}; };
  const EvalSegment answer{EvalSegment::Kind::kAnswer, ""};
  return {.id = "s",
          .task = "t",
          .length = 64,
          .segments = {text("[one]"), answer, text("[two]"), answer, text("[three]"), answer},
          .answers = {"1", "2", "3"},
          .positions = {"end", "begin", "begin"}};
}

EvalMethod Exact(const std::string& decode = "auto") { return *ParseEvalMethod("exact", decode, "context"); }

// Right in the first and third turn.
std::string Answer(const std::string& prompt) {
  if (prompt.ends_with("[three]")) return "3";
  return prompt.ends_with("[one]") ? "1" : "wrong";
}

TEST(EvalRunTest, ExpectedAnswersStandInTheHistory) {
  ScriptedGenerator generator(Answer);
  EvalRun run(generator, {});
  ASSERT_TRUE(run.Run(ThreeTurns(), Exact()).ok());
  EXPECT_THAT(generator.prompts,
              ElementsAre("[one]", "[one]1<|im_end|>[two]", "[one]1<|im_end|>[two]2<|im_end|>[three]"));
}

TEST(EvalRunTest, GeneratedAnswersStandInTheHistory) {
  ScriptedGenerator generator(Answer);
  EvalRun run(generator, {.history = EvalHistory::kGenerated});
  ASSERT_TRUE(run.Run(ThreeTurns(), Exact()).ok());
  EXPECT_THAT(generator.prompts,
              ElementsAre("[one]", "[one]1<|im_end|>[two]", "[one]1<|im_end|>[two]wrong<|im_end|>[three]"));
}

// Each turn counts by itself, whatever became of the one before.
TEST(EvalRunTest, TurnsAreScoredByThemselves) {
  ScriptedGenerator generator(Answer);
  EvalRun run(generator, {.groupings = {EvalGrouping::kPosition, EvalGrouping::kTurn}});
  ASSERT_TRUE(run.Run(ThreeTurns(), Exact()).ok());
  ASSERT_TRUE(run.Run(ThreeTurns(), Exact("quest")).ok());
  const json report = run.report().ToJson();
  ASSERT_EQ(report["rows"].size(), 2u);  // 2 of 3: no core task
  for (const json& row : report["rows"]) {
    EXPECT_EQ(row["n"], 3);
    EXPECT_NEAR(row["accuracy"].get<double>(), 2.0 / 3, 1e-12);
  }
  std::map<std::string, std::pair<int, double>> groups;  // of exact
  for (const json& group : report["groups"]) {
    if (group["decode"] == "auto") groups[group["group"]] = {group["n"], group["accuracy"]};
  }
  const std::map<std::string, std::pair<int, double>> expected = {
      {"begin", {2, 0.5}}, {"end", {1, 1.0}}, {"turn 1", {1, 1.0}}, {"turn 2", {1, 0.0}}, {"turn 3", {1, 1.0}}};
  EXPECT_EQ(groups, expected);
  EXPECT_EQ(report["groups"].size(), 2 * expected.size());
}

TEST(EvalRunTest, EveryTurnIsListedWithItsHistory) {
  ScriptedGenerator generator(Answer);
  EvalRun run(generator, {});
  ASSERT_TRUE(run.Run(ThreeTurns(), Exact()).ok());
  const json turns = run.report().ToJson()["turns"];
  ASSERT_EQ(turns.size(), 3u);
  const int64_t first = std::string("[one]1<|im_end|>").size(), second = std::string("[two]2<|im_end|>").size();
  const int64_t history[] = {0, first, first + second};
  const int64_t prompt[] = {5, first + 5, first + second + 7};
  for (int64_t i = 0; i < 3; ++i) {
    EXPECT_EQ(turns[i]["turn"], i + 1);
    EXPECT_EQ(turns[i]["history_tokens"], history[i]);
    EXPECT_EQ(turns[i]["prompt_tokens"], prompt[i]);
    EXPECT_NEAR(turns[i]["ttft_ms"].get<double>(), double(i + 1), 1e-9);
    EXPECT_EQ(turns[i]["correct"], i != 1);
  }
  EXPECT_THAT(run.report().ToHtml("x"), HasSubstr("time to first token of each turn"));
}

// Each document was computed at the place where it stands in the prompt, and behind text that is not in the prompt.
TEST(EvalRunTest, ForeignDocumentsHaveSeenOtherTextOfTheSameLength) {
  const auto sample = [](const char* a, const char* b, const char* c) {
    using Kind = EvalSegment::Kind;
    return EvalSample{.id = "s",
                      .task = "t",
                      .length = 64,
                      .segments = {{Kind::kNew, "[do]"},
                                   {Kind::kReuse, a},
                                   {Kind::kReuse, b},
                                   {Kind::kNew, "-"},
                                   {Kind::kReuse, c},
                                   {Kind::kNew, "[what?]"}},
                      .answers = {"1"},
                      .positions = {"end"}};
  };
  const EvalSample mine = sample("aaaa", "bbb", "cc"), other = sample("xyz", "X", "Y");
  const auto method = ParseEvalMethod("sparsex", "auto", "foreign");
  ASSERT_TRUE(method.ok()) << method.status();
  ScriptedGenerator generator(Answer);
  EvalRun run(generator, {});
  ASSERT_TRUE(run.Run(mine, *method, &other).ok());
  EXPECT_THAT(generator.prompts, ElementsAre("[do]aaaa", "[do]xyzXbbb", "[do]xyzXYxyzcc", "[do]aaaabbb-cc[what?]"));
  for (size_t i = 0; i < 3; ++i) {
    ASSERT_EQ(generator.requests[i].segments.size(), 1u);
    EXPECT_EQ(generator.requests[i].segments[0].begin, generator.requests[3].segments[i].begin);
    EXPECT_EQ(generator.requests[i].segments[0].end, generator.requests[3].segments[i].end);
  }
  const absl::Status alone = run.Run(mine, *method);
  EXPECT_EQ(alone.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(alone.message()), HasSubstr("two samples"));
  EXPECT_EQ(ProvenancePhrase(ProvenanceName(method->provenance)), std::string("behind other text"));
  EXPECT_FALSE(ParseEvalMethod("sparsex", "auto", "elsewhere").ok());
}

TEST(EvalRunTest, KeptHistoryIsOfOneSample) {
  ScriptedGenerator generator(Answer);
  EvalRun run(generator, {.keep_history_kv = true});
  ASSERT_TRUE(run.Run(ThreeTurns(), Exact()).ok());
  ASSERT_TRUE(run.Run(ThreeTurns(), Exact()).ok());
  std::vector<std::string> names;
  for (const TextRequest& request : generator.requests) {
    names.push_back(request.reuse_options["namespace"]);
    EXPECT_EQ(request.reuse_options["publish"], true);
    EXPECT_EQ(request.reuse_options["session"].get<std::string>() + "-prefix", names.back());
  }
  ASSERT_EQ(names.size(), 6u);
  EXPECT_EQ(names[0], names[1]);
  EXPECT_EQ(names[0], names[2]);
  EXPECT_NE(names[0], names[3]);

  ScriptedGenerator alone(Answer);
  EvalRun without(alone, {});
  ASSERT_TRUE(without.Run(ThreeTurns(), Exact()).ok());
  EXPECT_NE(alone.requests[0].reuse_options["namespace"], alone.requests[1].reuse_options["namespace"]);
  EXPECT_EQ(alone.requests[0].reuse_options["publish"], false);
  EXPECT_FALSE(alone.requests[0].reuse_options.contains("session"));
}

TEST(EvalReportTest, PositionsBreakDownCoreTasksToo) {
  EvalReport report({EvalGrouping::kPosition});
  const auto add = [&](const char* task, const char* position, const char* decode, bool correct) {
    report.Add({.id = "x", .task = task, .length = 8, .position = position}, Exact(decode), {.prompt_tokens = 1},
               correct);
  };
  for (int i = 0; i < 5; ++i) {
    for (const char* position : {"begin", "middle", "end"}) {
      add("known", position, "dense", true);
      add("known", position, "streaming", std::string(position) == "end");
      add("unknown", position, "dense", false);
      add("unknown", position, "streaming", false);
    }
  }
  add("known", "", "dense", true);
  int found = 0;
  const json groups = report.ToJson()["groups"];
  for (const json& group : groups) {
    if (group["task"] != "core tasks") continue;
    ++found;
    const bool right = group["decode"] == "dense" || group["group"] == "end";
    EXPECT_EQ(group["accuracy"], right ? 1.0 : 0.0) << group.dump();
    EXPECT_EQ(group["n"], group["group"] == "unknown" ? 1 : 5) << group.dump();
  }
  EXPECT_EQ(found, 7);  // dense has one of unknown position, too
  const std::string html = report.ToHtml("x");
  EXPECT_LT(html.find("<th>begin"), html.find("<th>middle"));
  EXPECT_LT(html.find("<th>middle"), html.find("<th>end"));
  EXPECT_THAT(html, Not(HasSubstr("time to first token of each turn")));  // no sample has turns
}

TEST(EvalReportTest, GroupingsByName) {
  EXPECT_EQ(*ParseEvalGrouping("position"), EvalGrouping::kPosition);
  EXPECT_EQ(*ParseEvalGrouping("turn"), EvalGrouping::kTurn);
  EXPECT_THAT(std::string(ParseEvalGrouping("colour").status().message()), HasSubstr("colour"));
}

TEST(EvalMethodTest, BudgetsMayBeShareOfTheContext) {
  const auto method = ParseEvalMethod("exact", "quest:context_share=0.0625:dense_layers=1", "context");
  ASSERT_TRUE(method.ok()) << method.status();
  EXPECT_EQ(OptionsFor(*method, 8192), json({{"decode_budget", 512}, {"decode_dense_layers", 1}}));
  EXPECT_EQ(OptionsFor(*method, 1000)["decode_budget"], 64);  // whole 16 tokens
  EXPECT_EQ(OptionsFor(*method, 10)["decode_budget"], 16);
  for (const char* share : {"0", "1.5", "-1"}) {
    const auto bad = ParseEvalMethod("exact", std::string("quest:context_share=") + share, "context");
    EXPECT_THAT(std::string(bad.status().message()), HasSubstr("context_share")) << share;
  }
}

// Sinks and window of the bands are the published 128 and 3,968, or of these proportions in a share of the context.
TEST(EvalMethodTest, BandsAreAtMostTheirShareOfTheContext) {
  for (const std::string name : {"a-shape", "tri-shape"}) {
    const auto method = ParseEvalMethod(name + ":context_share=0.5:dense_layers=1", "dense", "context");
    ASSERT_TRUE(method.ok()) << method.status();
    for (const int64_t length : {8192, 16384, 131072})
      EXPECT_EQ(OptionsFor(*method, length), json({{"band_sinks", 128}, {"band_window", 3968}, {"dense_layers", 1}}));
    EXPECT_EQ(OptionsFor(*method, 4096), json({{"band_sinks", 64}, {"band_window", 1984}, {"dense_layers", 1}}));
    EXPECT_EQ(OptionsFor(*method, 1000), json({{"band_sinks", 15}, {"band_window", 485}, {"dense_layers", 1}}));
    EXPECT_EQ(OptionsFor(*method, 1)["band_window"], 2);
    const auto bad = ParseEvalMethod(name + ":context_share=2", "dense", "context");
    EXPECT_THAT(std::string(bad.status().message()), HasSubstr("context_share")) << name;
  }
  // Other methods have no such option: it stays, and is refused where options are read.
  EXPECT_TRUE(ParseEvalMethod("sparsex:context_share=0.5", "dense", "context")->options.contains("context_share"));
}

// Every pair of a suite is in the table of pairs, those without answers with the reason.
TEST(EvalReportTest, PairsAndRefusals) {
  ScriptedGenerator generator([](const std::string& prompt) { return prompt.ends_with("[one]") ? "1" : "2"; });
  EvalRun run(generator, {});
  const EvalSample sample{.id = "s",
                          .task = "t",
                          .length = 64,
                          .segments = {{EvalSegment::Kind::kReuse, "document"}, {EvalSegment::Kind::kNew, "[one]"}},
                          .answers = {"1"},
                          .positions = {"end"}};
  for (const char* reuse : {"exact", "naive"}) {
    for (const char* decode : {"auto", "quest"}) {
      ASSERT_TRUE(run.Run(sample, *ParseEvalMethod(reuse, decode, "context")).ok());
    }
  }
  run.Refuse(*ParseEvalMethod("naive", "snapkv", "context"), absl::UnimplementedError("not <here>"));
  const json report = run.report().ToJson();
  ASSERT_EQ(report["refused"].size(), 1u);
  EXPECT_EQ(report["refused"][0]["decode"], "snapkv");
  const std::string html = run.report().ToHtml("x");
  EXPECT_THAT(html, HasSubstr("every pair"));
  EXPECT_THAT(html, HasSubstr("not &lt;here&gt;"));
  EXPECT_THAT(html, HasSubstr("prefill methods"));
  EXPECT_THAT(html, HasSubstr("decode methods behind an exact prefill"));
}

TEST(EvalSuiteTest, EveryMethodThatChoosesIsInTheSuite) {
  const auto suite = FindEvalSuite("methods");
  ASSERT_TRUE(suite.ok());
  std::set<std::string> names;
  for (const std::string& method : suite->reuse) names.insert(method.substr(0, method.find(':')));
  for (const methods::Policy& policy : methods::Policies())
    EXPECT_TRUE(names.contains(std::string(policy.name)) || policy.name == "splice+") << policy.name;
  for (const std::string& method : suite->reuse) {
    if (!method.starts_with("a-shape") && !method.starts_with("tri-shape")) continue;
    const json options = OptionsFor(*ParseEvalMethod(method, "dense", "context"), 8192);
    EXPECT_EQ(options["band_sinks"], 128) << method;
    EXPECT_EQ(options["band_window"], 3968) << method;
  }
}

TEST(EvalSuiteTest, NamesAreChecked) {
  const auto suite = FindEvalSuite("methods");
  ASSERT_TRUE(suite.ok());
  EXPECT_EQ(suite->reuse.front(), "exact") << "what the others are compared with comes first";
  for (const std::string& reuse : suite->reuse) {
    for (const std::string& decode : suite->decode) EXPECT_TRUE(ParseEvalMethod(reuse, decode, "context").ok());
  }
  EXPECT_FALSE(FindEvalSuite("everything").ok());
}

}  // namespace
}  // namespace spl::cli
