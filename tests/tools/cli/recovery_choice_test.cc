#include "tools/cli/recovery_choice.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tools/cli/eval_method.h"
#include "tools/cli/eval_suite.h"

namespace spl::cli {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

json Row(const std::string& task, const std::string& reuse, const std::string& provenance, int right, int n = 200) {
  return {{"task", task},
          {"length", 4096},
          {"reuse", reuse},
          {"decode", "auto"},
          {"provenance", provenance},
          {"n", n},
          {"accuracy", static_cast<double>(right) / n}};
}

std::string Setting(int probe, int score, const char* share) {
  return fmt::format("sparsex:probe_layers={}:score_layers={}:recompute_share={}", probe, score, share);
}

TEST(RecoveryChoiceTest, TheCheapestWithinAPointOfExact) {
  json table;
  table["rows"] = {Row("vt", "exact", "-", 190),
                   Row("hard", "exact", "-", 100),  // no core task: nobody is compared there
                   Row("hard", Setting(6, 3, "0.05"), "isolated", 200), Row("core tasks", "exact", "-", 190),
                   Row("core tasks", Setting(6, 3, "0.05"), "isolated", 190)};
  const auto add = [&](const std::string& setting, int isolated, int foreign) {
    table["rows"].push_back(Row("vt", setting, "isolated", isolated));
    table["rows"].push_back(Row("vt", setting, "foreign", foreign));
  };
  add(Setting(12, 6, "0.15"), 190, 190);
  add(Setting(12, 6, "0.1"), 188, 188);  // a point behind
  add(Setting(9, 4, "0.1"), 187, 190);   // more than a point in one provenance, none in all together
  add(Setting(12, 6, "0.05"), 180, 180);
  add("sparsex:probe_layers=0", 190, 190);
  add("sparsex", 190, 190);
  add("naive", 190, 190);
  const auto chosen = ChooseRecovery(table, 12);
  ASSERT_TRUE(chosen.ok()) << chosen.status();
  EXPECT_EQ(chosen->probe_layers, 12);
  EXPECT_EQ(chosen->score_layers, 6);
  EXPECT_EQ(chosen->recompute_share, 0.1);
  EXPECT_EQ(chosen->num_layers, 12);
  EXPECT_EQ(chosen->answers, 400);
  EXPECT_EQ(chosen->exact, 380);
  EXPECT_EQ(chosen->right, 376);
  EXPECT_EQ(chosen->data, "core tasks of 4096 tokens");
  add(Setting(8, 4, "0.1"), 188, 188);
  EXPECT_EQ(ChooseRecovery(table, 12)->probe_layers, 8) << "fewer layers";
  add(Setting(8, 2, "0.1"), 190, 188);
  EXPECT_EQ(ChooseRecovery(table, 12)->score_layers, 2) << "as cheap, with more right answers";
  EXPECT_EQ(ChooseRecovery(table, 7).status().code(), absl::StatusCode::kFailedPrecondition) << "of another model";
}

TEST(RecoveryChoiceTest, SaysWhyNothingIsChosen) {
  const auto error = [](const json& table) {
    const absl::Status status = ChooseRecovery(table, 12).status();
    return std::string(status.message());
  };
  EXPECT_THAT(error(json::parse("[1]")), HasSubstr("splice eval --json"));
  EXPECT_THAT(error({{"rows", 3}}), HasSubstr("splice eval --json"));
  EXPECT_THAT(error({{"rows", {Row("vt", "exact", "-", 190)}}}), HasSubstr("--suite recovery"));
  EXPECT_THAT(error({{"rows", {Row("vt", Setting(12, 6, "0.1"), "isolated", 190)}}}), HasSubstr("--suite recovery"))
      << "exact was not asked";
  json table{{"rows", {Row("vt", "exact", "-", 99, 99), Row("vt", Setting(12, 6, "0.1"), "isolated", 99, 99)}}};
  EXPECT_THAT(error(table), HasSubstr("at least 100"));
  table["rows"] = {Row("vt", "exact", "-", 200), Row("vt", Setting(12, 6, "0.1"), "isolated", 190),
                   Row("vt", Setting(12, 6, "0.15"), "isolated", 197)};
  EXPECT_THAT(error(table), HasSubstr("0.15, answers 197 where exact answers 200"));
}

TEST(EvalSuiteTest, RecoveryHasProbesOfHalfToAllLayers) {
  const auto suite = FindEvalSuite("recovery", 32);
  ASSERT_TRUE(suite.ok()) << suite.status();
  EXPECT_EQ(suite->reuse.size(), 2u + 4 * 3);
  EXPECT_EQ(suite->reuse.front(), "exact");
  EXPECT_THAT(suite->reuse, ::testing::Contains(Setting(16, 8, "0.05")));
  EXPECT_THAT(suite->reuse, ::testing::Contains(Setting(32, 16, "0.15")));
  for (const std::string& reuse : suite->reuse) EXPECT_TRUE(ParseEvalMethod(reuse, "auto", "isolated").ok()) << reuse;
  EXPECT_EQ(FindEvalSuite("recovery", 1)->reuse.size(), 2u + 3);
  EXPECT_THAT(std::string(FindEvalSuite("recovery").status().message()), HasSubstr("--model"));
}

}  // namespace
}  // namespace spl::cli
