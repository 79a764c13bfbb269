// Decode workers that prefill short prompts by themselves, as real programs: the same answers wherever a prompt was
// computed, whatever breaks, and no page is lost.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <mutex>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "tests/cluster/processes.h"
#include "tests/support/eventually.h"
#include "tests/support/http_test_client.h"
#include "tests/support/paths.h"
#include "tools/cli/text_generator.h"

namespace spl::test {
namespace {

using nlohmann::json;
using spl::testing::HttpTestClient;
using Ids = std::vector<int32_t>;

// Printable, so that every token has a text.
Ids RandomIds(uint32_t seed, size_t length) {
  std::mt19937 random(seed);
  Ids ids(length);
  for (int32_t& id : ids) id = 33 + static_cast<int32_t>(random() % 90);
  return ids;
}

json Body(const Ids& prompt, int max_tokens, bool stream = false) {
  return {{"model", "splice-tiny"}, {"prompt", prompt},   {"max_tokens", max_tokens},
          {"temperature", 0},       {"ignore_eos", true}, {"stream", stream}};
}

double Metric(const Process& process, const std::string& address, const std::string& name) {
  return MetricValue(HttpGet(process.ready(address), "/metrics").body, name);
}

class LocalPrefillTest : public ::testing::Test {
 protected:
  void Start(ClusterConfig config = {}) {
    config.model_dir = kTinyModel;
    config.decode_flags.insert(config.decode_flags.end(), {"--local-prefill-tokens", "256", "--threads", "1"});
    config.prefill_flags.insert(config.prefill_flags.end(), {"--kv-bytes", "256MiB", "--threads", "1"});
    cluster_ = ProcessCluster::Start(config);
    ASSERT_NE(cluster_, nullptr);
    // Of every decode worker, by the router's next look.
    ASSERT_TRUE(Eventually(
        [&] { return Router("splice_router_local_prefill_workers") == static_cast<double>(cluster_->decode.size()); }));
  }

  double Router(const std::string& name) const { return MetricValue(HttpGet(cluster_->http(), "/metrics").body, name); }
  double Decode(const std::string& name, size_t i = 0) const { return Metric(*cluster_->decode[i], "metrics", name); }

  static std::string Expected(const Ids& prompt, int max_tokens) {
    static std::mutex mutex;  // the generator is one thread's at a time
    std::lock_guard lock(mutex);
    static auto generator = cli::MakeLocalTextGenerator({.model = {.dir = kTinyModel}});
    EXPECT_TRUE(generator.ok()) << generator.status();
    auto result =
        (*generator)->Generate({.ids = prompt, .max_tokens = max_tokens, .ignore_eos = true}, [](const std::string&) {
          return true;
        });
    EXPECT_TRUE(result.ok()) << result.status();
    return result->text;
  }

  // The answer, whose text must be that of the plain model.
  json Ask(const Ids& prompt, int max_tokens = 12) const {
    const HttpReply reply = HttpPost(cluster_->http(), "/v1/completions", Body(prompt, max_tokens).dump());
    EXPECT_EQ(reply.status, 200) << reply.body;
    if (reply.status != 200) return nullptr;
    const json answer = json::parse(reply.body);
    EXPECT_EQ(answer["choices"][0]["text"], Expected(prompt, max_tokens)) << prompt.size() << " tokens";
    return answer["splice"];
  }

  void KillPool() const {
    for (const auto& worker : cluster_->prefill) worker->Signal(SIGKILL);
    ASSERT_TRUE(Eventually([&] {
      const std::string metrics = HttpGet(cluster_->http(), "/metrics").body;
      return MetricValue(metrics, "splice_router_workers_lost_total") >= static_cast<double>(cluster_->prefill.size());
    }));
  }

  void ExpectNoPageLost() const {
    for (size_t i = 0; i < cluster_->decode.size(); ++i) {
      EXPECT_TRUE(Eventually([&] {
        return Decode("splice_kv_pages_used", i) == 0 && Decode("splice_decode_local_prefill_waiting", i) == 0;
      })) << Decode("splice_kv_pages_used", i)
          << " pages";
    }
  }

  // Long prompts, one after the other, until it goes: whoever comes to the pool waits.
  class BusyPool {
   public:
    explicit BusyPool(const LocalPrefillTest& test) : test_(test) {
      for (int i = 0; i < 2; ++i) {
        threads_.emplace_back([this, i] {
          for (uint32_t n = 0; !stop_; ++n) {
            const json body = Body(RandomIds(1000 + 2 * n + i, 2048), 1);
            EXPECT_EQ(HttpPost(test_.cluster_->http(), "/v1/completions", body.dump()).status, 200);
          }
        });
      }
      EXPECT_TRUE(Eventually(
          [&] { return Metric(*test_.cluster_->prefill[0], "metrics", "splice_num_requests_waiting") > 0; }));
    }
    ~BusyPool() {
      stop_ = true;
      for (std::thread& thread : threads_) thread.join();
    }

   private:
    const LocalPrefillTest& test_;
    std::atomic<bool> stop_{false};
    std::vector<std::thread> threads_;
  };

  std::unique_ptr<ProcessCluster> cluster_;
};

TEST_F(LocalPrefillTest, ShortPromptsDoNotWaitForThePool) {
  Start();
  // What the receipt says is asked of both APIs.
  const json far = Ask(RandomIds(1, 300));
  EXPECT_EQ(far["prefill"], "pool");
  EXPECT_NE(far["workers"]["prefill"], far["workers"]["decode"]);
  {
    const BusyPool busy(*this);
    for (const size_t length : {1, 30, 64, 150, 256}) {
      const json near = Ask(RandomIds(static_cast<uint32_t>(length), length));
      EXPECT_EQ(near["prefill"], "local") << length;
      EXPECT_EQ(near["workers"]["prefill"], near["workers"]["decode"]);
      EXPECT_EQ(near["transport"], "in place");
      EXPECT_EQ(near["tokens"]["computed"], length);
    }
    const auto grpc = cli::MakeGrpcGenerator({.url = "grpc://" + cluster_->grpc()});
    ASSERT_TRUE(grpc.ok()) << grpc.status();
    const Ids prompt = RandomIds(77, 90);
    const auto result = (*grpc)->Generate({.ids = prompt, .max_tokens = 12, .ignore_eos = true},
                                          [](const std::string&) { return true; });
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->text, Expected(prompt, 12));
    EXPECT_EQ(result->receipt["prefill"], "local");
  }
  const std::string metrics = HttpGet(cluster_->http(), "/metrics").body;
  EXPECT_THAT(metrics, ::testing::HasSubstr("splice_router_prefills_total{place=\"local\"} 6"));
  EXPECT_GT(MetricValue(metrics, "splice_router_prefills_total"), 7);
  ExpectNoPageLost();
}

// The start of a longer prompt is there from the turn before: only what is new counts.
TEST_F(LocalPrefillTest, WithoutThePoolShortPromptsAreServed) {
  Start();
  KillPool();
  Ids prompt = RandomIds(2, 200);
  json receipt = Ask(prompt);
  EXPECT_EQ(receipt["prefill"], "local");
  EXPECT_EQ(receipt["tokens"]["cached"], 0);
  const Ids more = RandomIds(3, 150);
  prompt.insert(prompt.end(), more.begin(), more.end());
  // The router knows of it when the worker has told.
  ASSERT_TRUE(Eventually([&] { return Router("splice_router_cache_view_chunks") >= 3; }));
  receipt = Ask(prompt);
  EXPECT_EQ(receipt["prefill"], "local");
  EXPECT_EQ(receipt["tokens"]["cached"], 192);
  EXPECT_EQ(HttpGet(cluster_->http(), "/readyz").status, 200);
  const HttpReply refused = HttpPost(cluster_->http(), "/v1/completions", Body(RandomIds(4, 257), 4).dump());
  EXPECT_EQ(refused.status, 503) << refused.body;
  ExpectNoPageLost();
}

// What the pool has computed and stored is found by the decode worker, too.
TEST_F(LocalPrefillTest, StoredPrefixesAreNotComputedAgain) {
  Start({.decode_uses_store = true});
  Ids prompt = RandomIds(5, 1000);
  EXPECT_EQ(Ask(prompt)["prefill"], "pool");
  ASSERT_TRUE(
      Eventually([&] { return Metric(*cluster_->store, "metrics", "splice_store_chunks_stored_total") >= 15; }));
  KillPool();
  const Ids more = RandomIds(6, 100);
  prompt.insert(prompt.end(), more.begin(), more.end());
  const json receipt = Ask(prompt);
  EXPECT_EQ(receipt["prefill"], "local");
  EXPECT_EQ(receipt["tokens"]["stored"], 960);
  EXPECT_EQ(receipt["tokens"]["computed"], 140);
  ExpectNoPageLost();
}

TEST_F(LocalPrefillTest, WhatFailsHereIsComputedInThePool) {
  Start({.decode_flags = {"--fault", "prefill.run=error(INTERNAL)@1"}});
  const BusyPool busy(*this);
  const json receipt = Ask(RandomIds(7, 100));
  EXPECT_EQ(receipt["prefill"], "pool");
  EXPECT_EQ(receipt["attempts"], 2);
  EXPECT_EQ(Ask(RandomIds(8, 100))["prefill"], "local") << "once was once";
}

TEST_F(LocalPrefillTest, AClientThatLeavesFreesThePages) {
  Start({.decode_flags = {"--fault", "engine.prefill.step=delay(2000)", "--local-prefill-slice-tokens", "64"}});
  KillPool();
  const auto start = std::chrono::steady_clock::now();
  {
    // A stream's headers come with its first token: this client does not wait for them.
    HttpTestClient client(cluster_->http());
    client.SendRequest("POST", "/v1/completions", Body(RandomIds(9, 256), 5, true).dump());
    ASSERT_TRUE(Eventually([&] { return Decode("splice_decode_local_prefill_waiting") > 0; }));
    EXPECT_GT(Decode("splice_kv_pages_used"), 0);
  }
  ExpectNoPageLost();
  EXPECT_EQ(Router("splice_model_cancellation_total"), 1);
  // Not because it was computed: that takes four slices.
  EXPECT_EQ(Router("splice_time_to_first_token_seconds_count"), 0)
      << std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() << " s";
  EXPECT_EQ(Ask(RandomIds(10, 60))["prefill"], "local");
}

// A pool of pages for two short sequences: others wait in the router, and nobody is lost or wrong.
TEST_F(LocalPrefillTest, AWorkerWithoutRoomLetsThemWait) {
  Start({.decode_flags = {"--kv-bytes", "8MiB"}});
  KillPool();
  std::vector<std::thread> threads;
  std::vector<json> receipts(6);
  for (size_t i = 0; i < receipts.size(); ++i)
    threads.emplace_back([&, i] { receipts[i] = Ask(RandomIds(static_cast<uint32_t>(20 + i), 200), 60); });
  for (std::thread& thread : threads) thread.join();
  for (const json& receipt : receipts) EXPECT_EQ(receipt["prefill"], "local");
  ExpectNoPageLost();
}

// A worker that dies in the middle of its own prefill: the request is served by the other one.
TEST_F(LocalPrefillTest, ALostWorkerCostsARetry) {
  Start({.num_decode = 2, .decode_flags = {"--fault", "engine.prefill.step=delay(2000)@1"}});
  KillPool();
  json receipt;
  std::thread asking([&] { receipt = Ask(RandomIds(30, 100)); });
  size_t busy = 0;
  ASSERT_TRUE(Eventually([&] {
    for (busy = 0; busy < 2; ++busy) {
      if (Decode("splice_kv_pages_used", busy) > 0) return true;
    }
    return false;
  }));
  cluster_->decode[busy]->Signal(SIGKILL);
  asking.join();
  EXPECT_EQ(receipt["prefill"], "local");
  EXPECT_EQ(receipt["attempts"], 2);
}

}  // namespace
}  // namespace spl::test
