// Several routers over the same workers: what one of them has sent, the others know from the workers themselves.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <random>

#include "tests/cluster/processes.h"
#include "tests/support/eventually.h"
#include "tests/support/paths.h"

namespace spl::test {
namespace {

using nlohmann::json;

std::string Sentences(std::mt19937& random, int count) {
  std::string text;
  for (int i = 0; i < count; ++i) {
    text += "Ship " + std::to_string(random() % 9000) + " carries " + std::to_string(random() % 900) +
            " boxes to pier " + std::to_string(random() % 90) + ". ";
  }
  return text;
}

class SharedIndexesTest : public testing::Test {
 protected:
  void SetUp() override {
    ClusterConfig config;
    config.model_dir = kTinyModel;
    config.num_prefill = 2;
    config.prefill_uses_store = false;  // nothing is found but in the workers' own pages
    config.prefill_flags = config.decode_flags = {"--kv-bytes", "256MiB", "--threads", "1"};
    cluster_ = ProcessCluster::Start(config);
    ASSERT_NE(cluster_, nullptr);
    second_ = cluster_->StartAnotherRouter();
    ASSERT_NE(second_, nullptr);
  }

  // The router has seen that nobody waits at the prefill workers: only what they have decides.
  static bool SeesThemIdle(const std::string& http) {
    return Eventually([&] {
      const json workers = json::parse(HttpGet(http, "/control/v1/workers").body)["data"];
      return std::all_of(workers.begin(), workers.end(), [](const json& w) {
        return w["role"] != "prefill" || (w["queued_tokens"] == 0 && w["sent_tokens"] == 0);
      });
    });
  }

  // With `naive` an aligned token costs nearly nothing, and routers learn so: the place of the copies decides even on a
  // machine that is busy with other things, where the workers measure speeds that differ.
  static json Ask(const std::string& http, const json& content) {
    EXPECT_TRUE(SeesThemIdle(http));
    const json body = {{"model", "splice-tiny"},
                       {"messages", {{{"role", "user"}, {"content", content}}}},
                       {"max_tokens", 4},
                       {"temperature", 0},
                       {"splice", {{"reuse", "naive"}}}};
    const HttpReply reply = HttpPost(http, "/v1/chat/completions", body.dump());
    EXPECT_EQ(reply.status, 200) << reply.body;
    return reply.status == 200 ? json::parse(reply.body)["splice"] : json();
  }
  static json Text(const std::string& text) { return {{"type", "text"}, {"text", text}}; }
  static json Segment(const std::string& text) { return {{"type", "segment"}, {"text", text}}; }

  static double Known(const std::string& http) {
    return MetricValue(HttpGet(http, "/metrics").body, "splice_router_cache_view_chunks");
  }

  std::unique_ptr<ProcessCluster> cluster_;
  std::unique_ptr<Process> second_;
};

// A router places prompts by segments which only the other one has ever sent. By chance all of them would go to their
// holders once in 4096 times.
TEST_F(SharedIndexesTest, ARouterPlacesBySegmentsThatItKnowsFromEventsOnly) {
  const uint32_t seed = std::random_device()();
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  const std::string &first = cluster_->http(), &second = second_->ready("http");
  constexpr int kDocuments = 12;
  std::vector<std::string> documents;
  std::vector<std::string> holders;
  for (int i = 0; i < kDocuments; ++i) {
    documents.push_back(Sentences(random, 30));
    const double before = Known(second);
    const json receipt = Ask(first, {Text(Sentences(random, 3)), Segment(documents.back()), Text("What is lost?")});
    ASSERT_TRUE(receipt.is_object());
    EXPECT_EQ(receipt["tokens"]["aligned"], 0);
    holders.push_back(receipt["workers"]["prefill"]);
    // Chunks of the prompt and of the segment in it.
    const double chunks = std::floor(receipt["tokens"]["prompt"].get<double>() / 64);
    ASSERT_TRUE(Eventually([&] { return Known(second) >= before + chunks + 4; })) << Known(second) << " of " << before;
  }
  EXPECT_TRUE(Eventually([&] { return Known(first) == Known(second); }));
  std::map<std::string, int> used;
  for (int i = 0; i < kDocuments; ++i) {
    const json receipt = Ask(second, {Text(Sentences(random, 2)), Segment(documents[i]), Text("And what is not?")});
    ASSERT_TRUE(receipt.is_object());
    EXPECT_EQ(receipt["workers"]["prefill"], holders[i]) << "document " << i;
    EXPECT_GT(receipt["tokens"]["aligned"], 200) << "document " << i;
    ++used[holders[i]];
  }
  EXPECT_EQ(MetricValue(HttpGet(second, "/metrics").body, "splice_router_cache_resyncs_total"), 2)
      << "one snapshot a worker, then events";
}

// The same of prefixes, and of a worker that was restarted: what it had is gone for both.
TEST_F(SharedIndexesTest, ARouterPlacesByPrefixesThatItKnowsFromEventsOnly) {
  std::mt19937 random(7);
  const std::string &first = cluster_->http(), &second = second_->ready("http");
  for (int i = 0; i < 6; ++i) {
    const std::string start = Sentences(random, 30);
    const double before = Known(second);
    const json sent = Ask(first, json::array({Text(start + "What is lost?")}));
    ASSERT_TRUE(Eventually([&] { return Known(second) >= before + 5; }));
    const json found = Ask(second, json::array({Text(start + "And what is not?")}));
    EXPECT_EQ(found["workers"]["prefill"], sent["workers"]["prefill"]);
    EXPECT_GT(found["tokens"]["cached"], 200);
  }
}

}  // namespace
}  // namespace spl::test
