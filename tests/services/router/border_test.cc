// Who gets in: open addresses, keys before bodies, limits before parsing, and web pages that operate nothing.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "services/base/address.h"
#include "services/base/fault_point.h"
#include "services/router/http/browser_guard.h"
#include "spl/v1/admin.grpc.pb.h"
#include "spl/v1/inference.grpc.pb.h"
#include "tests/support/fake_cluster.h"
#include "tests/support/http_test_client.h"
#include "tests/support/temp_dir.h"

namespace spl::router {
namespace {

using nlohmann::json;
using testing::Call;
using testing::FakeCluster;
using ::testing::HasSubstr;
using testing::HttpTestClient;
using testing::TestResponse;

constexpr char kCompletions[] = "/v1/completions";
constexpr char kDrain[] = "/control/v1/workers/d0/drain";
constexpr char kBases[] = "/admin/v1/knowledge_bases";

class BorderTest : public ::testing::Test {
 protected:
  BorderTest() : cluster_(1, 1) {}
  void WithKeys(const std::string& text) {
    std::ofstream(dir_.path() + "/keys") << text;
    cluster_.options.api_keys_file = dir_.path() + "/keys";
  }
  int Drain(const std::vector<std::string>& headers, const std::string& body = R"({"draining":false})") {
    return Call(cluster_.http(), "POST", kDrain, body, headers).status;
  }

  testing::TempDir dir_;
  FakeCluster cluster_;
};

// S8
TEST_F(BorderTest, AnOpenAddressWithoutKeysMustBeAskedFor) {
  cluster_.options.http.listen = "0.0.0.0:0";
  const absl::Status refused = RouterServer::Start(cluster_.options).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.ToString(), HasSubstr("--insecure-open"));
  cluster_.options.http.listen = "127.0.0.1:0";
  cluster_.options.grpc_listen = "0.0.0.0:0";
  EXPECT_EQ(RouterServer::Start(cluster_.options).status().code(), absl::StatusCode::kInvalidArgument);
  cluster_.options.http.listen = "0.0.0.0:0";
  cluster_.options.insecure_open = true;
  cluster_.StartRouter();
  const std::string address = WithHost(cluster_.http(), "127.0.0.1");
  EXPECT_EQ(Call(address, "POST", kCompletions, R"({"prompt":"x","max_tokens":1})").status, 200);
  // Everybody may use it; nobody may operate it.
  for (const char* path : {"/control/v1/status", "/debug/requests", kBases})
    EXPECT_EQ(Call(address, "GET", path).status, 403) << path;
  const auto admin = v1::Admin::NewStub(
      grpc::CreateChannel(WithHost(cluster_.router->grpc_address(), "127.0.0.1"), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  v1::ListKnowledgeBasesResponse response;
  EXPECT_EQ(admin->ListKnowledgeBases(&context, {}, &response).error_code(), grpc::StatusCode::PERMISSION_DENIED);
}

TEST_F(BorderTest, AnOpenAddressWithKeysWantsRoles) {
  WithKeys("key-a alice\nkey-b bob role=admin\nkey-o otto role=operator\n");
  cluster_.options.http.listen = cluster_.options.grpc_listen = "0.0.0.0:0";
  cluster_.StartRouter();
  const std::string address = WithHost(cluster_.http(), "127.0.0.1");
  const auto get = [&](const char* path, const std::string& key) {
    return Call(address, "GET", path, "", {"authorization: Bearer " + key}).status;
  };
  EXPECT_EQ(get(kBases, "key-a"), 403);
  EXPECT_NE(get(kBases, "key-b"), 403) << "there is no store, but it may ask";
  EXPECT_NE(get(kBases, "key-o"), 403);
  EXPECT_EQ(get("/control/v1/status", "key-a"), 403);
  EXPECT_EQ(get("/control/v1/status", "key-b"), 403);
  EXPECT_EQ(get("/control/v1/status", "key-o"), 200);
}

// S10: a page in a browser on this machine, or a name of the page's own that resolves to it.
TEST_F(BorderTest, WebPagesOfOtherOriginsOperateNothing) {
  cluster_.StartRouter();
  EXPECT_EQ(Drain({}), 200);
  EXPECT_EQ(Drain({"content-type: application/json; charset=utf-8"}), 200);
  EXPECT_EQ(Drain({"origin: http://" + cluster_.http(), "sec-fetch-site: same-origin"}), 200);
  EXPECT_EQ(Drain({"content-type: text/plain"}), 415);
  EXPECT_EQ(Drain({"content-type: application/x-www-form-urlencoded"}, ""), 415);
  EXPECT_EQ(Drain({"origin: https://evil.example"}), 403);
  EXPECT_EQ(Drain({"origin: null"}), 403);
  EXPECT_EQ(Drain({"sec-fetch-site: cross-site"}), 403);
  EXPECT_EQ(Drain({"sec-fetch-site: same-site"}), 403);
  EXPECT_EQ(Drain({"host: evil.example"}), 403);
  EXPECT_EQ(Drain({"x-forwarded-for: 203.0.113.7"}), 403);
  for (const char* path : {"/debug/requests", "/control/v1/status", kBases}) {
    EXPECT_EQ(Call(cluster_.http(), "GET", path, "", {"host: evil.example"}).status, 403) << path;
    EXPECT_EQ(Call(cluster_.http(), "GET", path, "", {"origin: https://evil.example"}).status, 403) << path;
  }
  EXPECT_EQ(Call(cluster_.http(), "GET", "/debug/requests", "", {"host: localhost"}).status, 200);
  EXPECT_EQ(Call(cluster_.http(), "GET", "/ui").status, 200);
}

TEST(BrowserGuardTest, LoopbackHosts) {
  for (const char* host :
       {"localhost", "LocalHost:8000", "127.0.0.1", "127.0.0.1:80", "127.1.2.3", "[::1]", "[::1]:80"})
    EXPECT_TRUE(IsLoopbackHost(host)) << host;
  for (const char* host : {"", "evil.example", "127.0.0.1.evil.example", "localhost.evil", "[::2]", "10.0.0.1", "[::1"})
    EXPECT_FALSE(IsLoopbackHost(host)) << host;
}

// S4: the key is looked at when the header is there; nobody waits for the body.
TEST_F(BorderTest, WithoutAKeyNoBodyIsRead) {
  WithKeys("key-a alice\n");
  cluster_.StartRouter();
  for (const char* path : {kCompletions, "/tokenize", "/healthz", "/nothing", kBases, kDrain}) {
    HttpTestClient client(cluster_.http());
    client.Send(std::string("POST ") + path + " HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n" +
                "content-length: 1000000\r\n\r\n");
    EXPECT_EQ(client.Read().status, 401) << path;
    EXPECT_TRUE(client.AtEnd()) << path;
  }
}

// S4: what only counts tokens counts too.
TEST_F(BorderTest, TokenizeCountsAgainstTheLimits) {
  WithKeys("key-a alice rpm=4\n");
  cluster_.StartRouter();
  const auto post = [&](const char* path, const char* body) {
    return Call(cluster_.http(), "POST", path, body, {"authorization: Bearer key-a"}).status;
  };
  const auto count = [&] {
    const auto stub = v1::Inference::NewStub(
        grpc::CreateChannel(cluster_.router->grpc_address(), grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    context.AddMetadata("authorization", "Bearer key-a");
    v1::CountTokensRequest request;
    request.mutable_prompt()->set_text("x");
    v1::CountTokensResponse response;
    return stub->CountTokens(&context, request, &response).error_code();
  };
  EXPECT_EQ(post("/tokenize", R"({"prompt":"x"})"), 200);
  EXPECT_EQ(post("/detokenize", R"({"tokens":[5]})"), 200);
  EXPECT_EQ(count(), grpc::StatusCode::OK);
  EXPECT_EQ(post("/tokenize", R"({"prompt":)"), 400) << "counted before it is parsed";
  EXPECT_EQ(post("/tokenize", R"({"prompt":)"), 429) << "refused before it is parsed";
  EXPECT_EQ(post("/detokenize", R"({"tokens":[5]})"), 429);
  EXPECT_EQ(count(), grpc::StatusCode::RESOURCE_EXHAUSTED);
}

TEST_F(BorderTest, TokenizeTakesFourContextsAtMost) {
  cluster_.StartRouter();
  const size_t most = 4 * cluster_.router->dispatcher().max_context();
  const auto ids = [](size_t count) { return json{{"tokens", std::vector<int>(count, 5)}}.dump(); };
  EXPECT_EQ(Call(cluster_.http(), "POST", "/detokenize", ids(most)).status, 200);
  const TestResponse more = Call(cluster_.http(), "POST", "/detokenize", ids(most + 1));
  EXPECT_EQ(more.status, 400);
  EXPECT_THAT(more.body, HasSubstr(std::to_string(most)));
  std::string text;
  while (text.size() < 12 * most) text += "a b c d e f ";
  const TestResponse long_text = Call(cluster_.http(), "POST", "/tokenize", json{{"prompt", text}}.dump());
  EXPECT_EQ(long_text.status, 400);
  EXPECT_THAT(long_text.body, HasSubstr("four times"));
}

// S4: a whole answer is collected up to a bound; a stream has none.
TEST_F(BorderTest, AWholeAnswerIsBounded) {
  cluster_.StartRouter();
  json body = {{"prompt", "x y z"}, {"n", 16},          {"max_tokens", 4000},
               {"logprobs", 5},     {"temperature", 0}, {"ignore_eos", true}};
  const TestResponse answer = Call(cluster_.http(), "POST", kCompletions, body.dump());
  EXPECT_EQ(answer.status, 400) << answer.body.substr(0, 200);
  EXPECT_THAT(answer.body, HasSubstr("ask for a stream"));
  EXPECT_TRUE(cluster_.decode[0]->WaitIdle());
}

// S13: probes and metrics do not wait behind what tenants have parsed.
TEST_F(BorderTest, MetricsDoNotWaitForRequests) {
  cluster_.options.work_threads = 1;
  cluster_.StartRouter();
  const ScopedFaults faults;
  ASSERT_TRUE(ArmFaultFromFlag("router.tokenize=delay_until(metrics-answered)").ok());
  HttpTestClient slow(cluster_.http()), behind(cluster_.http());
  slow.SendRequest("POST", kCompletions, R"({"prompt":"x","max_tokens":1})");
  ASSERT_TRUE(WaitForFaultHits("router.tokenize", 1, 20'000));
  behind.SendRequest("POST", kCompletions, R"({"prompt":"x","max_tokens":1})");
  EXPECT_EQ(Call(cluster_.http(), "GET", "/metrics").status, 200);
  FireFaultEvent("metrics-answered");
  EXPECT_EQ(slow.Read().status, 200);
  EXPECT_EQ(behind.Read().status, 200);
}

}  // namespace
}  // namespace spl::router
