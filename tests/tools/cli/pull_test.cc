// `splice pull` and `--model ORG/NAME` as a user runs them: the real program and a hub on loopback that has
// splice-tiny.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/support/hub_server.h"
#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"
#include "tools/cli/pull_display.h"

namespace spl::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class PullCommandTest : public ::testing::Test {
 protected:
  void SetUp() override { hub_.PutFolder("org/tiny", test::kTinyModel); }

  static std::string Read(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  std::string out() const { return Read(dir_.path() + "/out"); }
  std::string err() const { return Read(dir_.path() + "/err"); }
  std::string models() const { return dir_.path() + "/models"; }
  // Runs the program without anything of the caller's hub settings. Returns the exit code.
  int Run(const std::string& arguments, const std::string& environment = "") {
    const std::string command =
        "env -u HF_TOKEN -u HF_HOME -u HF_HUB_CACHE -u HF_HUB_OFFLINE -u XDG_CACHE_HOME HOME=" + dir_.path() +
        " HF_ENDPOINT=" + hub_.url() + " SPLICE_MODELS=" + models() + " " + environment + " " + SPLICE_PROGRAM + " " +
        arguments + " >" + dir_.path() + "/out 2>" + dir_.path() + "/err </dev/null";
    const int status = std::system(command.c_str());
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

  const testing::TempDir dir_;
  testing::HubServer hub_;
};

constexpr char kGenerate[] = "generate --model org/tiny --backend cpu --threads 1 --prompt hello --max-tokens 4";

TEST_F(PullCommandTest, PullsAndRunsFromThere) {
  ASSERT_EQ(Run("pull org/tiny"), 0) << err();
  EXPECT_THAT(out(), AllOf(HasSubstr("org/tiny is ready"), HasSubstr("splice serve --model org/tiny")));
  EXPECT_THAT(err(), HasSubstr("model-00001-of-00003.safetensors"));
  EXPECT_TRUE(fs::exists(models() + "/org/tiny/config.json"));
  const size_t requests = hub_.requests().size();
  ASSERT_EQ(Run(kGenerate), 0) << err();
  EXPECT_EQ(hub_.requests().size(), requests) << "a complete model asks nobody";
  ASSERT_EQ(Run("pull org/tiny"), 0) << err();
  EXPECT_THAT(out(), HasSubstr("up to date"));
}

TEST_F(PullCommandTest, GenerateFetchesAModelThatIsMissing) {
  ASSERT_EQ(Run(kGenerate), 0) << err();
  EXPECT_THAT(err(), HasSubstr("org/tiny is not on this machine: fetching it"));
  const std::string text = out();
  ASSERT_EQ(Run("generate --model models/splice-tiny --backend cpu --threads 1 --prompt hello --max-tokens 4"), 0);
  EXPECT_EQ(out(), text) << "the same model";
}

TEST_F(PullCommandTest, OfflineAModelIsUsedButNotFetched) {
  EXPECT_EQ(Run(kGenerate, "HF_HUB_OFFLINE=1"), 1);
  EXPECT_THAT(err(), HasSubstr("HF_HUB_OFFLINE"));
  EXPECT_TRUE(hub_.requests().empty());
  ASSERT_EQ(Run("pull org/tiny"), 0) << err();
  EXPECT_EQ(Run(kGenerate, "HF_HUB_OFFLINE=1"), 0) << err();
  EXPECT_EQ(Run(kGenerate, "HF_ENDPOINT=http://127.0.0.1:1"), 0) << err();
}

TEST_F(PullCommandTest, HuggingFacesCacheIsUsed) {
  const std::string root = dir_.path() + "/.cache/huggingface/hub/models--org--tiny", commit = hub_.commit("org/tiny");
  fs::create_directories(root + "/snapshots");
  fs::create_directories(root + "/refs");
  fs::copy(test::kTinyModel, root + "/snapshots/" + commit);
  std::ofstream(root + "/refs/main") << commit;
  ASSERT_EQ(Run("pull org/tiny"), 0) << err();
  EXPECT_THAT(out(), AllOf(HasSubstr("up to date"), HasSubstr(root)));
  EXPECT_EQ(hub_.CountRequests("/resolve/"), 0);
  EXPECT_EQ(Run(kGenerate), 0) << err();
  EXPECT_FALSE(fs::exists(models()));
}

TEST_F(PullCommandTest, JsonAndAnotherFolder) {
  const std::string to = dir_.path() + "/here";
  ASSERT_EQ(Run("pull org/tiny@" + hub_.commit("org/tiny") + " --to " + to + " --json --parallel 1"), 0) << err();
  const json answer = json::parse(out());
  EXPECT_EQ(answer["dir"], to);
  EXPECT_EQ(answer["commit"], hub_.commit("org/tiny"));
  EXPECT_EQ(answer["files"].size(), 10u) << "six side files, the index and three shards";
  EXPECT_EQ(err(), "");
  ASSERT_EQ(Run("generate --model " + to + " --backend cpu --threads 1 --prompt hello --max-tokens 1"), 0) << err();

  hub_.FailNext(503, 1000);
  EXPECT_EQ(Run("pull org/tiny@" + answer["commit"].get<std::string>() + " --if-missing --to " + to), 0) << err();
  EXPECT_EQ(Run("pull org/tiny --if-missing --to " + to), 1) << "another revision";

  std::ofstream(to + "/tokenizer.json") << "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n";
  EXPECT_EQ(Run("generate --model " + to + " --prompt hello"), 1);
  EXPECT_THAT(err(), AllOf(HasSubstr("Git LFS pointer"), HasSubstr("splice pull org/tiny@"), HasSubstr("--to " + to)));
}

// A model's own measurements come with it.
TEST_F(PullCommandTest, FetchesHeadClassesAndTheRecoveryProfile) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::directory_iterator(test::kTinyModel))
    files[entry.path().filename()] = Read(entry.path());
  files["recovery.json"] = "{}";
  hub_.Put("org/measured", files);
  ASSERT_EQ(Run("pull org/measured"), 0) << err();
  for (const char* file : {"head_classes.json", "recovery.json"})
    EXPECT_EQ(Read(models() + "/org/measured/" + file), files[file]) << file;
}

TEST_F(PullCommandTest, TokensComeFromTheEnvironmentOrAFile) {
  hub_.RequireToken("secret");
  EXPECT_EQ(Run("pull org/tiny"), 1);
  EXPECT_THAT(err(), AllOf(HasSubstr("accept its licence"), HasSubstr("HF_TOKEN")));
  EXPECT_EQ(Run("pull org/tiny", "HF_TOKEN=secret"), 0) << err();
  std::ofstream(dir_.path() + "/token") << "secret\n";
  EXPECT_EQ(Run("pull org/tiny --token-file " + dir_.path() + "/token"), 0) << err();
  EXPECT_EQ(Run("pull org/tiny --token-file " + dir_.path() + "/none"), 1);
  EXPECT_THAT(err(), HasSubstr("--token-file"));
}

TEST_F(PullCommandTest, MistakesHaveTheirExitCodes) {
  EXPECT_EQ(Run("pull"), 2);
  EXPECT_EQ(Run("pull tiny"), 2);
  EXPECT_THAT(err(), HasSubstr("ORG/NAME"));
  EXPECT_EQ(Run("pull org/other"), 1);
  EXPECT_THAT(err(), HasSubstr("does not exist"));
  EXPECT_EQ(Run("pull org/tiny --hub hub.example.com"), 1);
  EXPECT_THAT(err(), HasSubstr("http:// or https://"));
  EXPECT_EQ(Run("serve --model org/other --http 127.0.0.1:0 --grpc 127.0.0.1:0"), 1);
  EXPECT_THAT(err(), AllOf(HasSubstr("no folder here"), HasSubstr("does not exist")));
  EXPECT_EQ(Run("tokenize --model /no/such --input - --output -"), 1);
  EXPECT_THAT(err(), HasSubstr("no such folder"));
}

TEST(PullDisplayTest, BarsFitTheWindow) {
  hub::PullProgress progress{.stage = hub::PullProgress::Stage::kFetching};
  progress.files = {{"config.json", 600, 600, true},
                    {"model-00001-of-00004.safetensors", 4ull << 30, 1ull << 30, false},
                    {"model-00002-of-00004.safetensors", 4ull << 30, 0, false}};
  progress.size = (8ull << 30) + 600;
  progress.done = (1ull << 30) + 600;
  for (const size_t width : {40u, 79u, 200u}) {
    const auto lines = PullBars(progress, 100 << 20, width, 8);
    ASSERT_EQ(lines.size(), 2u) << "one file is complete, one has not begun";
    for (const std::string& line : lines) EXPECT_LE(line.size(), width);
  }
  const auto lines = PullBars(progress, 100 << 20, 200, 8);
  EXPECT_THAT(lines[0], AllOf(HasSubstr("[#######......................."), HasSubstr("1.0 GiB of 4.0 GiB")));
  EXPECT_THAT(lines[1], AllOf(HasSubstr("total, 1 of 3 files"), HasSubstr("100.0 MiB/s, 1 min 12 s left")));
  EXPECT_THAT(PullBars(progress, 0, 200, 8)[1], Not(HasSubstr("left")));
  EXPECT_EQ(FormatSeconds(3725), "1 h 2 min");
}

TEST(PullDisplayTest, WithoutATerminalThereAreLines) {
  char* text = nullptr;
  size_t size = 0;
  std::FILE* const out = open_memstream(&text, &size);
  PullDisplay display(out, /*terminal=*/false, 79);
  hub::PullProgress progress{.stage = hub::PullProgress::Stage::kFetching};
  progress.files = {{"a", 100, 0, false}};
  progress.size = 100;
  for (const double seconds : {0.2, 5.0, 10.5, 11.0}) {
    progress.seconds = seconds;
    progress.files[0].done = progress.done = static_cast<uint64_t>(seconds * 5);
    display.Update(progress);
  }
  progress.files[0] = {"a", 100, 100, true};
  display.Update(progress);
  display.Update(progress);
  std::fclose(out);
  const std::string written(text, size);
  std::free(text);
  EXPECT_THAT(written, HasSubstr("total, 0 of 1 files"));
  EXPECT_THAT(written, Not(HasSubstr("\x1b")));
  EXPECT_EQ(std::count(written.begin(), written.end(), '\n'), 2) << written;
}

}  // namespace
}  // namespace spl::cli
