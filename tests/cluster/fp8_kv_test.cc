// K and V in FP8 through the real programs: the answers of one process with such KV, over both carriers and from the
// store, half of the bytes, and questions that bf16 answers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/cluster/processes.h"
#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"
#include "tools/cli/text_generator.h"

namespace spl::test {
namespace {

using nlohmann::json;

constexpr int kTokens = 40;
// 12 layers, 4 KV heads; K and V of 64 tokens, each 64 codes and a scale.
constexpr int64_t kBytesOfPages = int64_t{12} * 4 * 2 * 64 * 65;

// Different from their first words on: a prompt that begins like another one would find its KV.
std::string Prompt(int number) {
  std::string prompt = "Log " + std::to_string(number * 7919) + ". ";
  for (int i = 0; i < 10 + 30 * number; ++i)
    prompt += "Ship " + std::to_string(i * number + 3) + " left harbour " + std::to_string(i % (number + 2)) + ". ";
  return prompt;
}

// The text that one process generates, computed once for all tests.
const std::string& Expected(const std::string& prompt) {
  static auto generator = cli::MakeLocalTextGenerator({.model = {.dir = kTinyModel}, .kv_dtype = "fp8"});
  static std::map<std::string, std::string> cache;
  EXPECT_TRUE(generator.ok()) << generator.status();
  auto [it, fresh] = cache.try_emplace(prompt);
  if (fresh) {
    auto result =
        (*generator)->Generate({.text = prompt, .max_tokens = kTokens, .ignore_eos = true}, [](const std::string&) {
          return true;
        });
    EXPECT_TRUE(result.ok()) << result.status();
    it->second = result->text;
  }
  return it->second;
}

json Ask(const std::string& http, const std::string& prompt) {
  const json body = {
      {"model", "splice-tiny"}, {"prompt", prompt}, {"max_tokens", kTokens}, {"temperature", 0}, {"ignore_eos", true}};
  const HttpReply reply = HttpPost(http, "/v1/completions", body.dump());
  EXPECT_EQ(reply.status, 200) << reply.body;
  json answer = json::parse(reply.body, nullptr, false);
  EXPECT_TRUE(answer.contains("choices")) << reply.body;
  if (!answer.contains("choices")) return nullptr;
  EXPECT_EQ(answer["choices"][0]["text"], Expected(prompt));
  return answer;
}

class Fp8KvClusterTest : public ::testing::Test {
 protected:
  std::unique_ptr<ProcessCluster> Start(const char* transport, const char* kv_dtype = "fp8") {
    auto cluster = ProcessCluster::Start({.model_dir = kTinyModel,
                                          .transport = transport,
                                          .data_dir = dir_.path() + "/store",
                                          .prefill_flags = {"--kv-dtype", kv_dtype},
                                          .decode_flags = {"--kv-dtype", kv_dtype}});
    EXPECT_TRUE(cluster != nullptr && cluster->WaitReady());
    return cluster;
  }
  // Every process ends by itself, the store with all that it has.
  static void Stop(ProcessCluster& cluster) {
    for (Process* p : {cluster.router.get(), cluster.prefill[0].get(), cluster.decode[0].get(), cluster.store.get()}) {
      p->Signal(SIGTERM);
      EXPECT_EQ(p->WaitForExit(), 0);
    }
  }

  spl::testing::TempDir dir_;
};

TEST_F(Fp8KvClusterTest, FourProcessesEqualOneOverBothCarriersAndFromTheStore) {
  for (const char* transport : {"shm", "tcp"}) {
    auto cluster = Start(transport);
    ASSERT_NE(cluster, nullptr);
    const json models = json::parse(HttpGet(cluster->http(), "/v1/models").body);
    EXPECT_EQ(models["data"][0]["kv_dtype"], "fp8") << models;
    for (int number = 1; number <= 3; ++number) {
      const json answer = Ask(cluster->http(), Prompt(number));
      ASSERT_FALSE(answer.is_null());
      const int64_t pages = (answer["usage"]["prompt_tokens"].get<int64_t>() + 63) / 64;
      EXPECT_EQ(answer["splice"]["bytes"]["moved"], pages * kBytesOfPages) << answer["splice"];
      // The second cluster begins with the store of the first: its prefill worker has seen nothing itself.
      const int64_t stored = answer["splice"]["tokens"]["stored"];
      EXPECT_EQ(stored > 0, std::string(transport) == "tcp") << answer["splice"];
    }
    Stop(*cluster);
  }
  // Workers of another type take nothing from it.
  auto bf16 = Start("shm", "bf16");
  ASSERT_NE(bf16, nullptr);
  const json body = {{"model", "splice-tiny"}, {"prompt", Prompt(1)}, {"max_tokens", 1}, {"temperature", 0}};
  const HttpReply reply = HttpPost(bf16->http(), "/v1/completions", body.dump());
  ASSERT_EQ(reply.status, 200) << reply.body;
  EXPECT_EQ(json::parse(reply.body)["splice"]["tokens"]["stored"], 0) << reply.body;
}

// Needles of 1,024 tokens, of which splice-tiny finds all with bf16.
TEST_F(Fp8KvClusterTest, ServeAnswersQuestions) {
  if (SharedDir().empty()) GTEST_SKIP() << "no shared/eval beside the checkout";
  const auto serve =
      Process::StartAndWaitReady({BinDir() + "/splice", "serve", "--model", kTinyModel, "--http", "127.0.0.1:0",
                                  "--grpc", "127.0.0.1:0", "--kv-dtype", "fp8", "--kv-bytes", "256MiB"});
  ASSERT_NE(serve, nullptr);
  const std::string table = dir_.path() + "/table.json";
  const Process::Result eval =
      Process::Run({BinDir() + "/splice", "eval", "--endpoint", "http://" + serve->ready("http"), "--data",
                    SharedDir() + "/eval/niah_single.jsonl.xz", "--lengths", "1024", "--limit", "12", "--decode",
                    "dense,sparcas:budget=256,quest:budget=256", "--json", table},
                   std::chrono::seconds(120));
  ASSERT_EQ(eval.exit_code, 0) << eval.err;
  int methods = 0;
  const json rows = json::parse(std::ifstream(table))["rows"];
  for (const json& row : rows) {
    if (row["task"] != "niah_single") continue;
    ++methods;
    EXPECT_EQ(row["n"], 12) << row;
    EXPECT_GE(row["accuracy"], 0.9) << row;
  }
  EXPECT_EQ(methods, 3);
}

TEST_F(Fp8KvClusterTest, OtherTypesAreRefusedByName) {
  const Process::Result result = Process::Run(
      {BinDir() + "/splice", "serve", "--model", kTinyModel, "--http", "127.0.0.1:0", "--kv-dtype", "int8"});
  EXPECT_NE(result.exit_code, 0);
  EXPECT_THAT(result.err, ::testing::HasSubstr("--kv-dtype is 'int8', not auto, f32, bf16 or fp8"));
}

}  // namespace
}  // namespace spl::test
