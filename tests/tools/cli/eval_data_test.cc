// Evaluation sets: what a line must hold, and where the questions of its turns stand.
#include "tools/cli/eval_data.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"

namespace spl::cli {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class EvalDataTest : public ::testing::Test {
 protected:
  absl::StatusOr<std::vector<EvalSample>> Load(const std::string& lines) {
    const std::string path = dir_.path() + "/set.jsonl";
    std::ofstream(path) << lines;
    return LoadEvalData(path);
  }
  std::string Error(const std::string& line) { return std::string(Load(line).status().message()); }

  spl::testing::TempDir dir_;
};

constexpr char kTwoTurns[] = R"("id": "a", "task": "t", "length": 64, "segments": [
  {"type": "new", "text": "q1"}, {"type": "answer"}, {"type": "reuse", "text": "q2"}, {"type": "answer"}],
  "answers": ["1", "2"])";

std::string Line(std::string members) {
  std::string line = "{" + std::move(members) + "}\n";
  for (char& c : line) {
    if (c == '\n' && &c != &line.back()) c = ' ';
  }
  return line;
}

TEST_F(EvalDataTest, PositionsAreOfEachAnswer) {
  const auto samples = Load(Line(kTwoTurns) + Line(std::string(kTwoTurns) + R"(, "meta": {"position": "middle"})") +
                            Line(std::string(kTwoTurns) + R"(, "meta": {"positions": ["begin", "end"]})") +
                            Line(R"("id": "b", "task": "t", "segments": [], "answer": "x",
                                    "meta": {"position": "end", "hops": 2})"));
  ASSERT_TRUE(samples.ok()) << samples.status();
  ASSERT_EQ(samples->size(), 4u);
  EXPECT_THAT((*samples)[0].positions, ElementsAre("", ""));
  EXPECT_THAT((*samples)[1].positions, ElementsAre("middle", "middle"));
  EXPECT_THAT((*samples)[2].positions, ElementsAre("begin", "end"));
  EXPECT_THAT((*samples)[3].positions, ElementsAre("end"));
  EXPECT_THAT((*samples)[2].answers, ElementsAre("1", "2"));
}

TEST_F(EvalDataTest, ErrorsNameLineAndField) {
  EXPECT_THAT(Error(Line(kTwoTurns) + Line(std::string(kTwoTurns) + R"(, "meta": {"positions": ["end"]})")),
              AllOf(HasSubstr("line 2"), HasSubstr("meta.positions"), HasSubstr("2 texts")));
  EXPECT_THAT(Error(Line(std::string(kTwoTurns) + R"(, "meta": {"positions": ["end", 3]})")), HasSubstr("positions"));
  EXPECT_THAT(Error(Line(R"("id": "a", "task": "t", "segments": [{"type": "answer"}], "answers": [])")),
              HasSubstr("'answers'"));
  EXPECT_THAT(Error("{}\n"), AllOf(HasSubstr("line 1"), HasSubstr("'id'")));
  EXPECT_EQ(LoadEvalData(dir_.path() + "/nothing.jsonl").status().code(), absl::StatusCode::kNotFound);
}

// The sets that the model came with say where their questions stand.
TEST_F(EvalDataTest, SharedSetsHavePositions) {
  const std::string shared = test::SharedDir();
  if (shared.empty()) GTEST_SKIP() << "no ../shared and no SPLICE_SHARED_DIR";
  const auto samples = LoadEvalData(shared + "/eval/multiturn.jsonl.xz");
  ASSERT_TRUE(samples.ok()) << samples.status();
  std::map<std::string, int> positions;
  for (const EvalSample& sample : *samples) {
    EXPECT_EQ(sample.answers.size(), 3u) << sample.id;
    for (const std::string& position : sample.positions) ++positions[position];
  }
  EXPECT_EQ(positions, (std::map<std::string, int>{{"begin", 3 * 77}, {"middle", 3 * 76}, {"end", 3 * 72}}));
}

}  // namespace
}  // namespace spl::cli
