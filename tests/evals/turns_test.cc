// The committed sets of several turns: their lengths are this tokenizer's, and splice-tiny answers wherever the
// question stands.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "services/tokenizer/tokenizer.h"
#include "tests/support/paths.h"
#include "tools/cli/eval_run.h"

namespace spl::cli {
namespace {

using nlohmann::json;

std::string SetPath(const std::string& shape) { return "tests/evals/" + shape + ".jsonl"; }

// The generator counts with a tokenizer of its own, in Python: both must agree.
TEST(TurnsTest, LengthsAreOfThisTokenizer) {
  const auto tokenizer = tokenizer::Tokenizer::Load(test::kTinyModel);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  for (const char* shape : {"growing", "shared", "quiz"}) {
    const auto samples = LoadEvalData(SetPath(shape));
    ASSERT_TRUE(samples.ok()) << samples.status();
    std::ifstream file(SetPath(shape));
    for (const EvalSample& sample : *samples) {
      std::string line;
      std::getline(file, line);
      size_t tokens = 0, place = 0;
      for (const EvalSegment& segment : sample.segments) {
        // The last answer is not part of any prompt.
        if (segment.kind == EvalSegment::Kind::kAnswer && place + 1 == sample.answers.size()) break;
        const std::string text =
            segment.kind == EvalSegment::Kind::kAnswer ? sample.answers[place++] + "<|im_end|>" : segment.text;
        tokens += (*tokenizer)->Encode(text, {.parse_special_tokens = true})->size();
      }
      EXPECT_EQ(tokens, json::parse(line)["length_tokens"].get<size_t>()) << sample.id;
    }
  }
}

// One family is enough to see that a position does not get lost on the way to the model; all of them take minutes and
// are in docs/evaluation.md.
TEST(TurnsTest, TheModelAnswersAtEveryPosition) {
  const auto generator =
      MakeLocalTextGenerator({.model = {.dir = test::kTinyModel}, .backend = "cpu", .num_threads = 2});
  ASSERT_TRUE(generator.ok()) << generator.status();
  EvalRun run(**generator, {.groupings = {EvalGrouping::kPosition}});
  const auto samples = LoadEvalData(SetPath("growing"));
  ASSERT_TRUE(samples.ok()) << samples.status();
  const auto method = ParseEvalMethod("exact", "auto", "context");
  for (const EvalSample& sample : *samples) {
    if (sample.task != "growing_niah") continue;
    const absl::Status status = run.Run(sample, *method);
    ASSERT_TRUE(status.ok()) << status;
  }
  std::set<std::string> positions;
  const json groups = run.report().ToJson()["groups"];
  for (const json& group : groups) {
    if (group["task"] != "growing_niah") continue;
    positions.insert(group["group"]);
    EXPECT_EQ(group["n"], 3);
    EXPECT_GE(group["accuracy"].get<double>(), 0.6) << group.dump();  // 2 of 3; all are right where this was written
  }
  EXPECT_EQ(positions, (std::set<std::string>{"begin", "middle", "end"}));
}

}  // namespace
}  // namespace spl::cli
