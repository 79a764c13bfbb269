// Two tenants of one cluster, without a namespace in common: what one has stored is nothing to the other, neither as a
// hit nor as time saved.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>

#include "tests/cluster/processes.h"
#include "tests/support/eventually.h"
#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"

namespace spl::test {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

// SPLICE_TENANT_TRIALS asks for more than the default; from 1,000 on the times are judged, too (about 4 minutes).
int NumTrials() {
  const char* text = std::getenv("SPLICE_TENANT_TRIALS");
  return text == nullptr ? 40 : std::atoi(text);
}
constexpr int kTrialsToJudgeTimes = 1000;

std::string RandomDocument(std::mt19937& random) {
  std::string text;
  for (int i = 0; i < 12; ++i) {
    text += "Ship " + std::to_string(random() % 9000) + " carries " + std::to_string(random() % 900) +
            " barrels to port " + std::to_string(random() % 90) + ". ";
  }
  return text;
}

class TenantsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::ofstream(dir_.path() + "/keys") << "key-of-the-first first\nkey-of-the-second second\n";
    cluster_ = ProcessCluster::Start({.model_dir = kTinyModel, .router_flags = {"--api-keys", dir_.path() + "/keys"}});
    ASSERT_NE(cluster_, nullptr);
  }

  struct Answer {
    double seconds = 0;
    int64_t reused = 0;  // tokens that came from anywhere
  };
  // One question about a document, as a segment of the tenant's namespace "docs".
  Answer Ask(const std::string& key, const std::string& document) {
    const json body = {{"model", "splice-tiny"},
                       {"prompt",
                        {{{"type", "text"}, {"text", "Read this.\n"}},
                         {{"type", "segment"}, {"text", document}, {"namespace", "docs"}},
                         {{"type", "text"}, {"text", "\nWhich port?"}}}},
                       {"max_tokens", 1}};
    const auto start = Clock::now();
    const HttpReply reply =
        HttpPost(cluster_->http(), "/v1/completions", body.dump(), {{"Authorization", "Bearer " + key}});
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    EXPECT_EQ(reply.status, 200) << reply.body;
    if (reply.status != 200) return {};
    const json tokens = json::parse(reply.body)["splice"]["tokens"];
    return {seconds, tokens["cached"].get<int64_t>() + tokens["aligned"].get<int64_t>()};
  }

  spl::testing::TempDir dir_;
  std::unique_ptr<ProcessCluster> cluster_;
};

// Chance that a time of `a` is larger than one of `b`: 0.5 when nothing tells them apart.
double AreaUnderCurve(std::vector<double> a, std::vector<double> b) {
  std::sort(b.begin(), b.end());
  double sum = 0;
  for (const double x : a) {
    sum += double(std::lower_bound(b.begin(), b.end(), x) - b.begin()) +
           0.5 * double(std::upper_bound(b.begin(), b.end(), x) - std::lower_bound(b.begin(), b.end(), x));
  }
  return sum / (double(a.size()) * double(b.size()));
}

TEST_F(TenantsTest, NeitherHitsNorTimesTellWhatTheOtherTenantHas) {
  const uint32_t seed = std::random_device()();
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  const std::string first = "key-of-the-first", second = "key-of-the-second";
  // The measure is no good unless a tenant's own document is found, and that shows in the time.
  const std::string own = RandomDocument(random);
  EXPECT_EQ(Ask(second, own).reused, 0);
  EXPECT_GT(Ask(second, own).reused, 0);

  std::vector<double> other_has_it, nobody_has_it, own_again;
  int64_t crossed = 0;
  for (int trial = 0; trial < NumTrials(); ++trial) {
    const std::string document = RandomDocument(random);
    const bool same = random() % 2 == 0;
    Ask(first, document);
    const Answer answer = Ask(second, same ? document : RandomDocument(random));
    crossed += answer.reused > 0;
    (same ? other_has_it : nobody_has_it).push_back(answer.seconds);
    if (trial % 10 == 0) own_again.push_back(Ask(second, own).seconds);
    if (HasFailure()) return;
  }
  EXPECT_EQ(crossed, 0);
  const double area = AreaUnderCurve(other_has_it, nobody_has_it);
  std::printf(
      "%zu requests whose document the other tenant has, %zu whose nobody has: %lld cross hits, area under the "
      "curve %.3f (own documents, found: %.3f)\n",
      other_has_it.size(), nobody_has_it.size(), static_cast<long long>(crossed), area,
      AreaUnderCurve(own_again, nobody_has_it));
  if (NumTrials() >= kTrialsToJudgeTimes) {
    EXPECT_NEAR(area, 0.5, 0.05);
    EXPECT_LT(AreaUnderCurve(own_again, nobody_has_it), 0.25) << "a hit must show, or the test sees nothing";
  }
}

// Both tenants use a document of a public namespace. What the first one had in front of it, when it came into the
// cache, changes nothing of the second one's answers: neither tokens nor probabilities, by any method that reuses
// segments.
TEST(PublicNamespacesTest, AnswersDoNotTellWhatAnotherTenantHadInFront) {
  const uint32_t seed = std::random_device()();
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  const std::string document = RandomDocument(random), own_text = RandomDocument(random);
  const std::string first = "key-of-the-first", second = "key-of-the-second";
  std::map<std::string, json> expected;  // by method; as it is when nobody else was there
  for (const std::string& hidden :
       {own_text, RandomDocument(random), RandomDocument(random) + RandomDocument(random)}) {
    spl::testing::TempDir dir;
    std::ofstream(dir.path() + "/keys") << first << " first\n" << second << " second\n";
    std::ofstream(dir.path() + "/secret") << "a secret of more than sixteen bytes";
    const auto cluster = ProcessCluster::Start(
        {.model_dir = kTinyModel,
         .router_flags = {"--api-keys", dir.path() + "/keys", "--secret-file", dir.path() + "/secret"}});
    ASSERT_NE(cluster, nullptr);
    const auto ask = [&](const std::string& key, const std::string& front, const char* method, bool publish) {
      const json body = {{"model", "splice-tiny"},
                         {"prompt",
                          {{{"type", "text"}, {"text", front}},
                           {{"type", "segment"}, {"text", document}, {"namespace", "public/ports"}},
                           {{"type", "text"}, {"text", "\nWhich port?"}}}},
                         {"max_tokens", 24},
                         {"temperature", 0},
                         {"logprobs", 5},
                         {"splice", {{"reuse", method}, {"publish", publish}}}};
      const HttpReply reply =
          HttpPost(cluster->http(), "/v1/completions", body.dump(), {{"Authorization", "Bearer " + key}});
      EXPECT_EQ(reply.status, 200) << reply.body;
      return json::parse(reply.body, nullptr, false);
    };
    (void)ask(hidden == own_text ? second : first, hidden, "auto", true);
    // The worker computes the document by itself when it has nothing else to do.
    ASSERT_TRUE(Eventually([&] {
      const std::string metrics = HttpGet(cluster->prefill[0]->ready("metrics"), "/metrics").body;
      return metrics.find("splice_prefill_canonical_segments_total{result=\"computed\"} 1") != std::string::npos;
    }));
    for (const char* const method : {"auto", "splice", "sparsex", "naive", "cacheblend", "epic", "samkv"}) {
      const json answer = ask(second, "Read this.\n", method, false);
      if (std::string(method) == "auto") {  // a prompt this short gains too little
        EXPECT_EQ(answer["splice"]["choice"]["why"], "little_to_gain") << answer["splice"];
      } else {
        EXPECT_GT(answer["splice"]["tokens"]["aligned"].get<int64_t>(), 0) << method;
      }
      if (hidden == own_text) {
        expected[method] = answer["choices"];
      } else {
        EXPECT_EQ(answer["choices"], expected[method]) << method;
      }
    }
  }
}

}  // namespace
}  // namespace spl::test
