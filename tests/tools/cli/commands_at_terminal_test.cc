// `splice serve`, `bench` and `ctl top` at a terminal: what a person sees, and what Ctrl-C does.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "tests/support/fake_cluster.h"
#include "tests/support/pty_process.h"
#include "tests/support/temp_dir.h"
#include "tools/cli/text_table.h"

namespace spl::cli {
namespace {

using test::PtyProcess;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kCtrlC[] = "\x03";
const std::vector<std::string> kEnvironment = {"TERM=xterm", "HOME=/nonexistent"};

std::vector<std::string> Splice(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), SPLICE_PROGRAM);
  return arguments;
}

TEST(ServeAtTerminalTest, SaysWhatToDoNextAndEndsWithCtrlC) {
  PtyProcess serve(Splice({"serve", "--model", testing::kTinyModel, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0",
                           "--backend", "cpu", "--threads", "1", "--kv-bytes", "64MiB"}),
                   kEnvironment);
  ASSERT_TRUE(serve.WaitFor("ready http="));
  ASSERT_TRUE(serve.WaitFor("/ui"));
  serve.Type(kCtrlC);
  EXPECT_EQ(serve.WaitForExit(), 0);
  const std::string& text = serve.output();
  const size_t at = text.find("ready http=") + 11;
  const std::string address = text.substr(at, text.find(' ', at) - at);
  EXPECT_THAT(text, HasSubstr("splice chat --endpoint http://" + address + "\r\n"));
  EXPECT_THAT(text, HasSubstr("curl http://" + address + "/v1/chat/completions -H 'Content-Type: application/json'"));
  EXPECT_THAT(text, HasSubstr("splice ctl top --url http://" + address));
  EXPECT_THAT(text, HasSubstr("http://" + address + "/ui"));
  EXPECT_THAT(text, Not(HasSubstr(" info "))) << "no log of what goes as it should";
}

// No model is there: whoever reads it before the checks says so.
class ServeChecksTest : public ::testing::Test {
 protected:
  ServeChecksTest() {
    for (const char* file : {"config.json", "tokenizer.json", "tokenizer_config.json"})
      std::filesystem::copy_file(std::string(testing::kTinyModel) + "/" + file, dir_.path() + "/" + file);
    std::ofstream(dir_.path() + "/model.safetensors") << "not a checkpoint";
  }
  std::string Refusal(std::vector<std::string> more) const {
    std::vector<std::string> arguments = {"serve", "--model", dir_.path(), "--backend", "cpu"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    PtyProcess serve(Splice(arguments), kEnvironment);
    EXPECT_EQ(serve.WaitForExit(), 1);
    return serve.output();
  }

  testing::TempDir dir_;
};

TEST_F(ServeChecksTest, ComeBeforeTheWeights) {
  testing::FakeCluster taken(1, 1);
  taken.StartRouter();
  EXPECT_THAT(Refusal({"--http", taken.http(), "--grpc", "127.0.0.1:0"}),
              HasSubstr("--http " + taken.http() + ": another program listens there"));
  const std::string grpc = taken.router->grpc_address();
  EXPECT_THAT(Refusal({"--http", "127.0.0.1:0", "--grpc", grpc}), HasSubstr("--grpc " + grpc + ": another program"));
  for (const char* none : {"127.0.0.1", "127.0.0.1:99999"})
    EXPECT_THAT(Refusal({"--http", none, "--grpc", "127.0.0.1:0"}), HasSubstr("--http: address '" + std::string(none)));
  const std::vector<std::string> free = {"--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"};
  auto keys = free;
  keys.insert(keys.end(), {"--api-keys", dir_.path() + "/no-keys"});
  EXPECT_THAT(Refusal(keys), HasSubstr("no-keys"));
  EXPECT_THAT(Refusal(free), HasSubstr("safetensors")) << "all is well, and the weights are read";
  std::filesystem::remove(dir_.path() + "/tokenizer.json");
  EXPECT_THAT(Refusal(free), HasSubstr("tokenizer.json"));
}

TEST(MainAtTerminalTest, NamesAnUnknownCommandAndHelpsWithoutOne) {
  PtyProcess unknown(Splice({"serv"}), kEnvironment);
  EXPECT_EQ(unknown.WaitForExit(), 2);
  EXPECT_THAT(unknown.output(), HasSubstr("there is no command \"serv\""));
  PtyProcess alone(Splice({}), kEnvironment);
  EXPECT_EQ(alone.WaitForExit(), 2);
  EXPECT_THAT(alone.output(), HasSubstr("Examples:"));
  PtyProcess folder(Splice({"eval", "--data", "tests", "--model", testing::kTinyModel}), kEnvironment);
  EXPECT_EQ(folder.WaitForExit(), 2);
  EXPECT_THAT(folder.output(), HasSubstr("directory"));
}

// Which device was found is for the log of a server.
TEST(MainAtTerminalTest, LogsNoInformationToAPerson) {
  PtyProcess generate(Splice({"generate", "--model", testing::kTinyModel, "--prompt", "hello", "--max-tokens", "1"}),
                      kEnvironment);
  EXPECT_EQ(generate.WaitForExit(), 0);
  EXPECT_THAT(generate.output(), Not(HasSubstr(" info ")));
}

TEST(BenchAtTerminalTest, CtrlCKeepsWhatWasMeasured) {
  testing::FakeCluster cluster(1, 1);
  cluster.StartRouter();
  PtyProcess bench(Splice({"bench", "--endpoint", "http://" + cluster.http(), "--concurrency", "2", "--num-requests",
                           "100000", "--input-tokens", "8", "--output-tokens", "4"}),
                   kEnvironment);
  bench.WaitFor(" of 100000 done");  // after two seconds
  bench.Type(kCtrlC);
  EXPECT_EQ(bench.WaitForExit(), 130);
  EXPECT_THAT(bench.output(), HasSubstr("throughput"));
  EXPECT_THAT(bench.output(), HasSubstr("TTFT"));
  EXPECT_THAT(bench.output(), HasSubstr("requests were finished and are counted"));
}

TEST(BenchAtTerminalTest, HasEightStreamsWithoutOptions) {
  testing::FakeCluster cluster(1, 1);
  cluster.StartRouter();
  PtyProcess bench(
      Splice({"bench", "--endpoint", "http://" + cluster.http(), "--input-tokens", "8", "--output-tokens", "4"}),
      kEnvironment);
  EXPECT_EQ(bench.WaitForExit(), 0);
  EXPECT_THAT(bench.output(), HasSubstr("requests    64 ok, 0 failed"));
}

TEST(TopAtTerminalTest, FitsTheWindowAndLeavesTheScreenAsItWas) {
  testing::FakeCluster cluster(5, 5);
  cluster.StartRouter();
  PtyProcess top(Splice({"ctl", "top", "--url", "http://" + cluster.http(), "--interval-ms", "100"}), kEnvironment,
                 /*columns=*/60, /*rows=*/14);
  ASSERT_TRUE(top.WaitFor("\x1b[?1049h"));
  ASSERT_TRUE(top.WaitFor("\x1b[H"));
  ASSERT_TRUE(top.WaitFor("\x1b[J"));
  ASSERT_TRUE(top.WaitFor("\x1b[J")) << "drawn again";
  const std::string text = top.output();
  const size_t begin = text.find("\x1b[H") + 3;
  std::string screen = text.substr(begin, text.find("\x1b[J", begin) - begin);
  size_t lines = 1;
  for (size_t end = screen.find("\r\n"); end != std::string::npos; end = screen.find("\r\n"), ++lines) {
    const std::string line = screen.substr(0, screen.find("\x1b[K"));
    EXPECT_LE(TextColumns(line), 60u) << line;
    screen.erase(0, end + 2);
  }
  EXPECT_LE(lines, 14u);
  EXPECT_THAT(text, HasSubstr("more"));
  top.Type(kCtrlC);
  EXPECT_EQ(top.WaitForExit(), 0);
  EXPECT_THAT(top.output(), HasSubstr("\x1b[?1049l"));
}

}  // namespace
}  // namespace spl::cli
