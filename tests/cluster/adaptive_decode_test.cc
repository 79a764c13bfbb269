// The decode method `adaptive` from an HTTP request to its receipt, through real workers in one process.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/cluster/local_cluster_fixture.h"
#include "tests/cluster/processes.h"
#include "tests/support/paths.h"

namespace spl::test {
namespace {

using nlohmann::json;

class AdaptiveDecodeClusterTest : public LocalClusterTest {
 protected:
  static void SetUpTestSuite() {
    cli::LocalClusterOptions options;
    options.model.dir = kTinyModel;
    options.http_listen = options.grpc_listen = "127.0.0.1:0";
    options.backend = "cpu";
    options.kv_bytes = 128 << 20;
    StartCluster(options);
  }
  static json Ask(const char* decode, const json& options = json::object()) {
    std::vector<int> prompt(300);
    for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<int>(i * 37 % 4000);
    json body = {{"prompt", prompt}, {"max_tokens", 20},   {"n", 2},
                 {"temperature", 0}, {"ignore_eos", true}, {"splice", {{"decode", decode}}}};
    body["splice"].update(options);
    const HttpReply reply = HttpPost(cluster_->http_address(), "/v1/completions", body.dump());
    EXPECT_EQ(reply.status, 200) << reply.body;
    return json::parse(reply.body);
  }
};

// By the built-in rule of hosts a prompt of 300 tokens is decoded densely.
TEST_F(AdaptiveDecodeClusterTest, TheReceiptTellsWhichStepsRan) {
  const json dense = Ask("dense"), adaptive = Ask("adaptive", {{"decode_budget", 100}, {"decode_mass_floor", 0.9}});
  EXPECT_EQ(adaptive["choices"], dense["choices"]);
  EXPECT_EQ(adaptive["splice"]["decode"], "adaptive");
  EXPECT_FALSE(dense["splice"].contains("decode_choice"));
  const json want = {{"dense_tokens", 38}, {"chosen_tokens", 0}, {"changes", 0}, {"guarded_heads", 0}};
  EXPECT_EQ(adaptive["splice"]["decode_choice"], want) << adaptive["splice"];
}

TEST_F(AdaptiveDecodeClusterTest, OptionsAreChecked) {
  const json body = {{"prompt", "x"}, {"splice", {{"decode", "sparcas"}, {"decode_mass_floor", 0.5}}}};
  const HttpReply other = HttpPost(cluster_->http_address(), "/v1/completions", body.dump());
  EXPECT_EQ(other.status, 400);
  EXPECT_NE(other.body.find("decode_mass_floor"), std::string::npos) << other.body;
  const json range = {{"prompt", "x"}, {"splice", {{"decode", "adaptive"}, {"decode_mass_floor", 1.5}}}};
  const HttpReply beyond = HttpPost(cluster_->http_address(), "/v1/completions", range.dump());
  EXPECT_EQ(beyond.status, 400);
  EXPECT_NE(beyond.body.find("decode_mass_floor"), std::string::npos) << beyond.body;
}

}  // namespace
}  // namespace spl::test
