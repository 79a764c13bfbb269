// A decode worker whose pool holds many requests when they begin, and few when they end: all of them are answered, in
// every continuation with the tokens of a worker that has room, and none is started a second time. A choice of tokens
// that finds no room for its pages is left out; the answer then is the dense one, and its receipt says so.
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

struct Answered {
  json choices;
  std::string decode;  // the selector of the receipt
};

// All bodies at once, of a decode worker with a pool of kv_bytes; empty unless each was answered. Adds to *preemptions.
std::vector<Answered> Ask(const std::vector<json>& bodies, const std::string& kv_bytes, double* preemptions) {
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
  std::vector<Answered> answers;
  for (auto& reply : replies) {
    const HttpReply got = reply.get();
    EXPECT_EQ(got.status, 200) << got.body;
    if (got.status != 200) continue;
    const json body = json::parse(got.body);
    answers.push_back({body["choices"], body["splice"]["decode"]});
  }
  const auto decode = [&](const char* series) {
    return MetricValue(HttpGet(cluster->decode[0]->ready("metrics"), "/metrics").body, series);
  };
  EXPECT_TRUE(Eventually([&] { return decode("splice_kv_pages_used") == 0; })) << decode("splice_kv_pages_used");
  EXPECT_EQ(decode("splice_decode_parked_bytes"), 0);
  *preemptions += decode("splice_num_preemptions_total");
  return answers;
}

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
                      {"splice", i == 2   ? json{{"decode", "sparcas"}, {"decode_budget", 64}}
                                 : i == 5 ? json{{"decode", "snapkv"}, {"decode_budget", 64}}
                                          : json{{"decode", "dense"}}}});
  }
  // One with sparcas and one with snapkv are among them; these answers with room for a choice, and without.
  std::vector<json> dense = bodies;
  for (json& body : dense) body["splice"] = {{"decode", "dense"}};
  double with_room = 0, without = 0;
  const std::string room = "512MiB";
  const std::vector<Answered> want = Ask(bodies, room, &with_room), want_dense = Ask(dense, room, &with_room),
                              got = Ask(bodies, "20MiB", &without);
  ASSERT_EQ(want.size(), bodies.size());
  ASSERT_EQ(want_dense.size(), bodies.size());
  ASSERT_EQ(got.size(), bodies.size());
  for (size_t i = 0; i < got.size(); ++i) {
    const std::string asked = bodies[i]["splice"]["decode"];
    EXPECT_EQ(want[i].decode, asked) << i;
    EXPECT_TRUE(got[i].decode == asked || got[i].decode == "dense") << got[i].decode;
    EXPECT_EQ(got[i].choices, (got[i].decode == asked ? want : want_dense)[i].choices) << i << " " << got[i].decode;
    if (asked != "dense") {
      EXPECT_NE(want[i].choices, want_dense[i].choices) << i << ": a choice that changes nothing shows nothing";
    }
  }
  EXPECT_EQ(with_room, 0);
  EXPECT_GT(without, 0);
}

// h2o runs the whole prompt again to choose, over a copy of its KV: with the KV and the pages of what is chosen that is
// more than this pool has, now and ever. (Such a request was let in, and then failed on every worker.)
TEST(MemoryPressure, AChoiceThatNeedsMoreThanThePoolIsLeftOut) {
  std::mt19937 random = SeededRandom("a choice too large");
  json prompt = json::array();
  for (int i = 0; i < 820; ++i) prompt.push_back(random() % 4000);
  json body = {{"prompt", prompt},
               {"max_tokens", 8},
               {"ignore_eos", true},
               {"temperature", 0},
               {"splice", {{"decode", "h2o"}, {"decode_budget", 64}}}};
  double preemptions = 0;
  const std::vector<Answered> got = Ask({body}, "20MiB", &preemptions);
  ASSERT_EQ(got.size(), 1U);
  EXPECT_EQ(got[0].decode, "dense");
  EXPECT_EQ(preemptions, 0);
  const std::vector<Answered> roomy = Ask({body}, "64MiB", &preemptions);
  ASSERT_EQ(roomy.size(), 1U);
  EXPECT_EQ(roomy[0].decode, "h2o") << "nothing but the pool speaks against it";
}

}  // namespace
}  // namespace spl::test
