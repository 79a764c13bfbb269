// A decode worker whose pool holds many requests when they begin, and few when they end: all of them are answered, in
// every continuation with the tokens of a worker that has room, and none is started a second time.
#include <gtest/gtest.h>

#include <future>
#include <nlohmann/json.hpp>
#include <random>

#include "tests/cluster/processes.h"
#include "tests/support/eventually.h"
#include "tests/support/paths.h"
#include "tests/support/seeded_random.h"

namespace spl::test {
namespace {

using nlohmann::json;

TEST(MemoryPressure, FailsNoRequestAndChangesNoToken) {
  std::mt19937 random = SeededRandom("memory pressure");
  std::vector<json> bodies;
  for (int i = 0; i < 8; ++i) {
    json prompt = json::array();
    for (size_t n = 120 + random() % 120; n > 0; --n) prompt.push_back(random() % 4000);
    const int continuations = 1 + i % 3;  // the largest request takes three quarters of the small pool
    bodies.push_back({{"prompt", prompt},
                      {"max_tokens", 250},
                      {"ignore_eos", true},
                      {"n", continuations},
                      {"temperature", continuations > 1 ? 1.5 : 0},
                      {"seed", random() % 1000},
                      {"splice",
                       {{"decode", i == 2   ? "sparcas"
                                   : i == 5 ? "snapkv"
                                            : "dense"},
                        {"decode_budget", 64}}}});
  }
  const auto answers = [&](const std::string& kv_bytes, double* preemptions) -> std::vector<json> {
    // A request that the worker fails is not started again.
    const auto cluster = ProcessCluster::Start({.model_dir = kTinyModel,
                                                .prefill_flags = {},
                                                .decode_flags = {"--kv-bytes", kv_bytes},
                                                .router_flags = {"--max-migrations", "0"}});
    EXPECT_NE(cluster, nullptr);
    if (cluster == nullptr || !cluster->WaitReady()) return {};
    std::vector<std::future<HttpReply>> replies;
    for (const json& body : bodies) {
      replies.push_back(std::async(
          std::launch::async, [&cluster, &body] { return HttpPost(cluster->http(), "/v1/completions", body.dump()); }));
    }
    std::vector<json> choices;
    for (auto& reply : replies) {
      const HttpReply got = reply.get();
      EXPECT_EQ(got.status, 200) << got.body;
      choices.push_back(got.status == 200 ? json::parse(got.body)["choices"] : json());
    }
    const auto decode = [&](const char* series) {
      return MetricValue(HttpGet(cluster->decode[0]->ready("metrics"), "/metrics").body, series);
    };
    EXPECT_TRUE(Eventually([&] { return decode("splice_kv_pages_used") == 0; })) << decode("splice_kv_pages_used");
    EXPECT_EQ(decode("splice_decode_parked_bytes"), 0);
    *preemptions = decode("splice_num_preemptions_total");
    return choices;
  };
  double with_room = 0, without = 0;
  const std::vector<json> want = answers("512MiB", &with_room), got = answers("20MiB", &without);
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i], want[i]) << i;
  EXPECT_EQ(with_room, 0);
  EXPECT_GT(without, 0);
}

}  // namespace
}  // namespace spl::test
