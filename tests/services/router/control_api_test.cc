// What operators see and switch: /control/v1/, and who may.
#include "services/router/http/control_api.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "services/router/telemetry/request_log.h"
#include "tests/support/eventually.h"
#include "tests/support/fake_cluster.h"
#include "tests/support/http_test_client.h"
#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"

namespace spl::router {
namespace {

using nlohmann::json;
using test::Eventually;
using testing::Call;
using testing::FakeCluster;
using ::testing::HasSubstr;
using testing::HttpTestClient;
using testing::TestResponse;

constexpr char kCompletions[] = "/v1/completions";

class ControlApiTest : public ::testing::Test {
 protected:
  ControlApiTest() : cluster_(2, 2) {}
  json Get(const std::string& path) {
    const TestResponse response = Call(cluster_.http(), "GET", path);
    EXPECT_EQ(response.status, 200) << response.body;
    return json::parse(response.body, nullptr, false);
  }
  TestResponse Drain(const std::string& worker, bool draining) {
    return Call(cluster_.http(), "POST", "/control/v1/workers/" + worker + "/drain",
                json{{"draining", draining}}.dump());
  }
  bool IsDraining(const std::string& worker) {
    const json workers = Get("/control/v1/workers");
    for (const json& w : workers["data"]) {
      if (w["worker"] == worker) return w["draining"].get<bool>();
    }
    ADD_FAILURE() << "no worker " << worker;
    return false;
  }

  FakeCluster cluster_;
};

TEST_F(ControlApiTest, ShowsPoolsWorkersAndRequests) {
  cluster_.StartRouter();
  const TestResponse answer = Call(cluster_.http(), "POST", kCompletions, R"({"prompt":"some words","max_tokens":3})",
                                   {"x-request-id: seen-one"});
  ASSERT_EQ(answer.status, 200) << answer.body;
  const json status = Get("/control/v1/status");
  EXPECT_EQ(status["ready"], true);
  EXPECT_EQ(status["draining"], false);
  EXPECT_EQ(status["model"]["name"], "splice-tiny");
  EXPECT_EQ(status["pools"]["prefill"]["workers"], 2);
  EXPECT_EQ(status["pools"]["decode"]["workers"], 2);
  EXPECT_EQ(status["requests"]["running"], 0);
  const json workers = Get("/control/v1/workers")["data"];
  ASSERT_EQ(workers.size(), 4u);
  EXPECT_EQ(workers[0]["role"], "prefill");
  EXPECT_EQ(workers[0]["links"].size(), 2u);
  for (const char* path : {"/control/v1/requests", "/debug/requests"}) {
    const json requests = Get(path);
    EXPECT_TRUE(requests["active"].empty());
    ASSERT_EQ(requests["recent"].size(), 1u);
    const json& seen = requests["recent"][0];
    EXPECT_EQ(seen["request_id"], "seen-one");
    EXPECT_EQ(seen["status"], "OK");
    EXPECT_EQ(seen["tokens"]["completion"], 3);
    EXPECT_GT(seen["seconds"]["total"].get<double>(), 0);
    EXPECT_FALSE(seen["workers"]["decode"].get<std::string>().empty());
  }
}

// Fake prefill workers say what they run; fake decode workers are of a version that did not.
TEST_F(ControlApiTest, ShowsWhichVersionAWorkerRuns) {
  cluster_.StartRouter();
  for (const json& worker : Get("/control/v1/workers")["data"])
    EXPECT_EQ(worker["version"], worker["role"] == "prefill" ? "9.8.7 (fake)" : "") << worker;
}

TEST_F(ControlApiTest, SaysWhichRequestsHaveATraceAndWhereItIs) {
  cluster_.options.trace_ui_url = "https://traces.example/trace/{trace_id}";
  cluster_.StartRouter();
  EXPECT_EQ(Get("/control/v1/status")["trace_ui_url"], "https://traces.example/trace/{trace_id}");
  for (const bool sampled : {true, false}) {
    const std::string id = sampled ? "sampled" : "not-sampled", trace = "4bf92f3577b34da6a3ce929d0e0e4736";
    const TestResponse answer =
        Call(cluster_.http(), "POST", kCompletions, R"({"prompt":"some words","max_tokens":1})",
             {"x-request-id: " + id, "traceparent: 00-" + trace + "-00f067aa0ba902b7-0" + (sampled ? "1" : "0")});
    ASSERT_EQ(answer.status, 200) << answer.body;
    const json seen = Get("/control/v1/requests/" + id);
    EXPECT_EQ(seen["traced"], sampled);
    EXPECT_EQ(seen["trace_id"], trace);
  }
}

TEST(TraceUiUrlTest, MustBeALinkWithAPlaceForTheId) {
  for (const char* wrong : {"javascript:alert('{trace_id}')", "traces.example/{trace_id}", "https://traces.example/"}) {
    FakeCluster cluster(1, 1);
    cluster.options.trace_ui_url = wrong;
    cluster.options.model_dir = test::kTinyModel;
    cluster.options.http.listen = cluster.options.grpc_listen = "127.0.0.1:0";
    const auto router = RouterServer::Start(cluster.options);
    EXPECT_EQ(router.status().code(), absl::StatusCode::kInvalidArgument) << wrong;
    EXPECT_THAT(std::string(router.status().message()), HasSubstr("--trace-ui-url")) << wrong;
  }
}

// Workers whose method has head classes, and prompts with a segment that name no method.
class QualityTest : public ::testing::Test {
 protected:
  QualityTest() : cluster_(0, 0) {
    const testing::FakeDefaultReuse reuse{"splice", 200, "sparsex"};
    cluster_.prefill.push_back(
        std::make_unique<testing::FakePrefill>(cluster_.fabric, testing::FakePrefill::Options{.default_reuse = reuse}));
    cluster_.decode.push_back(
        std::make_unique<testing::FakeDecode>(cluster_.fabric, testing::FakeDecode::Options{.default_reuse = reuse}));
    cluster_.StartRouter();
  }

  // Asks in a namespace, and says what KV was reserved for.
  v1::ReuseOptions Ask(const std::string& name_space, size_t num_tokens = 100) {
    json body = {{"prompt", std::vector<int>(num_tokens, 7)}, {"max_tokens", 2}};
    body["splice"] = {{"namespace", name_space}, {"segments", {{{"begin", 0}, {"end", 80}}}}};
    const TestResponse answer = Call(cluster_.http(), "POST", kCompletions, body.dump());
    EXPECT_EQ(answer.status, 200) << answer.body;
    return cluster_.decode[0]->last_reserve().reuse();
  }
  void Judge(const std::string& verdict) {
    v1::ChoiceReceipt choice;
    choice.set_why(verdict);
    choice.set_method("splice");
    choice.set_agreement(0.75);
    choice.set_agreement_low(0.5);
    choice.set_comparisons(64);
    cluster_.prefill[0]->SetChoice(choice);
  }

  FakeCluster cluster_;
};

TEST_F(QualityTest, AMethodThatIsClearlyBadIsDecodedFromAllKv) {
  EXPECT_EQ(Ask("docs").policy(), "splice");
  Judge("clearly_bad");
  EXPECT_FALSE(Ask("docs").heads().full_kv()) << "the verdict comes with the receipt, when KV has been reserved";
  EXPECT_TRUE(Ask("docs").heads().full_kv());
  EXPECT_EQ(Ask("docs").policy(), "splice") << "the worker decides, and may take it back";
  EXPECT_FALSE(Ask("mail").heads().full_kv()) << "another namespace";
  Judge("default");
  EXPECT_TRUE(Ask("docs").heads().full_kv());
  EXPECT_FALSE(Ask("docs").heads().full_kv()) << "its record is better now";
}

TEST_F(QualityTest, APromptThatIsLongerThanTheMethodWasTriedWithTakesAnother) {
  EXPECT_EQ(Ask("docs", 200).policy(), "splice");
  EXPECT_EQ(Ask("docs", 201).policy(), "sparsex");
}

TEST_F(QualityTest, OperatorsSeeTheRecords) {
  const auto records = [&] {
    const TestResponse answer = Call(cluster_.http(), "GET", "/control/v1/quality");
    EXPECT_EQ(answer.status, 200) << answer.body;
    return json::parse(answer.body)["data"];
  };
  Ask("docs");
  EXPECT_TRUE(records().empty()) << "no receipt told of any";
  Judge("clearly_bad");
  Ask("docs");
  Ask("mail");
  const json seen = records();
  ASSERT_EQ(seen.size(), 2u);
  EXPECT_EQ(seen[0]["namespace"], "mail") << "the last one first";
  EXPECT_EQ(seen[1]["namespace"], "docs");
  EXPECT_EQ(seen[1]["method"], "splice");
  EXPECT_EQ(seen[1]["worker"], "p0");
  EXPECT_EQ(seen[1]["verdict"], "clearly_bad");
  EXPECT_EQ(seen[1]["agreement"], 0.75);
  EXPECT_EQ(seen[1]["agreement_low"], 0.5);
  EXPECT_EQ(seen[1]["comparisons"], 64);
  EXPECT_TRUE(seen[1]["quality"].is_null());
  EXPECT_GE(seen[1]["seconds_ago"], seen[0]["seconds_ago"]);
}

// A request says what was asked and, once its first token is there, what ran.
TEST_F(ControlApiTest, ShowsWhatRan) {
  cluster_.StartRouter();
  for (const auto& [id, reuse] : {std::pair("asked-one", R"(,"splice":{"reuse":"exact"})"), {"auto-one", ""}}) {
    const std::string body = std::string(R"({"prompt":"some words","max_tokens":1)") + reuse + "}";
    const TestResponse answer = Call(cluster_.http(), "POST", kCompletions, body, {std::string("x-request-id: ") + id});
    ASSERT_EQ(answer.status, 200) << answer.body;
    const json receipt = json::parse(answer.body)["splice"], seen = Get(std::string("/control/v1/requests/") + id);
    EXPECT_EQ(seen["request_id"], id);
    EXPECT_EQ(seen["reuse"], std::string(reuse).empty() ? "" : "exact");
    EXPECT_EQ(seen["trace_id"].get<std::string>().size(), 32u);
    EXPECT_GE(seen["seconds"]["total"].get<double>(), seen["seconds"]["ttft"].get<double>());
    ASSERT_TRUE(seen["ran"].is_object()) << seen;
    EXPECT_EQ(seen["ran"]["reuse"], receipt["reuse"]);
    EXPECT_EQ(seen["ran"]["decode"], receipt["decode"]);
    EXPECT_EQ(seen["ran"]["exact"], receipt["exact"]);
    EXPECT_EQ(seen["ran"]["tokens"]["prefix"], receipt["tokens"]["cached"]);
    EXPECT_EQ(seen["ran"]["tokens"]["computed"], receipt["tokens"]["computed"]);
    EXPECT_EQ(seen["ran"]["transport"], receipt["transport"]);
  }
  EXPECT_EQ(Call(cluster_.http(), "GET", "/control/v1/requests/never-seen").status, 404);
  EXPECT_EQ(Call(cluster_.http(), "POST", "/control/v1/requests/asked-one", "{}").status, 405);
}

TEST_F(ControlApiTest, HasAHistory) {
  cluster_.options.history_period = std::chrono::milliseconds(100);
  cluster_.StartRouter();
  std::string prompt;
  for (int i = 0; i < 100; ++i) prompt += "some words ";
  const TestResponse answer =
      Call(cluster_.http(), "POST", kCompletions, json{{"prompt", prompt}, {"max_tokens", 3}}.dump());
  ASSERT_EQ(answer.status, 200) << answer.body;
  const json tokens = json::parse(answer.body)["splice"]["tokens"];
  json history;
  const auto sum = [&](const char* column) {
    double total = 0;
    for (const json& value : history["columns"][column]) total += value.get<double>();
    return total;
  };
  ASSERT_TRUE(Eventually([&] {
    history = Get("/control/v1/history?seconds=1800");
    return history["unix_ms"].size() >= 2 && sum("requests_per_second") > 0;
  }));
  EXPECT_DOUBLE_EQ(history["period_seconds"].get<double>(), 0.1);
  EXPECT_GT(sum("output_tokens_per_second"), 0);
  const double cached = tokens["cached"], computed = tokens["prompt"].get<double>() - cached;
  ASSERT_GT(computed, 0);
  EXPECT_NEAR(sum("prompt_computed_tokens_per_second") / sum("prompt_local_tokens_per_second"), computed / cached,
              1e-3);
  EXPECT_EQ(sum("errors_per_second"), 0);
  int64_t last = 0;
  for (const json& time : history["unix_ms"]) {
    EXPECT_GT(time.get<int64_t>(), last);
    last = time.get<int64_t>();
  }
  size_t observed = 0;
  for (const json& value : history["columns"]["ttft_p95_seconds"]) observed += value.is_number() ? 1 : 0;
  EXPECT_EQ(observed, 1u) << "null in periods without a first token: " << history;
  for (const auto& [name, values] : history["columns"].items())
    EXPECT_EQ(values.size(), history["unix_ms"].size()) << name;
  EXPECT_LE(Get("/control/v1/history?seconds=1")["unix_ms"].size(), 11u);
  for (const char* wrong : {"seconds=", "seconds=0", "seconds=-3", "seconds=1.5", "seconds=5&x=1", "minutes=3"})
    EXPECT_EQ(Call(cluster_.http(), "GET", std::string("/control/v1/history?") + wrong).status, 400) << wrong;
}

TEST_F(ControlApiTest, CancelsARequestUnderWay) {
  for (auto& decode : cluster_.decode) decode->SetGate(2);
  cluster_.StartRouter();
  HttpTestClient client(cluster_.http());
  client.SendRequest("POST", kCompletions, R"({"prompt":"some words","max_tokens":50,"stream":true})",
                     {"x-request-id: long-one"});
  ASSERT_EQ(client.ReadHead().status, 200);
  ASSERT_TRUE(client.NextEvent().has_value());
  const json active = Get("/control/v1/requests")["active"];
  ASSERT_EQ(active.size(), 1u);
  EXPECT_EQ(active[0]["stage"], "decoding");
  EXPECT_EQ(active[0]["caller"], "anonymous");
  const TestResponse cancelled = Call(cluster_.http(), "POST", "/control/v1/requests/long-one/cancel", "{}");
  EXPECT_EQ(cancelled.status, 200) << cancelled.body;
  std::string last;
  while (auto event = client.NextEvent()) last = *event;
  EXPECT_THAT(last, HasSubstr("an operator ended the request"));
  EXPECT_TRUE(Eventually([&] { return Get("/control/v1/requests")["active"].empty(); }));
  EXPECT_THAT(Get("/control/v1/requests")["recent"][0]["status"].get<std::string>(), HasSubstr("CANCELLED"));
  // It leaves the list of those under way a moment before it is forgotten.
  EXPECT_TRUE(Eventually(
      [&] { return Call(cluster_.http(), "POST", "/control/v1/requests/long-one/cancel", "{}").status == 404; }));
  for (auto& decode : cluster_.decode) decode->SetGate(UINT32_MAX);
}

// A drained worker gets nothing new, whoever asks, until it is taken back.
TEST_F(ControlApiTest, DrainsAndTakesBack) {
  cluster_.StartRouter();
  EXPECT_EQ(Drain("d0", true).status, 200);
  ASSERT_TRUE(Eventually([&] { return IsDraining("d0"); }));
  for (int i = 0; i < 6; ++i) {
    const TestResponse answer = Call(cluster_.http(), "POST", kCompletions, R"({"prompt":"x","max_tokens":1})");
    ASSERT_EQ(answer.status, 200) << answer.body;
    EXPECT_EQ(json::parse(answer.body)["splice"]["workers"]["decode"], "d1");
  }
  EXPECT_EQ(Get("/control/v1/status")["pools"]["decode"]["draining"], 1);
  EXPECT_EQ(Drain("d0", false).status, 200);
  EXPECT_TRUE(Eventually([&] { return !IsDraining("d0"); }));
  EXPECT_EQ(Drain("nobody", true).status, 404);
  EXPECT_EQ(Call(cluster_.http(), "POST", "/control/v1/workers/d0/drain", "{}").status, 400);
  EXPECT_EQ(Call(cluster_.http(), "GET", "/control/v1/workers/d0/drain").status, 405);
  EXPECT_EQ(Call(cluster_.http(), "POST", "/control/v1/status", "{}").status, 405);
  EXPECT_EQ(Call(cluster_.http(), "GET", "/control/v1/nothing").status, 404);
}

TEST_F(ControlApiTest, OnlyOperatorsWithKeys) {
  const testing::TempDir dir;
  const std::string path = dir.path() + "/keys";
  std::ofstream(path) << "key-a alice\nkey-o olga rpm=100 role=operator\n";
  cluster_.options.api_keys_file = path;
  cluster_.StartRouter();
  for (const char* route : {"/control/v1/status", "/control/v1/workers", "/control/v1/requests", "/control/v1/history",
                            "/control/v1/requests/x", "/debug/requests"}) {
    EXPECT_EQ(Call(cluster_.http(), "GET", route).status, 401) << route;
    const TestResponse refused = Call(cluster_.http(), "GET", route, "", {"authorization: Bearer key-a"});
    EXPECT_EQ(refused.status, 403) << route;
    EXPECT_THAT(refused.body, HasSubstr("role=operator"));
    const int allowed = Call(cluster_.http(), "GET", route, "", {"authorization: Bearer key-o"}).status;
    EXPECT_EQ(allowed, std::string(route).ends_with("/x") ? 404 : 200) << route;
  }
  EXPECT_EQ(Call(cluster_.http(), "POST", "/control/v1/workers/d0/drain", R"({"draining":true})",
                 {"authorization: Bearer key-a"})
                .status,
            403);
  EXPECT_EQ(Call(cluster_.http(), "GET", "/ui").status, 200) << "the page holds no data";
}

TEST(RequestLogTest, KeepsTheLastOnes) {
  RequestLog log(2);
  for (uint64_t id = 1; id <= 4; ++id) log.Begin(id, {.request_id = std::to_string(id), .stage = "queued"});
  log.Update(2, [](RequestRecord& r) { r.stage = "prefill"; });
  EXPECT_EQ(log.Active()[1].stage, "prefill");
  for (uint64_t id = 1; id <= 3; ++id) log.End(id, [](RequestRecord& r) { r.status = "OK"; });
  log.End(3, [](RequestRecord&) { FAIL() << "it has ended"; });
  ASSERT_EQ(log.Active().size(), 1u);
  ASSERT_EQ(log.Recent().size(), 2u);
  EXPECT_EQ(log.Recent()[0].request_id, "3");
  EXPECT_EQ(log.Recent()[1].request_id, "2");
}

}  // namespace
}  // namespace spl::router
