// Workers that register themselves with a real etcd, as processes: they come, go and hang while requests run.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "tests/cluster/processes.h"
#include "tests/support/etcd_process.h"
#include "tests/support/eventually.h"
#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"

namespace spl::test {
namespace {

using namespace std::chrono_literals;
using nlohmann::json;

class DiscoveryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    etcd_ = spl::testing::EtcdProcess::Start(dir_.path() + "/etcd");
    ASSERT_NE(etcd_, nullptr);
    discovery_ = "etcd://" + etcd_->endpoint() + "/test";
    router_ = Process::StartAndWaitReady({BinDir() + "/splice-router", "--model", kTinyModel, "--http", "127.0.0.1:0",
                                          "--grpc", "127.0.0.1:0", "--discovery", discovery_});
    ASSERT_NE(router_, nullptr);
  }

  std::unique_ptr<Process> Worker(const std::string& role, const std::string& id,
                                  const std::vector<std::string>& more = {}) {
    std::vector<std::string> argv = {BinDir() + "/splice-" + role,
                                     "--model",
                                     kTinyModel,
                                     "--discovery",
                                     discovery_,
                                     "--worker-id",
                                     id,
                                     "--lease-seconds",
                                     "2",
                                     "--kv-bytes",
                                     "128MiB",
                                     "--threads",
                                     "1"};
    argv.insert(argv.end(), more.begin(), more.end());
    return Process::StartAndWaitReady(argv);
  }

  double Metric(const std::string& name) { return MetricValue(HttpGet(http(), "/metrics").body, name); }
  bool WaitForWorkers(double count) {
    return Eventually(
        [&] { return Metric("splice_router_workers") == count && HttpGet(http(), "/readyz").status == 200; }, 30s);
  }
  HttpReply Ask(int number) {
    const json body = {{"model", "splice-tiny"},
                       {"prompt", "Ship " + std::to_string(number % 7) + " sails."},
                       {"max_tokens", 8},
                       {"temperature", 0},
                       {"ignore_eos", true}};
    return HttpPost(http(), "/v1/completions", body.dump());
  }
  const std::string& http() { return router_->ready("http"); }

  spl::testing::TempDir dir_;
  std::unique_ptr<spl::testing::EtcdProcess> etcd_;
  std::string discovery_;
  std::unique_ptr<Process> router_;
};

TEST_F(DiscoveryTest, ARouterWithoutAListFindsWorkersAndNoneOfEtcdsTroublesCostsARequest) {
  EXPECT_EQ(Ask(0).status, 503) << "nobody is there yet";
  auto prefill = Worker("prefill", "p0");
  auto first = Worker("decode", "d0");
  ASSERT_TRUE(prefill && first && WaitForWorkers(2));

  std::atomic<bool> stop{false};
  std::mutex mutex;
  std::vector<std::string> failures;
  int answers = 0;
  std::vector<std::thread> clients;
  for (int c = 0; c < 2; ++c) {
    clients.emplace_back([&] {
      for (int i = 0; !stop; ++i) {
        const HttpReply reply = Ask(i);
        std::lock_guard lock(mutex);
        ++answers;
        if (reply.status != 200) failures.push_back(std::to_string(reply.status) + " " + reply.body);
      }
    });
  }
  // Of no consequence: etcd ends and comes back, and once more without its data.
  etcd_->Kill();
  ASSERT_TRUE(etcd_->Restart());
  auto second = Worker("decode", "d1");  // registers with the etcd that came back
  EXPECT_TRUE(second && WaitForWorkers(3));
  etcd_->Kill();
  etcd_->Erase();
  ASSERT_TRUE(etcd_->Restart());
  // A worker that leaves in order takes nothing with it.
  first->Signal(SIGTERM);
  EXPECT_EQ(first->WaitForExit(), 0);
  EXPECT_TRUE(WaitForWorkers(2));
  // Beyond all leases and graces: those that live are still in the list.
  EXPECT_FALSE(Eventually([&] { return Metric("splice_router_workers") < 2; }, 6s));
  stop = true;
  for (std::thread& client : clients) client.join();
  EXPECT_THAT(failures, ::testing::IsEmpty());
  EXPECT_GT(answers, 20);
}

TEST_F(DiscoveryTest, AWorkerThatHangsLosesItsLease) {
  auto prefill = Worker("prefill", "p0");
  auto first = Worker("decode", "d0");
  auto second = Worker("decode", "d1");
  ASSERT_TRUE(prefill && first && second && WaitForWorkers(3));
  EXPECT_EQ(Metric("splice_router_members"), 3);
  second->Signal(SIGSTOP);
  EXPECT_TRUE(WaitForWorkers(2)) << "out of use after two polls";
  EXPECT_TRUE(Eventually([&] { return Metric("splice_router_members") == 2; }, 15s)) << "off the list after its lease";
  EXPECT_EQ(Ask(1).status, 200);
  second->Signal(SIGCONT);
  EXPECT_TRUE(WaitForWorkers(3)) << "it registers again";
  EXPECT_EQ(Metric("splice_router_members"), 3);
}

TEST_F(DiscoveryTest, AWorkerOnAllAddressesTellsTheOneThatItIsReachedBy) {
  auto refused = Process::Run(
      {BinDir() + "/splice-decode", "--model", kTinyModel, "--discovery", discovery_, "--listen", "0.0.0.0:0"});
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_THAT(refused.err, ::testing::HasSubstr("--advertise"));
  const std::vector<std::string> everywhere = {"--listen",    "0.0.0.0:0", "--kv-listen-host", "0.0.0.0",
                                               "--advertise", "127.0.0.1", "--kv-transport",   "tcp"};
  auto prefill = Worker("prefill", "p0", everywhere);
  auto decode = Worker("decode", "d0", everywhere);
  ASSERT_TRUE(prefill && decode && WaitForWorkers(2));
  EXPECT_EQ(Ask(1).status, 200);
}

// What one router has had computed, another one finds.
TEST(SharedCacheTest, ARouterKnowsWhatAnotherOneSentWhere) {
  std::vector<std::unique_ptr<Process>> prefill;
  for (const char* id : {"p0", "p1"}) {
    prefill.push_back(Process::StartAndWaitReady({BinDir() + "/splice-prefill", "--model", kTinyModel, "--worker-id",
                                                  id, "--kv-bytes", "128MiB", "--threads", "1"}));
    ASSERT_NE(prefill.back(), nullptr);
  }
  auto decode =
      Process::StartAndWaitReady({BinDir() + "/splice-decode", "--model", kTinyModel, "--kv-bytes", "128MiB"});
  ASSERT_NE(decode, nullptr);
  const auto router = [&](const std::string& list) {
    return Process::StartAndWaitReady({BinDir() + "/splice-router", "--model", kTinyModel, "--http", "127.0.0.1:0",
                                       "--grpc", "127.0.0.1:0", "--prefill", list, "--decode", decode->ready("grpc")});
  };
  const auto wait = [](const Process& r, double workers) {
    return Eventually([&] {
      return MetricValue(HttpGet(r.ready("http"), "/metrics").body, "splice_router_workers") == workers &&
             HttpGet(r.ready("http"), "/readyz").status == 200;
    });
  };
  // Two that know one worker each, and one that knows both and has sent neither anything.
  std::unique_ptr<Process> of_one[] = {router(prefill[0]->ready("grpc")), router(prefill[1]->ready("grpc"))};
  auto of_both = router(prefill[0]->ready("grpc") + "," + prefill[1]->ready("grpc"));
  ASSERT_TRUE(of_one[0] && of_one[1] && of_both && wait(*of_one[0], 2) && wait(*of_one[1], 2) && wait(*of_both, 3));
  const auto ask = [](const Process& r, const std::string& prompt) {
    const json body = {{"model", "splice-tiny"}, {"prompt", prompt}, {"max_tokens", 2}, {"temperature", 0}};
    const HttpReply reply = HttpPost(r.ready("http"), "/v1/completions", body.dump());
    EXPECT_EQ(reply.status, 200) << reply.body;
    return json::parse(reply.body, nullptr, false);
  };
  std::string prompts[2];
  int chunks = 0;
  for (int w = 0; w < 2; ++w) {
    for (int i = 0; i < 60; ++i)
      prompts[w] += "Ship " + std::to_string(i + 100 * w) + " left port " + std::to_string(i % 7) + ". ";
    const json answer = ask(*of_one[w], prompts[w]);
    EXPECT_EQ(answer["splice"]["workers"]["prefill"], "p" + std::to_string(w));
    chunks += answer["usage"]["prompt_tokens"].get<int>() / 64;
  }
  const auto known = [&] {
    return MetricValue(HttpGet(of_both->ready("http"), "/metrics").body, "splice_router_cache_view_chunks");
  };
  EXPECT_TRUE(Eventually([&] { return known() >= chunks; })) << known() << " of " << chunks;
  // What the last poll found queued counts as load until the next one, and would outweigh the copy.
  EXPECT_TRUE(Eventually([&] {
    const json workers = json::parse(HttpGet(of_both->ready("http"), "/control/v1/workers").body, nullptr, false);
    for (const json& worker : workers["data"])
      if (worker["role"] == "prefill" && worker["queued_tokens"] != 0) return false;
    return workers["data"].size() == 3;
  }));
  for (int w = 0; w < 2; ++w) {
    const json again = ask(*of_both, prompts[w]);
    EXPECT_EQ(again["splice"]["workers"]["prefill"], "p" + std::to_string(w));
    EXPECT_GT(again["usage"]["prompt_tokens_details"]["cached_tokens"], 64);
  }
  // It is lost, and what was known of it.
  const double before = known();
  prefill[1]->Signal(SIGKILL);
  EXPECT_TRUE(Eventually([&] { return known() < before && known() > 0; }));
  EXPECT_EQ(ask(*of_both, prompts[1])["splice"]["workers"]["prefill"], "p0");
}

}  // namespace
}  // namespace spl::test
