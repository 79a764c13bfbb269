// `splice tokenize` as a user runs it: the real program, its files, its exit codes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>

namespace spl::cli {
namespace {

using testing::HasSubstr;

class TokenizeTest : public testing::Test {
 protected:
  void SetUp() override {
    dir_ = std::filesystem::path(testing::TempDir()) / testing::UnitTest::GetInstance()->current_test_info()->name();
    std::filesystem::remove_all(dir_);
    std::filesystem::create_directories(dir_);
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  std::string Path(const std::string& name) const { return (dir_ / name).string(); }
  std::string Read(const std::string& name) const {
    std::ifstream file(dir_ / name, std::ios::binary);
    return std::string((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  }
  // Runs the program with its output in files "out" and "err". Returns the exit code.
  int Run(const std::string& arguments) {
    const std::string command =
        std::string(SPLICE_PROGRAM) + " " + arguments + " >" + Path("out") + " 2>" + Path("err");
    const int status = std::system(command.c_str());
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  int Tokenize(const std::string& lines, const std::string& model = "models/splice-tiny") {
    std::ofstream(dir_ / "in.jsonl", std::ios::binary) << lines;
    return Run("tokenize --model " + model + " --input " + Path("in.jsonl") + " --output " + Path("ids.jsonl"));
  }

  std::filesystem::path dir_;
};

TEST_F(TokenizeTest, TextsAndChats) {
  EXPECT_EQ(Tokenize("{\"text\": \"Hello world<|im_end|>\"}\n\n{\"text\": \"a\", \"add_special_tokens\": true}\n"
                     "{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}], \"add_generation_prompt\": false}\n"
                     "{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}]}"),
            0)
      << Read("err");
  EXPECT_EQ(
      Read("ids.jsonl"),
      "{\"ids\":[72,425,111,1139,4091],\"text\":\"Hello world<|im_end|>\"}\n"
      "{\"ids\":[4088,97],\"text\":\"<|begin_of_text|>a\"}\n"
      "{\"ids\":[4088,4090,717,10,72,105,4091,10],\"text\":\"<|begin_of_text|><|im_start|>user\\nHi<|im_end|>\\n\"}\n"
      "{\"ids\":[4088,4090,717,10,72,105,4091,10,4090,718,10],"
      "\"text\":\"<|begin_of_text|><|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n\"}\n");
  EXPECT_EQ(Read("out"), "");
  EXPECT_EQ(Read("err"), "");
}

TEST_F(TokenizeTest, StandardInputAndOutput) {
  std::ofstream(dir_ / "in.jsonl") << "{\"text\": \"a\"}\n";
  EXPECT_EQ(Run("tokenize --model models/splice-tiny --input - --output - <" + Path("in.jsonl")), 0);
  EXPECT_EQ(Read("out"), "{\"ids\":[97],\"text\":\"a\"}\n");
}

TEST_F(TokenizeTest, BadLinesFailWithTheLine) {
  const std::pair<const char*, const char*> cases[] = {
      {"{\"text\": \"a\"}\n{", "in.jsonl:2: not JSON"},
      {"[]", "in.jsonl:1: must be an object"},
      {"{}", "needs \"text\" or \"messages\""},
      {"{\"text\": 5}", "\"text\" must be a string"},
      {"{\"text\": \"a\", \"add_special_tokens\": 1}", "must be true or false"},
      {"{\"messages\": {}}", "\"messages\" must be a list"},
      {"{\"messages\": [5]}", "messages[0] must be an object"},
      {"{\"messages\": [{\"role\": \"user\"}]}", "messages[0] needs"},
      {"{\"messages\": [{\"role\": \"user\", \"content\": []}]}", "messages[0].content must be a string"},
      {"{\"messages\": [{\"content\": \"\", \"tool_calls\": []}]}", "messages[0] needs"},
      {"{\"messages\": [], \"chat_template_kwargs\": {\"messages\": []}}", "must not set \"messages\""},
  };
  for (const auto& [lines, message] : cases) {
    EXPECT_EQ(Tokenize(lines), 1) << lines;
    EXPECT_THAT(Read("err"), HasSubstr("splice tokenize: ")) << lines;
    EXPECT_THAT(Read("err"), HasSubstr(message)) << lines;
  }
}

TEST_F(TokenizeTest, BadFilesFail) {
  EXPECT_EQ(Tokenize("", Path("no-model")), 1);
  EXPECT_THAT(Read("err"), HasSubstr("no-model: no such folder"));
  EXPECT_EQ(Run("tokenize --model models/splice-tiny --input " + Path("none") + " --output -"), 1);
  EXPECT_THAT(Read("err"), HasSubstr("cannot open " + Path("none")));
  EXPECT_EQ(Run("tokenize --model models/splice-tiny --input /dev/null --output " + Path("no/where")), 1);
  EXPECT_THAT(Read("err"), HasSubstr("cannot write"));
  std::ofstream(dir_ / "in.jsonl") << "{\"text\": \"a\"}\n";
  EXPECT_EQ(Run("tokenize --model models/splice-tiny --input " + Path("in.jsonl") + " --output /dev/full"), 1);
}

TEST_F(TokenizeTest, Usage) {
  EXPECT_EQ(Run(""), 2);
  EXPECT_EQ(Run("no-such-command"), 2);
  EXPECT_EQ(Run("tokenize"), 2);
  EXPECT_EQ(Run("tokenize --no-such-flag"), 2);
  EXPECT_THAT(Read("err"), HasSubstr("--help"));
  EXPECT_EQ(Run("--help"), 0);
  EXPECT_THAT(Read("out"), HasSubstr("tokenize"));
  EXPECT_EQ(Run("tokenize --help"), 0);
  EXPECT_THAT(Read("out"), HasSubstr("Examples:"));
}

}  // namespace
}  // namespace spl::cli
