// The real programs against the plain in-process model: over both carriers, in one process and in four, after restarts,
// under load, through cancelled streams and lost workers, a token is never wrong and no page is lost.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "tests/cluster/processes.h"
#include "tests/support/eventually.h"
#include "tests/support/paths.h"
#include "tools/cli/eval_data.h"
#include "tools/cli/text_generator.h"

namespace spl::test {
namespace {

using namespace std::chrono_literals;
using nlohmann::json;
using Clock = std::chrono::steady_clock;

// Prompts of the evaluation sets when they are there, else a few of our own.
std::vector<std::string> Prompts(size_t count) {
  std::vector<std::string> prompts;
  const std::string shared = SharedDir();
  for (const char* task : {"qa_names", "coref", "vt", "memory", "niah_multikey"}) {
    if (shared.empty()) break;
    const auto samples = cli::LoadEvalData(shared + "/eval/" + task + ".jsonl.xz");
    EXPECT_TRUE(samples.ok()) << samples.status();
    for (size_t i = 0; i < count / 5 && samples.ok() && i < samples->size(); ++i) {
      std::string& prompt = prompts.emplace_back();
      for (const auto& segment : (*samples)[i].segments) prompt += segment.text;
    }
  }
  const std::string start = "<|begin_of_text|><|im_start|>user\n";
  for (size_t i = prompts.size(); i < count; ++i) {
    std::string& prompt = prompts.emplace_back(start);
    for (size_t j = 0; j < 20 + 13 * i; ++j) prompt += "The captain of ship " + std::to_string(i * j) + " is lost. ";
    prompt += "<|im_end|>\n<|im_start|>assistant\n";
  }
  return prompts;
}

std::string CompletionBody(const std::string& prompt, int max_tokens, bool stream = false) {
  return json{{"model", "splice-tiny"}, {"prompt", prompt},   {"max_tokens", max_tokens},
              {"temperature", 0},       {"ignore_eos", true}, {"stream", stream}}
      .dump();
}

std::string Complete(const std::string& http, const std::string& prompt, int max_tokens = 16) {
  const HttpReply reply = HttpPost(http, "/v1/completions", CompletionBody(prompt, max_tokens));
  if (reply.status != 200) return "HTTP " + std::to_string(reply.status) + ": " + reply.body;
  return json::parse(reply.body)["choices"][0]["text"];
}

double Gauge(const Process& worker, const std::string& name) {
  return MetricValue(HttpGet(worker.ready("metrics"), "/metrics").body, name);
}

class ClusterTest : public testing::Test {
 protected:
  // Greedy text of the plain in-process model, computed once for all tests.
  static const std::string& Expected(const std::string& prompt, int max_tokens = 16) {
    static auto generator = cli::MakeLocalTextGenerator({.model = {.dir = kTinyModel}});
    static std::map<std::pair<std::string, int>, std::string> cache;
    EXPECT_TRUE(generator.ok()) << generator.status();
    auto [it, fresh] = cache.try_emplace({prompt, max_tokens});
    if (fresh) {
      cli::TextRequest request{.text = prompt, .max_tokens = max_tokens, .ignore_eos = true};
      auto result = (*generator)->Generate(request, [](const std::string&) { return true; });
      EXPECT_TRUE(result.ok()) << result.status();
      it->second = result->text;
    }
    return it->second;
  }

  static void ExpectAllEqual(const std::string& http, const std::vector<std::string>& prompts, const char* what) {
    for (size_t i = 0; i < prompts.size(); ++i)
      ASSERT_EQ(Complete(http, prompts[i]), Expected(prompts[i])) << what << ", prompt " << i;
  }

  void SetUp() override {
    data_dir_ = std::filesystem::path(testing::TempDir()) / ("splice-data-" + std::to_string(::getpid()));
    std::filesystem::remove_all(data_dir_);
  }
  void TearDown() override { std::filesystem::remove_all(data_dir_); }

  std::filesystem::path data_dir_;
};

// SPLICE_CLUSTER_PROMPTS asks for more than the default.
size_t NumPrompts() {
  const char* text = std::getenv("SPLICE_CLUSTER_PROMPTS");
  return text == nullptr ? 10 : static_cast<size_t>(std::atoi(text));
}

TEST_F(ClusterTest, FourProcessesEqualThePlainModelOverBothCarriersAndAfterARestart) {
  const auto prompts = Prompts(NumPrompts());
  for (const char* transport : {"shm", "tcp"}) {
    ClusterConfig config{.model_dir = kTinyModel, .transport = transport, .data_dir = data_dir_};
    auto cluster = ProcessCluster::Start(config);
    ASSERT_NE(cluster, nullptr);
    ExpectAllEqual(cluster->http(), prompts, transport);
    // The second cluster starts with the first one's store: its prefill worker has seen nothing itself.
    const auto reply = json::parse(HttpPost(cluster->http(), "/v1/completions", CompletionBody(prompts[0], 1)).body);
    EXPECT_THAT(reply["splice"]["transport"].get<std::string>(), testing::HasSubstr(transport));
    EXPECT_GT(reply["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    for (Process* p :
         {cluster->router.get(), cluster->prefill[0].get(), cluster->decode[0].get(), cluster->store.get()}) {
      p->Signal(SIGTERM);
      EXPECT_EQ(p->WaitForExit(), 0);
    }
  }
  auto cluster = ProcessCluster::Start({.model_dir = kTinyModel, .data_dir = data_dir_});
  ASSERT_NE(cluster, nullptr);
  const auto reply = json::parse(HttpPost(cluster->http(), "/v1/completions", CompletionBody(prompts[0], 16)).body);
  EXPECT_GT(reply["splice"]["tokens"]["stored"], 0) << reply.dump();
  EXPECT_EQ(reply["choices"][0]["text"], Expected(prompts[0]));
  ExpectAllEqual(cluster->http(), prompts, "warm store");
}

TEST_F(ClusterTest, TheAllInOneProcessEqualsThePlainModelAndDrains) {
  const auto prompts = Prompts(NumPrompts());
  auto serve = Process::StartAndWaitReady(
      {BinDir() + "/splice", "serve", "--model", kTinyModel, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"});
  ASSERT_NE(serve, nullptr);
  ExpectAllEqual(serve->ready("http"), prompts, "splice serve");
  // Without --kv-bytes the size of the pool follows from the memory, and the log says how.
  EXPECT_THAT(serve->Stderr(), testing::AllOf(testing::HasSubstr("kv_pool.sized pool=shared"),
                                              testing::HasSubstr("tokens="), testing::HasSubstr("1 pool")));
  // The same through the gRPC API.
  auto grpc = cli::MakeEndpointGenerator({.url = "grpc://" + serve->ready("grpc")});
  ASSERT_TRUE(grpc.ok()) << grpc.status();
  cli::TextRequest request{.text = prompts[0], .max_tokens = 16, .ignore_eos = true};
  const auto result = (*grpc)->Generate(request, [](const std::string&) { return true; });
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->text, Expected(prompts[0]));
  // A prompt that spells the begin token gets no second one.
  const auto count = [&](const std::string& prompt) {
    const HttpReply reply = HttpPost(serve->ready("http"), "/v1/completions", CompletionBody(prompt, 1));
    return json::parse(reply.body)["usage"]["prompt_tokens"].get<int>();
  };
  EXPECT_EQ(count("<|begin_of_text|>ship"), count("ship"));
  // Ctrl-C: the benchmark says what it has measured.
  const auto answered = [&] {
    return MetricValue(HttpGet(serve->ready("http"), "/metrics").body, "splice_request_success_total");
  };
  const double before = answered();
  const Process::Result bench =
      Process::Run({BinDir() + "/splice", "bench", "--endpoint", "http://" + serve->ready("http"), "--concurrency", "2",
                    "--num-requests", "100000", "--input-tokens", "16", "--output-tokens", "2"},
                   60s, [&](int pid) {
                     EXPECT_TRUE(Eventually([&] { return answered() >= before + 10; }));
                     ::kill(pid, SIGINT);
                   });
  EXPECT_EQ(bench.exit_code, 130) << bench.err;
  EXPECT_THAT(bench.out, testing::HasSubstr("TTFT"));
  EXPECT_THAT(bench.err, testing::HasSubstr("of 100000 requests were finished"));
  // SIGTERM lets a running stream finish.
  SseStream stream(serve->ready("http"), "/v1/completions", CompletionBody(prompts[0], 60, true));
  ASSERT_FALSE(stream.Next().empty());
  serve->Signal(SIGTERM);
  std::string text, last;
  for (std::string event = stream.Next(); !event.empty(); event = stream.Next()) last = event;
  EXPECT_EQ(last, "[DONE]");
  EXPECT_EQ(serve->WaitForExit(), 0);
}

// Two ranks add two numbers, in which order makes no difference: the text is that of the plain model on two ranks.
TEST_F(ClusterTest, TensorParallelWorkersEqualThePlainModelOnAsManyRanks) {
  auto plain = cli::MakeLocalTextGenerator({.model = {.dir = kTinyModel}, .tp = 2});
  if (!plain.ok() && std::string(plain.status().message()).find("GPUs can be used") != std::string::npos)
    GTEST_SKIP() << plain.status();
  ASSERT_TRUE(plain.ok()) << plain.status();
  const auto prompts = Prompts(NumPrompts() / 2);
  std::vector<std::string> want;
  for (const std::string& prompt : prompts) {
    auto result = (*plain)->Generate({.text = prompt, .max_tokens = 16, .ignore_eos = true},
                                     [](const std::string&) { return true; });
    ASSERT_TRUE(result.ok()) << result.status();
    want.push_back(result->text);
  }
  {
    auto cluster =
        ProcessCluster::Start({.model_dir = kTinyModel, .prefill_flags = {"--tp", "2"}, .decode_flags = {"--tp", "2"}});
    ASSERT_NE(cluster, nullptr);
    for (size_t i = 0; i < prompts.size(); ++i) EXPECT_EQ(Complete(cluster->http(), prompts[i]), want[i]) << i;
  }
  auto serve = Process::StartAndWaitReady({BinDir() + "/splice", "serve", "--model", kTinyModel, "--tp", "2", "--http",
                                           "127.0.0.1:0", "--grpc", "127.0.0.1:0"});
  ASSERT_NE(serve, nullptr);
  for (size_t i = 0; i < prompts.size(); ++i) EXPECT_EQ(Complete(serve->ready("http"), prompts[i]), want[i]) << i;
}

// The KV goes from two ranks to one and from one to two.
TEST_F(ClusterTest, WorkersOfDifferentParallelismServeTogether) {
  for (const char* flag : {"--prefill-tp", "--decode-tp"}) {
    const std::vector<std::string> command = {
        BinDir() + "/splice", "serve",  "--model",    kTinyModel, flag, "2", "--http",
        "127.0.0.1:0",        "--grpc", "127.0.0.1:0"};
    if (auto plain = cli::MakeLocalTextGenerator({.model = {.dir = kTinyModel}, .tp = 2});
        !plain.ok() && std::string(plain.status().message()).find("GPUs can be used") != std::string::npos)
      GTEST_SKIP() << plain.status();
    auto serve = Process::StartAndWaitReady(command);
    ASSERT_NE(serve, nullptr) << flag;
    const auto prompts = Prompts(5);
    size_t equal = 0;
    for (const std::string& prompt : prompts) equal += Complete(serve->ready("http"), prompt) == Expected(prompt);
    // In bf16 another order of sums turns a token where two are nearly alike; damaged KV would turn all of them.
    EXPECT_GE(equal, prompts.size() - 1) << flag;
  }
}

TEST_F(ClusterTest, SixtyFourStreamsNoneLostNoneMixedAndNoPageLeaks) {
  auto cluster = ProcessCluster::Start(
      {.model_dir = kTinyModel, .prefill_flags = {"--kv-bytes", "512MiB"}, .decode_flags = {"--kv-bytes", "1GiB"}});
  ASSERT_NE(cluster, nullptr);
  constexpr size_t kStreams = 64;
  std::vector<std::string> prompts;
  for (size_t i = 0; i < kStreams; ++i) {
    prompts.push_back("<|begin_of_text|><|im_start|>user\n");
    for (size_t j = 0; j < 3 + 5 * (i % 16); ++j) prompts.back() += "Ship " + std::to_string(i * 31 + j) + " sails. ";
    prompts.back() += "<|im_end|>\n<|im_start|>assistant\n";
    Expected(prompts.back(), 24);
  }
  const auto run = [&](bool cancel_half) {
    std::vector<std::string> texts(kStreams);
    std::vector<std::thread> threads;
    for (size_t i = 0; i < kStreams; ++i) {
      threads.emplace_back([&, i] {
        const bool cancel = cancel_half && i % 2 == 1;
        SseStream stream(cluster->http(), "/v1/completions", CompletionBody(prompts[i], cancel ? 4000 : 24, true));
        for (std::string event = stream.Next(); !event.empty() && event != "[DONE]"; event = stream.Next()) {
          const json data = json::parse(event);
          if (data.contains("error")) texts[i] += event;
          if (data.contains("choices") && !data["choices"].empty())
            texts[i] += data["choices"][0]["text"].get<std::string>();
          if (cancel && !texts[i].empty()) return;  // closes the connection in the middle
        }
      });
    }
    for (auto& thread : threads) thread.join();
    for (size_t i = 0; i < kStreams; ++i) {
      if (cancel_half && i % 2 == 1) continue;
      EXPECT_EQ(texts[i], Expected(prompts[i], 24)) << "stream " << i;
    }
  };
  run(false);
  run(true);
  EXPECT_TRUE(Eventually([&] { return Gauge(*cluster->decode[0], "splice_kv_pages_used") == 0; }))
      << Gauge(*cluster->decode[0], "splice_kv_pages_used");
  EXPECT_TRUE(Eventually([&] { return Gauge(*cluster->decode[0], "splice_num_requests_running") == 0; }));
  EXPECT_TRUE(Eventually([&] { return Gauge(*cluster->prefill[0], "splice_num_requests_waiting") == 0; }));
}

TEST_F(ClusterTest, ALostPrefillWorkerCostsARetryNotARequest) {
  auto cluster = ProcessCluster::Start({.model_dir = kTinyModel, .num_prefill = 2});
  ASSERT_NE(cluster, nullptr);
  const auto prompts = Prompts(5);
  std::vector<std::string> texts(prompts.size());
  std::vector<std::thread> threads;
  // What it is sent from here on stays there until it is gone, however fast the machine.
  cluster->prefill[0]->Signal(SIGSTOP);
  for (size_t i = 0; i < prompts.size(); ++i)
    threads.emplace_back([&, i] { texts[i] = Complete(cluster->http(), prompts[i]); });
  EXPECT_TRUE(Eventually(
      [&] { return MetricValue(HttpGet(cluster->http(), "/metrics").body, "splice_num_requests_running") > 0; }));
  cluster->prefill[0]->Signal(SIGKILL);
  for (auto& thread : threads) thread.join();
  for (size_t i = 0; i < prompts.size(); ++i) EXPECT_EQ(texts[i], Expected(prompts[i])) << i;
}

TEST_F(ClusterTest, ALostDecodeWorkerIsOneUnbrokenStream) {
  auto cluster = ProcessCluster::Start({.model_dir = kTinyModel, .num_decode = 2});
  ASSERT_NE(cluster, nullptr);
  const std::string prompt = Prompts(5)[0];
  SseStream stream(cluster->http(), "/v1/completions", CompletionBody(prompt, 200, true));
  std::string text;
  int events = 0;
  bool killed = false;
  for (std::string event = stream.Next(); !event.empty() && event != "[DONE]"; event = stream.Next()) {
    const json data = json::parse(event);
    ASSERT_FALSE(data.contains("error")) << event;
    if (data.contains("choices") && !data["choices"].empty()) text += data["choices"][0]["text"].get<std::string>();
    if (++events == 20 && !killed) {
      const size_t busy = Gauge(*cluster->decode[0], "splice_num_requests_running") > 0 ? 0 : 1;
      cluster->decode[busy]->Signal(SIGKILL);
      killed = true;
    }
  }
  EXPECT_TRUE(killed);
  EXPECT_EQ(text, Expected(prompt, 200));
}

TEST_F(ClusterTest, EveryProgramAnswersHealthMetricsAndHelp) {
  auto cluster = ProcessCluster::Start({.model_dir = kTinyModel});
  ASSERT_NE(cluster, nullptr);
  for (const std::string& address : {cluster->http(), cluster->store->ready("metrics"),
                                     cluster->prefill[0]->ready("metrics"), cluster->decode[0]->ready("metrics")}) {
    EXPECT_EQ(HttpGet(address, "/healthz").status, 200) << address;
    EXPECT_EQ(HttpGet(address, "/readyz").status, 200) << address;
    EXPECT_THAT(HttpGet(address, "/metrics").body, testing::HasSubstr("splice_")) << address;
  }
  for (const char* program : {"splice", "splice-router", "splice-prefill", "splice-decode", "splice-kvstore"}) {
    const auto help = Process::Run({BinDir() + "/" + program, "--help"});
    EXPECT_EQ(help.exit_code, 0) << program;
    EXPECT_THAT(help.out, testing::HasSubstr("xample")) << program;
    const auto bad = Process::Run({BinDir() + "/" + program, "--no-such-flag"});
    EXPECT_EQ(bad.exit_code, 2) << program << bad.err;
  }
}

TEST_F(ClusterTest, ABrokenModelFolderEndsEveryProgramWithOneLine) {
  const std::filesystem::path folder = data_dir_;
  std::filesystem::create_directories(folder);
  for (const std::vector<std::string>& argv :
       std::vector<std::vector<std::string>>{{"splice-prefill"},
                                             {"splice-decode"},
                                             {"splice-router", "--prefill", "127.0.0.1:1", "--decode", "127.0.0.1:2"},
                                             {"splice", "serve"},
                                             {"splice", "generate", "--prompt", "x"}}) {
    std::vector<std::string> full = argv;
    full[0] = BinDir() + "/" + argv[0];
    full.insert(full.end(), {"--model", folder.string()});
    const auto result = Process::Run(full);
    EXPECT_EQ(result.exit_code, 1) << argv[0] << result.err;
    EXPECT_THAT(result.err, testing::HasSubstr(folder.string())) << argv[0];
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  }
}

// A config.json of a model that computes a thousand prompts in seconds.
std::string WriteLittleConfig(const std::filesystem::path& folder) {
  std::filesystem::create_directories(folder);
  const std::string config = (folder / "little.json").string();
  std::ofstream(config) << R"({"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 300,
    "max_position_embeddings": 512, "torch_dtype": "bfloat16", "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 40, "norm_topk_prob": true})";
  return config;
}

// Requests that come at once wait for their turn, however many sequences a step may have.
TEST_F(ClusterTest, ABurstOfPromptsIsQueuedNotRefused) {
  const std::string config = WriteLittleConfig(data_dir_);
  auto serve = Process::StartAndWaitReady({BinDir() + "/splice", "serve", "--random-weights", config, "--backend",
                                           "cpu", "--max-sequences", "600", "--kv-bytes", "512MiB", "--http",
                                           "127.0.0.1:0", "--grpc", "127.0.0.1:0"});
  ASSERT_NE(serve, nullptr);
  const Process::Result bench = Process::Run(
      {BinDir() + "/splice", "bench", "--endpoint", "http://" + serve->ready("http"), "--prompt-ids", "300",
       "--concurrency", "900", "--num-requests", "900", "--input-tokens", "400", "--output-tokens", "20"},
      120s);
  EXPECT_EQ(bench.exit_code, 0) << bench.err;
  EXPECT_THAT(bench.out, testing::HasSubstr("900 ok, 0 failed")) << bench.err;
}

TEST_F(ClusterTest, RandomWeightsServeTokenIdsWithoutATokenizer) {
  const std::string config = WriteLittleConfig(data_dir_);
  auto serve = Process::StartAndWaitReady({BinDir() + "/splice", "serve", "--random-weights", config + ":3",
                                           "--backend", "cpu", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"});
  ASSERT_NE(serve, nullptr);
  const auto post = [&](const json& prompt) {
    return HttpPost(serve->ready("http"), "/v1/completions",
                    json{{"model", "little"}, {"prompt", prompt}, {"max_tokens", 5}, {"ignore_eos", true}}.dump());
  };
  const HttpReply ids = post({1, 2, 299});
  ASSERT_EQ(ids.status, 200) << ids.body;
  const json answer = json::parse(ids.body);
  EXPECT_EQ(answer["usage"]["completion_tokens"], 5);
  EXPECT_EQ(answer["choices"][0]["text"], "");
  EXPECT_EQ(post({1, 300}).status, 400);  // outside the model's vocabulary
  const HttpReply text = post("hello");
  EXPECT_EQ(text.status, 400) << text.body;
  EXPECT_THAT(text.body, testing::HasSubstr("send token ids"));
}

}  // namespace
}  // namespace spl::test
