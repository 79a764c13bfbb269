// Random combinations of every option of the API against a whole cluster with small pools, and against `splice serve`:
// every prefill and decode method, sessions, several answers, aborts. Whatever they are, they are answered or refused
// as the request's fault; no program ends, no page is lost, and the answers of others stay what they are.
//
// The options are those of the message that carries them, so that a new one is tried without a change here.
// SPLICE_COMBINATION_SECONDS asks for longer than the default (./dev fuzz), SPLICE_TEST_SEED for the same ones again.
#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <thread>

#include "services/base/fault_point.h"
#include "services/engine/engine.h"
#include "services/methods/methods.h"
#include "services/wire/request_options.h"
#include "tests/cluster/processes.h"
#include "tests/support/eventually.h"
#include "tests/support/http_test_client.h"
#include "tests/support/paths.h"
#include "tests/support/seeded_random.h"

namespace spl::test {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;
using Field = google::protobuf::FieldDescriptor;

constexpr int kClients = 4;

std::chrono::seconds Duration() {
  const char* const text = std::getenv("SPLICE_COMBINATION_SECONDS");
  return std::chrono::seconds(text == nullptr ? 30 : std::atoi(text));
}

// Random numbers with what is asked of them here.
class Dice {
 public:
  explicit Dice(uint32_t seed) : random_(seed) {}
  size_t Below(size_t end) { return random_() % end; }
  bool Chance(double p) { return std::uniform_real_distribution<>(0, 1)(random_) < p; }
  template <typename Values>
  auto OneOf(const Values& values) {
    return *(std::begin(values) + static_cast<std::ptrdiff_t>(Below(std::size(values))));
  }

 private:
  std::mt19937 random_;
};

json ValueOf(const Field& field, Dice& dice) {
  static const std::map<std::string, std::vector<std::string>> kWords = [] {
    std::map<std::string, std::vector<std::string>> words = {
        {"quality", {"strict", "balanced"}},
        {"recompute", {"samkv", "attended", "sparsex", "none", ""}},
        {"choose", {"recovered", "attention", "means", ""}}};
    words["policy"] = words["decode"] = {"auto"};
    for (const methods::Policy& policy : methods::Policies()) words["policy"].emplace_back(policy.name);
    for (const methods::Selector& selector : methods::Selectors()) words["decode"].emplace_back(selector.name);
    return words;
  }();
  constexpr uint32_t kNumbers[] = {0, 1, 2, 3, 8, 11, 12, 13, 16, 64, 128, 256, 1000, UINT32_MAX};
  constexpr double kShares[] = {0, .01, .1, .25, .5, .9, 1, 2};
  switch (field.cpp_type()) {
    case Field::CPPTYPE_STRING: {
      const auto words = kWords.find(field.name());
      return words == kWords.end() ? json("") : json(dice.OneOf(words->second));
    }
    case Field::CPPTYPE_BOOL:
      return dice.Chance(.5);
    case Field::CPPTYPE_UINT32:
      if (field.name().find("layer") != std::string::npos) return dice.Below(14);  // the model has 12
      return dice.OneOf(kNumbers);
    default:
      return dice.OneOf(kShares);
  }
}

std::string Document(uint32_t number) {
  constexpr const char* kWords[] = {"the",  "quick", "fox",   "ships", "sail", "to",
                                    "port", "seven", "crate", "of",    "tea",  "4711"};
  std::mt19937 random(number);
  std::string text;
  for (size_t i = 30 + random() % 190; i > 0; --i) text += std::string(kWords[random() % std::size(kWords)]) + " ";
  return text;
}

json OptionsOf(Dice& dice) {
  json options = json::object();
  for (const wire::RequestOption& option : wire::RequestOptions()) {
    const bool is_method = option.name() == "reuse" || option.name() == "decode";
    const std::string method = options.value(option.of_decoding ? "decode" : "reuse", "auto");
    const bool read = option.methods.empty() || method == "auto" ||
                      std::find(option.methods.begin(), option.methods.end(), method) != option.methods.end();
    // Most of those that a method does not read would be refused.
    const double chance = is_method ? .75 : !read ? .002 : option.methods.empty() || method == "auto" ? .05 : .15;
    if (dice.Chance(chance)) options[option.name()] = ValueOf(*option.field, dice);
  }
  if (dice.Chance(.4)) options["namespace"] = "n" + std::to_string(dice.Below(4));
  if (dice.Chance(.2)) options["session"] = "s" + std::to_string(dice.Below(6));
  return options;
}

json BodyOf(Dice& dice) {
  json parts = json::array();
  for (size_t i = 1 + dice.Below(6); i > 0; --i) {
    const std::string document = Document(static_cast<uint32_t>(dice.Below(12)));
    if (dice.Chance(.6)) {
      parts.push_back({{"type", "segment"}, {"text", document}});
      if (dice.Chance(.3)) parts.back()["namespace"] = "n" + std::to_string(dice.Below(4));
    } else {
      parts.push_back({{"type", "text"}, {"text", document.substr(0, 1 + dice.Below(document.size()))}});
    }
  }
  json body = {{"prompt", parts}, {"max_tokens", 1 + dice.Below(48)}, {"splice", OptionsOf(dice)}};
  const auto maybe = [&](double chance, const char* name, const json& values) {
    if (dice.Chance(chance)) body[name] = values[dice.Below(values.size())];
  };
  maybe(.5, "temperature", {0, .3, 1, 2});
  maybe(.3, "top_p", {.1, .9, 1});
  maybe(.3, "top_k", {0, 1, 5, 50, 600});
  maybe(.2, "min_p", {0, .1});
  maybe(.25, "n", {2, 3, 4});
  maybe(.2, "logprobs", {0, 1, 5});
  maybe(.2, "repetition_penalty", {.5, 1.1, 2});
  maybe(.2, "frequency_penalty", {-1, .5});
  maybe(.2, "stop", {"a", "\n", json::array({"the", "ships"})});
  maybe(.2, "logit_bias", {{{"7", -100}}, {{"4095", 5}}});
  maybe(.1, "min_tokens", {1, 3});
  maybe(.4, "stream", {true});
  return body;
}

double PagesUsed(const std::string& metrics_address) {
  return MetricValue(HttpGet(metrics_address, "/metrics").body, "splice_kv_pages_used");
}

// One prompt whose answer must stay what it was at first.
class Reference {
 public:
  explicit Reference(std::string http) : http_(std::move(http)), want_(Ask()) {}
  // The answer now, if it is another one.
  std::optional<std::string> Change() const {
    const std::string got = Ask();
    return got == want_ ? std::nullopt : std::optional(got);
  }

 private:
  std::string Ask() const {
    const json body = {{"prompt", Document(0)},
                       {"max_tokens", 24},
                       {"temperature", 0},
                       {"splice", {{"reuse", "exact"}, {"decode", "dense"}, {"namespace", "reference"}}}};
    const HttpReply reply = HttpPost(http_, "/v1/completions", body.dump());
    if (reply.status != 200) return std::to_string(reply.status) + " " + reply.body;
    return json::parse(reply.body)["choices"][0]["text"].get<std::string>();
  }

  const std::string http_, want_;
};

// Random requests from several clients at a time; some leave early.
void Storm(uint32_t seed, const std::string& http) {
  const Reference reference(http);
  std::mutex mutex;  // guards all up to the next blank line
  std::map<int, int> statuses;
  std::map<std::string, std::string> wrong;  // what was said of the first request that it was said of

  const Clock::time_point end = Clock::now() + Duration();
  const auto client = [&](int number) {
    Dice dice(seed + static_cast<uint32_t>(number));
    while (Clock::now() < end) {
      if (number == 0 && dice.Chance(.2)) {
        const std::optional<std::string> change = reference.Change();
        if (!change.has_value()) continue;
        std::lock_guard lock(mutex);
        wrong.try_emplace("the reference answer changed", *change);
        continue;
      }
      const json body = BodyOf(dice);
      if (dice.Chance(.1)) {
        spl::testing::HttpTestClient gone(http);
        gone.SendRequest("POST", "/v1/completions", body.dump(), {"Content-Type: application/json"});
        if (body.contains("stream") && gone.ReadHead().status == 200 && dice.Chance(.5)) (void)gone.NextEvent();
        gone.Abort();
        continue;
      }
      const HttpReply reply = HttpPost(http, "/v1/completions", body.dump());
      const bool broken = reply.status == 200 && reply.body.find("\"error\"") != std::string::npos;
      std::lock_guard lock(mutex);
      ++statuses[reply.status];
      if (reply.status == 0 || reply.status >= 500 || broken)
        wrong.try_emplace(reply.body.substr(reply.body.size() - std::min<size_t>(reply.body.size(), 300)), body.dump());
    }
  };
  std::vector<std::thread> clients;
  for (int i = 0; i < kClients; ++i) clients.emplace_back(client, i);
  for (std::thread& thread : clients) thread.join();

  for (const auto& [status, count] : statuses) std::printf("%d: %d answers\n", status, count);
  for (const auto& [what, request] : wrong) ADD_FAILURE() << what << "\n" << request;
  EXPECT_GT(statuses[200], 0);
  EXPECT_EQ(reference.Change(), std::nullopt);
}

// Pools of a few thousand tokens, so that several answers of some requests do not fit beside each other. Passes that
// are soon full, and every other approximated prompt runs once more, exactly, beside the next ones.
const std::vector<std::string> kPrefillFlags = {"--kv-bytes",       "96MiB", "--slice-tokens", "256",
                                                "--fidelity-share", "0.5"};

TEST(OptionCombinations, AreAnsweredOrRefusedAndHarmNobody) {
  const uint32_t seed = SeededRandom("option combinations")();
  // With every other seed decode workers also compute prompts, in the same pool.
  const std::string local_tokens = seed % 2 == 0 ? "1024" : "0";
  std::printf("--local-prefill-tokens %s\n", local_tokens.c_str());
  ClusterConfig config = {.model_dir = kTinyModel,
                          .num_decode = 2,
                          .prefill_flags = kPrefillFlags,
                          .decode_flags = {"--kv-bytes", "40MiB", "--local-prefill-tokens", local_tokens},
                          .router_flags = {}};
  config.prefill_flags.insert(config.prefill_flags.end(), {"--fetch", "cost"});  // the default
  // With every other two seeds prompts have begun before their fetch does.
  const bool late = seed / 2 % 2 == 0;
  if (late) config.prefill_flags.insert(config.prefill_flags.end(), {"--fault", "engine.prefill.fetch=delay(200)"});
  std::printf("fetches begin %s\n", late ? "late" : "at once");
  const auto cluster = ProcessCluster::Start(config);
  ASSERT_NE(cluster, nullptr);
  ASSERT_TRUE(cluster->WaitReady());
  Storm(seed, cluster->http());
  for (const auto& worker : cluster->decode) {
    const std::string& metrics = worker->ready("metrics");
    EXPECT_TRUE(Eventually([&] { return PagesUsed(metrics) == 0; })) << PagesUsed(metrics);
  }
  cluster->router->Signal(SIGTERM);
  EXPECT_EQ(cluster->router->WaitForExit(), 0);
  for (auto* const workers : {&cluster->prefill, &cluster->decode}) {
    for (const auto& worker : *workers) {
      worker->Signal(SIGTERM);
      EXPECT_EQ(worker->WaitForExit(), 0) << worker->Stderr();
    }
  }
}

// Both engines in one process, with one pool.
TEST(OptionCombinations, HarmNobodyInOneProcess) {
  const uint32_t seed = SeededRandom("option combinations in one process")();
  std::vector<std::string> argv = kPrefillFlags;
  argv.insert(argv.begin(), {BinDir() + "/splice", "serve", "--model", kTinyModel, "--backend", "cpu", "--http",
                             "127.0.0.1:0", "--grpc", "127.0.0.1:0"});
  const auto serve = Process::StartAndWaitReady(argv);
  ASSERT_NE(serve, nullptr);
  Storm(seed, serve->ready("http"));
  serve->Signal(SIGTERM);
  EXPECT_EQ(serve->WaitForExit(), 0) << serve->Stderr();
}

}  // namespace
}  // namespace spl::test

int main(int argc, char** argv) {
  setenv(spl::kEnableFaultsVariable, "1", 1);  // of the programs that it starts
  testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
