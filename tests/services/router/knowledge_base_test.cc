// Knowledge bases by HTTP, over fake workers and real chunk stores.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "services/chunk/remote/namespace_client.h"
#include "services/chunk/remote/record_client.h"
#include "services/kvstore/kvstore_server.h"
#include "services/router/kb/kb_lookups.h"
#include "services/router/kb/kb_manifest.h"
#include "tests/support/eventually.h"
#include "tests/support/fake_cluster.h"
#include "tests/support/http_test_client.h"
#include "tests/support/tcp_forwarder.h"
#include "tests/support/temp_dir.h"

namespace spl::router {
namespace {

using nlohmann::json;
using testing::FakeCluster;
using testing::FakePrefill;
using ::testing::HasSubstr;
using testing::HttpTestClient;
using testing::TempDir;
using testing::TestResponse;

constexpr char kBases[] = "/admin/v1/knowledge_bases";
constexpr char kNamespaces[] = "/admin/v1/namespaces";
constexpr char kCompletions[] = "/v1/completions";

std::chrono::steady_clock::time_point Soon() { return std::chrono::steady_clock::now() + testing::kLongWait; }

json Documents(const std::vector<std::pair<std::string, std::string>>& documents) {
  json out = json::array();
  for (const auto& [id, text] : documents) out.push_back({{"id", id}, {"text", text}});
  return out;
}

class KnowledgeBaseTest : public ::testing::Test {
 protected:
  KnowledgeBaseTest() { StartStore(); }
  ~KnowledgeBaseTest() override {
    cluster_.reset();  // before the store that it talks to
  }

  void StartStore() {
    kvstore::KvStoreOptions options;
    options.listen = store_address_;
    options.metrics_listen = "";
    options.data_dir = dir_.path() + "/store";
    options.memory_bytes = 8 << 20;
    options.disk_bytes = 64 << 20;
    auto started = kvstore::KvStoreServer::Start(options);
    ASSERT_TRUE(started.ok()) << started.status();
    store_ = *std::move(started);
    store_address_ = store_->grpc_address();
  }
  FakeCluster& Cluster(int num_prefill = 1) {
    if (cluster_ == nullptr) {
      cluster_ = std::make_unique<FakeCluster>(num_prefill, 1, store_address_);
      cluster_->options.knowledge_bases.cache.poll_interval = std::chrono::milliseconds(50);
      cluster_->options.knowledge_bases.publisher.retry_backoff = std::chrono::milliseconds(10);
      cluster_->options.knowledge_bases.publisher.contexts_per_worker = 2;
    }
    return *cluster_;
  }
  void Serve(int num_prefill = 1) { Cluster(num_prefill).StartRouter(); }
  void WriteKeys() {
    std::ofstream(dir_.path() + "/keys") << "key-a alice\nkey-b bob\n";
    Cluster().options.api_keys_file = dir_.path() + "/keys";
  }

  static std::vector<std::string> As(const std::string& key) {
    return key.empty() ? std::vector<std::string>() : std::vector<std::string>{"Authorization: Bearer " + key};
  }
  TestResponse Call(const std::string& method, const std::string& path, const json& body = nullptr,
                    const std::string& key = "") {
    return testing::Call(cluster_->http(), method, path, body.is_null() ? "" : body.dump(), As(key));
  }
  json Ok(const std::string& method, const std::string& path, const json& body = nullptr, const std::string& key = "") {
    const TestResponse response = Call(method, path, body, key);
    EXPECT_EQ(response.status, 200) << method << " " << path << ": " << response.body;
    return json::parse(response.body, nullptr, false);
  }
  json Publish(const std::string& name, const std::vector<std::pair<std::string, std::string>>& documents,
               bool swap = true, const std::string& key = "") {
    return Ok("POST", kBases, {{"name", name}, {"documents", Documents(documents)}, {"swap", swap}}, key);
  }
  static json Part(const std::string& base, const std::string& document) {
    return {{"type", "segment"}, {"knowledge_base", base}, {"document", document}};
  }
  // The fake model repeats its prompt.
  std::string Ask(const json& parts, int max_tokens, const std::string& key = "") {
    const json answer = Ok(
        "POST", kCompletions,
        {{"prompt", parts}, {"max_tokens", max_tokens}, {"add_special_tokens", false}, {"skip_special_tokens", false}},
        key);
    return answer.value(json::json_pointer("/choices/0/text"), "");
  }
  std::string AskFor(const std::string& base, const std::string& document, const std::string& key = "") {
    return Ask(json::array({Part(base, document)}), 12, key);
  }
  std::string ErrorCode(const TestResponse& response) {
    const json body = json::parse(response.body, nullptr, false);
    const json code = body.value(json::json_pointer("/error/code"), json());
    return code.is_string() ? code.get<std::string>() : "";
  }
  std::string StateOf(const std::string& name, size_t index) {
    return Ok("GET", std::string(kBases) + "/" + name).at("versions").at(index).at("state");
  }
  uint64_t StoredChunks() {
    const auto namespaces = std::move(chunk::NamespaceClient::Connect(store_address_)).value();
    const std::vector<chunk::NamespaceInfo> all = namespaces->List("", Soon()).value();
    uint64_t chunks = 0;
    for (const chunk::NamespaceInfo& info : all) chunks += info.chunks;
    return chunks;
  }

  TempDir dir_;
  std::string store_address_ = "127.0.0.1:0";
  std::unique_ptr<kvstore::KvStoreServer> store_;
  std::unique_ptr<FakeCluster> cluster_;
};

// The heart of it: the tokens, and with them the keys, that were stored are those that a request asks for.
TEST_F(KnowledgeBaseTest, WhatIsPublishedIsWhatRequestsAskFor) {
  Serve();
  const std::string text = "Ship 12 carries tea. It left on Monday, early in the morning.";
  const json version = Ok("POST", kBases,
                          {{"name", "ships"},
                           {"instruction", "Answer from the documents.\n"},
                           {"documents", Documents({{"faq-1", text}, {"faq-2", "Ship 63 carries salt."}})}});
  EXPECT_EQ(version.at("version"), 1);
  EXPECT_EQ(version.at("state"), "ready");
  EXPECT_EQ(version.at("current"), true);
  EXPECT_EQ(version.at("documents"), 2);
  EXPECT_EQ(version.at("contexts"), 2) << "each document behind the instruction alone";
  EXPECT_EQ(version.at("chunks"), 2);
  EXPECT_GT(version.at("bytes"), 0);
  EXPECT_EQ(StoredChunks(), 2u);

  EXPECT_THAT(
      Ask({{{"type", "text"}, {"text", "Q: "}}, Part("ships", "faq-1"), {{"type", "text"}, {"text", " A:"}}}, 80),
      HasSubstr("Q: " + text + " A:"));
  const std::vector<v1::PublishRequest> publishes = cluster_->prefill[0]->publishes();
  ASSERT_EQ(publishes.size(), 2u);
  const bool in_order = publishes[0].token_ids_size() > publishes[1].token_ids_size();  // faq-1 is the longer one
  const v1::PublishRequest& published = publishes[in_order ? 0 : 1];
  const v1::PublishRequest& other = publishes[in_order ? 1 : 0];
  ASSERT_EQ(published.segments_size(), 1);
  ASSERT_EQ(other.segments_size(), 1);
  EXPECT_EQ(published.segments(0).begin(), other.segments(0).begin());
  EXPECT_EQ(published.segments(0).end(), static_cast<uint32_t>(published.token_ids_size()));
  EXPECT_EQ(published.pin(), v1::PIN_HARD);
  EXPECT_TRUE(published.durable());
  const v1::PrefillRequest run = cluster_->prefill[0]->last_run();
  ASSERT_EQ(run.segments_size(), 1);
  const auto tokens = [](const auto& request, const v1::TokenSegment& segment) {
    return std::vector<uint32_t>(request.token_ids().begin() + segment.begin(),
                                 request.token_ids().begin() + segment.end());
  };
  EXPECT_EQ(tokens(run, run.segments(0)), tokens(published, published.segments(0)));
  EXPECT_EQ(run.segments(0).namespace_key(), published.segments(0).namespace_key());
  const chunk::Digest key = NamespaceKeys().DeriveKnowledgeBase({.name = "anonymous"}, "ships", 1);
  EXPECT_EQ(run.segments(0).namespace_key(), std::string(key.begin(), key.end()));
  EXPECT_TRUE(run.segments(0).frozen());
  EXPECT_TRUE(published.segments(0).frozen());
  EXPECT_GT(published.segments(0).begin(), 0u) << "the instruction stands in front";

  const json chat =
      Ok("POST", "/v1/chat/completions",
         {{"messages", {{{"role", "user"}, {"content", json::array({Part("ships", "faq-2")})}}}}, {"max_tokens", 4}});
  EXPECT_EQ(chat.at("splice").at("knowledge_bases"), json({{"ships", 1}}));
  const json own_text = {{"type", "segment"}, {"knowledge_base", "ships"}, {"text", "Ship 63 carries salt."}};
  EXPECT_THAT(Ask(json::array({own_text}), 20), HasSubstr("Ship 63 carries salt."));
  EXPECT_EQ(cluster_->prefill[0]->last_run().segments(0).namespace_key(), other.segments(0).namespace_key());
  EXPECT_EQ(tokens(cluster_->prefill[0]->last_run(), cluster_->prefill[0]->last_run().segments(0)),
            tokens(other, other.segments(0)));
}

TEST_F(KnowledgeBaseTest, DocumentsThatBelongTogetherFillContextsInOrder) {
  Cluster().options.knowledge_bases.publisher.context_tokens = 40;
  Serve();
  std::vector<std::pair<std::string, std::string>> documents;
  for (int i = 0; i < 9; ++i) {
    documents.emplace_back("d" + std::to_string(i), "Document " + std::to_string(i) + " speaks of ships and tea.");
  }
  documents.emplace_back("again", documents[0].second);
  const json version =
      Ok("POST", kBases,
         {{"name", "b"}, {"instruction", "Read:"}, {"together", true}, {"documents", Documents(documents)}});
  const auto requests = cluster_->prefill[0]->publishes();
  EXPECT_EQ(version.at("contexts"), requests.size());
  EXPECT_GT(requests.size(), 1u);
  int segments = 0;
  for (const v1::PublishRequest& request : requests) {
    EXPECT_LE(request.token_ids_size(), 40);
    const uint32_t prefix = request.segments(0).begin();
    EXPECT_EQ(prefix, requests[0].segments(0).begin());
    EXPECT_TRUE(
        std::equal(request.token_ids().begin(), request.token_ids().begin() + prefix, requests[0].token_ids().begin()));
    uint32_t end = prefix;
    for (const v1::TokenSegment& segment : request.segments()) {
      EXPECT_EQ(segment.begin(), end) << "one behind the other";
      end = segment.end();
    }
    EXPECT_EQ(end, static_cast<uint32_t>(request.token_ids_size()));
    segments += request.segments_size();
  }
  EXPECT_EQ(segments, 9) << "the same text is computed once";
  const json shown = Ok("GET", std::string(kBases) + "/b");
  EXPECT_EQ(shown.at("documents").at(9).at("context"), shown.at("documents").at(0).at("context"));
  EXPECT_EQ(shown.at("instruction"), "Read:");

  const TestResponse refused = Call(
      "POST", kBases, {{"name", "b"}, {"documents", Documents({{"short", "x"}, {"long", std::string(900, 'y')}})}});
  EXPECT_EQ(refused.status, 400);
  EXPECT_THAT(refused.body, HasSubstr("\"param\":\"documents[1].text\""));
  EXPECT_THAT(refused.body, HasSubstr("long"));
}

// Every worker has a few contexts, here two, to compute while others are stored, and none waits for those of another
// worker.
TEST_F(KnowledgeBaseTest, WorkersComputeAFewContextsAtATime) {
  Serve(2);
  for (const auto& p : cluster_->prefill) p->HoldPublishes(true);
  std::vector<std::pair<std::string, std::string>> documents;
  for (int i = 0; i < 7; ++i) documents.emplace_back("d" + std::to_string(i), "Ship " + std::to_string(i) + " sails.");
  json version;
  std::thread publisher([&] { version = Publish("b", documents); });
  for (const auto& p : cluster_->prefill) {
    EXPECT_TRUE(p->WaitFor([](const auto& c) { return c.publishes == 2; }));
  }
  const auto computed = [&] {
    return cluster_->prefill[0]->counters().publishes + cluster_->prefill[1]->counters().publishes;
  };
  cluster_->prefill[0]->HoldPublishes(false);
  EXPECT_TRUE(cluster_->prefill[0]->WaitFor([](const auto& c) { return c.publishes == 5; }));
  EXPECT_EQ(computed(), 7) << "the other worker holds two";
  cluster_->prefill[1]->HoldPublishes(false);
  publisher.join();
  EXPECT_EQ(version.at("contexts"), 7);
  EXPECT_EQ(version.at("chunks"), 7);
  EXPECT_EQ(computed(), 7);
}

TEST_F(KnowledgeBaseTest, SwapRollbackDiffAndDelete) {
  Serve();
  const std::string base = std::string(kBases) + "/b";
  Publish("b", {{"x", "one"}, {"y", "same"}});
  Publish("b", {{"x", "two"}, {"y", "same"}, {"z", "new"}}, false);
  EXPECT_THAT(AskFor("b", "x"), HasSubstr("one"));
  EXPECT_EQ(Ok("POST", base + "/swap", {{"version", 2}}).at("current"), 2);
  EXPECT_THAT(AskFor("b", "x"), HasSubstr("two")) << "at once on this router";
  const json diff = Ok("GET", base + "/diff");
  EXPECT_EQ(diff.at("from"), 1);
  EXPECT_EQ(diff.at("to"), 2);
  EXPECT_EQ(diff.at("added"), json({"z"}));
  EXPECT_EQ(diff.at("changed"), json({"x"}));
  EXPECT_EQ(diff.at("removed"), json::array());
  EXPECT_EQ(diff.at("unchanged"), 1);
  EXPECT_EQ(Ok("GET", base + "/diff?from=2&to=1").at("removed"), json({"z"}));
  EXPECT_EQ(ErrorCode(Call("DELETE", base + "/versions/2")), "version_in_use");
  EXPECT_EQ(Ok("POST", base + "/rollback").at("current"), 1);
  EXPECT_THAT(AskFor("b", "x"), HasSubstr("one"));
  const TestResponse none = Call("POST", base + "/rollback");
  EXPECT_EQ(none.status, 409);
  EXPECT_EQ(ErrorCode(none), "no_previous_version");
  const TestResponse missing = Call("POST", kCompletions, {{"prompt", json::array({Part("b", "z")})}});
  EXPECT_EQ(missing.status, 404);
  EXPECT_EQ(ErrorCode(missing), "document_not_found");
  EXPECT_THAT(missing.body, HasSubstr("\"param\":\"prompt[0].document\""));

  EXPECT_EQ(StoredChunks(), 5u);
  EXPECT_EQ(Ok("DELETE", base + "/versions/2").at("chunks"), 3);
  EXPECT_EQ(StoredChunks(), 2u);
  EXPECT_EQ(ErrorCode(Call("POST", base + "/swap", {{"version", 2}})), "version_not_found");
  EXPECT_EQ(Publish("b", {{"x", "three"}}).at("version"), 3) << "numbers are not used again";
  const json gone = Ok("DELETE", base);
  EXPECT_GT(gone.at("kv_bytes"), 0);
  EXPECT_EQ(gone.at("versions"), 2);
  EXPECT_EQ(StoredChunks(), 0u);
  EXPECT_EQ(ErrorCode(Call("GET", base)), "knowledge_base_not_found");
  EXPECT_EQ(Call("GET", base).status, 404);
  EXPECT_EQ(ErrorCode(Call("POST", kCompletions, {{"prompt", json::array({Part("b", "x")})}})),
            "knowledge_base_not_found");
  EXPECT_EQ(Ok("GET", kBases).at("data"), json::array());
  const auto records = std::move(chunk::RecordClient::Connect(store_address_)).value();
  EXPECT_TRUE(records->List(NamespaceKeys().DeriveOwner({.name = "anonymous"}), "", Soon())->empty())
      << "nothing is left behind";
}

TEST_F(KnowledgeBaseTest, TenantsWithTheSameNamesNeverMix) {
  WriteKeys();
  Serve();
  Publish("b", {{"x", "alice"}}, true, "key-a");
  EXPECT_EQ(Call("GET", std::string(kBases) + "/b", nullptr, "key-b").status, 404);
  EXPECT_EQ(Ok("GET", kBases, nullptr, "key-b").at("data"), json::array());
  Publish("b", {{"x", "robert"}, {"only", "his"}}, true, "key-b");
  EXPECT_THAT(AskFor("b", "x", "key-a"), HasSubstr("alice"));
  const std::string key_a = cluster_->prefill[0]->last_run().segments(0).namespace_key();
  EXPECT_THAT(AskFor("b", "x", "key-b"), HasSubstr("robert"));
  EXPECT_NE(cluster_->prefill[0]->last_run().segments(0).namespace_key(), key_a);
  EXPECT_EQ(ErrorCode(Call("POST", kCompletions, {{"prompt", json::array({Part("b", "only")})}}, "key-a")),
            "document_not_found");
  Ok("POST", kNamespaces, {{"name", "docs"}}, "key-a");
  EXPECT_EQ(ErrorCode(Call("GET", std::string(kNamespaces) + "/docs", nullptr, "key-b")), "namespace_not_found");
  EXPECT_EQ(Ok("GET", kNamespaces, nullptr, "key-b").at("data"), json::array());
  EXPECT_EQ(Ok("GET", kNamespaces, nullptr, "key-a").at("data").size(), 1u) << "without those of knowledge bases";
  Ok("DELETE", std::string(kBases) + "/b", nullptr, "key-b");
  EXPECT_THAT(AskFor("b", "x", "key-a"), HasSubstr("alice"));
  for (const char* key : {"", "key-c"}) EXPECT_EQ(Call("GET", kBases, nullptr, key).status, 401) << key;
}

// While versions change under them, all of a request comes from one version.
TEST_F(KnowledgeBaseTest, ConcurrentRequestsReadOneVersionEach) {
  Serve();
  const std::string base = std::string(kBases) + "/b";
  Publish("b", {{"x", "red apple"}, {"y", "red berry"}});
  Publish("b", {{"x", "blue whale"}, {"y", "blue jay"}});
  std::atomic<bool> done{false};
  std::atomic<int> red{0}, blue{0}, mixed{0};
  std::vector<std::thread> clients;
  for (int i = 0; i < 3; ++i) {
    clients.emplace_back([&] {
      while (!done) {
        const std::string text = Ask(json::array({Part("b", "x"), Part("b", "y"), Part("b", "x")}), 14);
        const bool has_red = text.find("red") != std::string::npos, has_blue = text.find("blue") != std::string::npos;
        ++(has_red == has_blue ? mixed : has_red ? red : blue);
      }
    });
  }
  for (int i = 0; i < 40 || red == 0 || blue == 0; ++i) {
    ASSERT_LT(i, 4000);
    Ok("POST", base + "/swap", {{"version", 1 + i % 2}});
    EXPECT_EQ(AskFor("b", "x").find(i % 2 == 0 ? "blue" : "red"), std::string::npos) << "after the swap";
  }
  done = true;
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(mixed, 0);
  EXPECT_GT(red, 0);
  EXPECT_GT(blue, 0);
}

TEST_F(KnowledgeBaseTest, OfTwoPublishesOneIsAborted) {
  Serve();
  Publish("b", {{"x", "old"}});
  cluster_->prefill[0]->HoldPublishes(true);
  std::thread first([&] { EXPECT_EQ(Publish("b", {{"x", "new"}}).at("version"), 2); });
  ASSERT_TRUE(cluster_->prefill[0]->WaitFor([](const auto& c) { return c.publishes == 2; }));
  const TestResponse second = Call("POST", kBases, {{"name", "b"}, {"documents", Documents({{"x", "other"}})}});
  EXPECT_EQ(second.status, 409);
  EXPECT_EQ(ErrorCode(second), "publish_in_progress");
  EXPECT_EQ(StateOf("b", 1), "publishing");
  EXPECT_EQ(ErrorCode(Call("DELETE", std::string(kBases) + "/b")), "publish_in_progress");
  EXPECT_THAT(AskFor("b", "x"), HasSubstr("old"));
  cluster_->prefill[0]->HoldPublishes(false);
  first.join();
  EXPECT_THAT(AskFor("b", "x"), HasSubstr("new"));
}

TEST_F(KnowledgeBaseTest, AFailedPublishLeavesTheCurrentVersionAndIsCollected) {
  Serve();
  Publish("b", {{"x", "old"}});
  // Where the store is, and where on its disk, is nothing that the caller is told; nor has the caller used up anything.
  cluster_->prefill[0]->FailPublishes(
      {grpc::StatusCode::RESOURCE_EXHAUSTED, "10.0.0.7:7400: /var/lib/slabs/3: write: No space left on device"}, 1);
  const TestResponse refused = Call("POST", kBases, {{"name", "b"}, {"documents", Documents({{"x", "new"}})}});
  EXPECT_EQ(refused.status, 503);
  EXPECT_THAT(refused.body, HasSubstr("no room for the documents"));
  EXPECT_THAT(refused.body, ::testing::Not(HasSubstr("10.0.0.7")));
  EXPECT_THAT(refused.body, ::testing::Not(HasSubstr("slabs")));
  const json shown = Ok("GET", std::string(kBases) + "/b");
  EXPECT_EQ(shown.at("current"), 1);
  EXPECT_EQ(shown.at("versions").at(1).at("state"), "failed");
  EXPECT_THAT(shown.at("versions").at(1).at("failure"), HasSubstr("no room for the documents"));
  EXPECT_EQ(ErrorCode(Call("POST", std::string(kBases) + "/b/swap", {{"version", 2}})), "version_not_ready");
  EXPECT_THAT(AskFor("b", "x"), HasSubstr("old"));
  EXPECT_EQ(Publish("b", {{"x", "new"}}).at("version"), 3);
  EXPECT_EQ(Ok("GET", std::string(kBases) + "/b").at("versions").size(), 2u) << "the failed one is gone";
  EXPECT_EQ(StoredChunks(), 2u);
}

TEST_F(KnowledgeBaseTest, AnotherWorkerTakesOver) {
  Serve(2);
  for (const auto& p : cluster_->prefill) p->FailPublishes({grpc::StatusCode::UNAVAILABLE, "restarting"}, 1);
  EXPECT_EQ(Publish("b", {{"x", "text"}}).at("state"), "ready");
  EXPECT_EQ(cluster_->prefill[0]->counters().publishes + cluster_->prefill[1]->counters().publishes, 3);
  for (const auto& p : cluster_->prefill) p->FailPublishes({grpc::StatusCode::UNAVAILABLE, "restarting"}, 100);
  EXPECT_EQ(Call("POST", kBases, {{"name", "b"}, {"documents", Documents({{"x", "new"}})}}).status, 503);
}

// Contexts whose worker died are tried again while there is none, and then the publish fails.
TEST_F(KnowledgeBaseTest, WithoutAWorkerItIsTriedAgainAndFails) {
  Cluster().options.knowledge_bases.publisher.max_attempts = 8;
  Cluster().options.knowledge_bases.publisher.retry_backoff = std::chrono::milliseconds(100);
  Serve();
  Publish("b", {{"x", "old"}});
  cluster_->prefill[0]->HoldPublishes(true);
  TestResponse refused;
  std::thread publisher([&] {
    refused =
        Call("POST", kBases, {{"name", "b"}, {"documents", Documents({{"x", "new"}, {"y", "two"}, {"z", "three"}})}});
  });
  EXPECT_TRUE(cluster_->prefill[0]->WaitFor([](const auto& c) { return c.publishes == 3; }));
  cluster_->prefill[0]->Kill();
  publisher.join();
  EXPECT_EQ(refused.status, 503) << refused.body;
  EXPECT_THAT(refused.body, HasSubstr("no prefill worker takes a context"));
  const json shown = Ok("GET", std::string(kBases) + "/b");
  EXPECT_EQ(shown.at("current"), 1);
  EXPECT_EQ(shown.at("versions").at(1).at("state"), "failed");
}

// A router that died in the middle leaves a publishing version and perhaps chunks: both are collected.
TEST_F(KnowledgeBaseTest, AnAbandonedVersionIsFailedAndCollected) {
  Cluster().options.knowledge_bases.publisher.publisher_timeout = std::chrono::milliseconds(2'000);
  Serve();
  Publish("b", {{"x", "old"}});
  const chunk::Digest owner = NamespaceKeys().DeriveOwner({.name = "anonymous"});
  const auto records = std::move(chunk::RecordClient::Connect(store_address_)).value();
  const auto namespaces = std::move(chunk::NamespaceClient::Connect(store_address_)).value();
  const chunk::Digest half = NamespaceKeys().DeriveKnowledgeBase({.name = "anonymous"}, "b", 2);
  KbHead head = ParseKbHead(records->Get(owner, "kb/b", Soon())->value).value();
  KbVersion dead = head.versions[0];
  dead.version = head.next_version++;
  dead.state = KbState::kPublishing;
  dead.uid = "dead";
  dead.heartbeat_ms = static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
          .count());
  head.versions.push_back(dead);
  ASSERT_TRUE(records->Put(owner, "kb/b", ToJson(head), {}, Soon()).ok());
  ASSERT_TRUE(records->Put(owner, "kbv/b/2", ToJson(KbContent{.uid = "dead"}), {}, Soon()).ok());
  ASSERT_TRUE(namespaces->Create(half, {.name = "kbv/b/2"}, Soon()).ok());

  const json wanted = {{"name", "b"}, {"documents", Documents({{"x", "new"}})}};
  EXPECT_EQ(Call("POST", kBases, wanted).status, 409) << "it may still live";
  TestResponse published;
  for (const auto deadline = Soon(); std::chrono::steady_clock::now() < deadline && published.status != 200;) {
    published = Call("POST", kBases, wanted);
  }
  EXPECT_EQ(published.status, 200) << published.body;
  const json shown = Ok("GET", std::string(kBases) + "/b");
  ASSERT_EQ(shown.at("versions").size(), 2u);
  EXPECT_EQ(shown.at("versions").at(1).at("version"), 3);
  EXPECT_EQ(namespaces->Stat(half, Soon()).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(records->Get(owner, "kbv/b/2", Soon()).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(KnowledgeBaseTest, HeartbeatsKeepALongPublishAlive) {
  Cluster().options.knowledge_bases.publisher.publisher_timeout = std::chrono::milliseconds(1'000);
  Cluster().options.knowledge_bases.publisher.heartbeat = std::chrono::milliseconds(50);
  Serve();
  cluster_->prefill[0]->HoldPublishes(true);
  std::thread publisher([&] { EXPECT_EQ(Publish("b", {{"x", "text"}}).at("state"), "ready"); });
  ASSERT_TRUE(cluster_->prefill[0]->WaitFor([](const auto& c) { return c.publishes == 1; }));
  for (const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(1'500);
       std::chrono::steady_clock::now() < until;) {
    EXPECT_EQ(StateOf("b", 0), "publishing");
  }
  cluster_->prefill[0]->HoldPublishes(false);
  publisher.join();
}

TEST_F(KnowledgeBaseTest, StreamsProgressAndIsCancelledWithItsClient) {
  Cluster().options.knowledge_bases.publisher.context_tokens = 8;
  Serve();
  size_t contexts = 0;
  json body = {{"name", "b"},
               {"stream", true},
               {"documents", Documents({{"x", "one two three"}, {"y", "four five six"}, {"z", "seven eight nine"}})}};
  {
    HttpTestClient client(cluster_->http());
    client.SendRequest("POST", kBases, body.dump());
    EXPECT_EQ(client.ReadHead().headers.at("content-type"), "text/event-stream; charset=utf-8");
    std::vector<json> events;
    std::string last;
    while (auto event = client.NextEvent()) {
      last = *event;
      if (last != "[DONE]") events.push_back(json::parse(last));
    }
    EXPECT_EQ(last, "[DONE]");
    ASSERT_GT(events.size(), 3u);
    contexts = events.size() - 2;
    for (size_t i = 0; i <= contexts; ++i) {
      EXPECT_EQ(events[i].at("object"), "knowledge_base.progress");
      EXPECT_EQ(events[i].at("contexts_done"), i);
      EXPECT_EQ(events[i].at("contexts"), contexts);
    }
    EXPECT_EQ(events[contexts].at("tokens_done"), events[contexts].at("tokens"));
    EXPECT_EQ(events.back().at("state"), "ready");
  }
  cluster_->prefill[0]->HoldPublishes(true);
  HttpTestClient client(cluster_->http());
  client.SendRequest("POST", kBases, body.dump());
  ASSERT_EQ(client.ReadHead().status, 200);
  ASSERT_TRUE(
      cluster_->prefill[0]->WaitFor([&](const auto& c) { return c.publishes == static_cast<int>(contexts) + 2; }));
  client.Abort();
  EXPECT_TRUE(cluster_->prefill[0]->WaitFor([](const auto& c) { return c.publishes_cancelled == 2; }));
  const auto deadline = Soon();
  while (StateOf("b", 1) != "failed" && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  EXPECT_EQ(StateOf("b", 1), "failed");
  EXPECT_EQ(Ok("GET", std::string(kBases) + "/b").at("current"), 1);
}

TEST_F(KnowledgeBaseTest, AStoppingRouterEndsItsPublishes) {
  Serve();
  cluster_->prefill[0]->HoldPublishes(true);
  std::thread publisher([&] {
    const TestResponse response = Call("POST", kBases, {{"name", "b"}, {"documents", Documents({{"x", "text"}})}});
    EXPECT_TRUE(response.status == 503 || response.status == 0) << response.status << response.body;
  });
  ASSERT_TRUE(cluster_->prefill[0]->WaitFor([](const auto& c) { return c.publishes == 1; }));
  cluster_->router->Stop();
  publisher.join();
  const auto records = std::move(chunk::RecordClient::Connect(store_address_)).value();
  const auto record = records->Get(NamespaceKeys().DeriveOwner({.name = "anonymous"}), "kb/b", Soon());
  EXPECT_EQ(ParseKbHead(record->value)->versions.at(0).state, KbState::kFailed);
}

TEST_F(KnowledgeBaseTest, ServesOnWhileTheStoreIsAwayAndAfterItsRestart) {
  Serve();
  Publish("b", {{"x", "text"}});
  EXPECT_THAT(AskFor("b", "x"), HasSubstr("text"));
  store_.reset();
  for (const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(300);
       std::chrono::steady_clock::now() < until;) {
    EXPECT_THAT(AskFor("b", "x"), HasSubstr("text"));
  }
  EXPECT_EQ(Call("GET", kBases).status, 503);
  EXPECT_EQ(Call("POST", kCompletions, {{"prompt", json::array({Part("never-seen", "x")})}}).status, 503);
  StartStore();
  const auto deadline = Soon();
  while (Call("GET", kBases).status != 200 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  EXPECT_EQ(Ok("GET", std::string(kBases) + "/b").at("current"), 1);
  EXPECT_EQ(Publish("b", {{"x", "next"}}).at("version"), 2);
  EXPECT_THAT(AskFor("b", "x"), HasSubstr("next"));
}

// A version that is in use stays in memory, however many names that do not exist are asked for: it is served on while
// the store is away.
TEST_F(KnowledgeBaseTest, UnknownNamesEvictNoVersions) {
  Cluster().options.knowledge_bases.cache.max_entries = 8;
  Cluster().options.knowledge_bases.cache.max_unknown = 4;
  Serve();
  Publish("b", {{"x", "text"}});
  const std::string answer = AskFor("b", "x");
  for (int i = 0; i < 20; ++i) {
    const json body = {{"prompt", json::array({Part("unknown-" + std::to_string(i), "d")})}, {"max_tokens", 1}};
    EXPECT_EQ(Call("POST", kCompletions, body).status, 404);
  }
  store_.reset();
  EXPECT_EQ(AskFor("b", "x"), answer);
}

// A store that takes connections and answers nothing: only requests that need it wait, and those not for long.
TEST_F(KnowledgeBaseTest, AHungStoreHoldsUpOnlyThoseWhoNeedIt) {
  testing::TcpForwarder link(store_address_);
  store_address_ = link.address();
  Cluster().options.knowledge_bases.store_timeout = std::chrono::milliseconds(2'000);
  Serve();
  Publish("known", {{"d", "a text"}});
  const std::string answer = AskFor("known", "d");
  link.Drop();
  constexpr int kWaiting = 30;
  std::vector<std::unique_ptr<HttpTestClient>> clients;
  for (int i = 0; i < kWaiting; ++i) {
    const json body = {{"prompt", json::array({Part("unknown-" + std::to_string(i), "d")})}, {"max_tokens", 1}};
    clients.push_back(std::make_unique<HttpTestClient>(cluster_->http()));
    clients.back()->SendRequest("POST", kCompletions, body.dump());
  }
  std::atomic<int> num_answered{0};
  std::vector<int> statuses(kWaiting);
  std::vector<std::thread> readers;
  for (int i = 0; i < kWaiting; ++i) {
    readers.emplace_back([&, i] {
      statuses[i] = clients[i]->Read().status;
      ++num_answered;
    });
  }
  // One plain completion takes the turn of every parse thread: with the others in front of it, most would be over.
  for (int i = 0; i < 4; ++i) (void)Ask(json::array({{{"type", "text"}, {"text", "plain"}}}), 1);
  EXPECT_EQ(AskFor("known", "d"), answer) << "the version that is known is served on";
  EXPECT_EQ(Call("POST", "/tokenize", {{"prompt", "plain"}}).status, 200);
  EXPECT_EQ(num_answered, 0) << "nobody who waits for the store has an answer yet";
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(statuses, std::vector<int>(kWaiting, 503));
  // It is remembered: the next one is not asked for, and known after the store is back.
  const json unknown = {{"prompt", json::array({Part("unknown-0", "d")})}, {"max_tokens", 1}};
  EXPECT_EQ(Call("POST", kCompletions, unknown).status, 503);
  EXPECT_EQ(AskFor("known", "d"), answer);
  link.Mend();
  EXPECT_TRUE(test::Eventually([&] { return Call("POST", kCompletions, unknown).status == 404; }));
}

// One caller's requests wait for the store; another's are looked up meanwhile.
TEST(KbLookupsTest, OneCallerHasHalfOfTheThreads) {
  constexpr chunk::Digest kMany{1}, kOne{2};
  std::mutex mutex;
  std::condition_variable changed;
  int num_begun = 0, num_done = 0;
  bool open = false, other_ran = false;
  {
    KbLookups lookups(4, 8);
    const auto wait = [&] {
      std::unique_lock lock(mutex);
      ++num_begun;
      changed.notify_all();
      changed.wait_for(lock, testing::kLongWait, [&] { return open; });
      ++num_done;
    };
    const auto begun = [&](int count) {
      std::unique_lock lock(mutex);
      return changed.wait_for(lock, testing::kLongWait, [&] { return num_begun == count; });
    };
    EXPECT_TRUE(lookups.TryPost(kMany, wait));
    EXPECT_TRUE(lookups.TryPost(kMany, wait));
    ASSERT_TRUE(begun(2));
    for (int i = 0; i < 8; ++i) EXPECT_TRUE(lookups.TryPost(kMany, wait));
    EXPECT_FALSE(lookups.TryPost(kMany, wait)) << "more of one caller are refused";
    EXPECT_TRUE(lookups.TryPost(kOne, [&] {
      std::lock_guard lock(mutex);
      other_ran = true;
      changed.notify_all();
    }));
    {
      std::unique_lock lock(mutex);
      EXPECT_TRUE(changed.wait_for(lock, testing::kLongWait, [&] { return other_ran; }));
      EXPECT_EQ(num_begun, 2) << "half of the threads";
      open = true;
      changed.notify_all();
    }
    lookups.Stop();
    EXPECT_FALSE(lookups.TryPost(kOne, [] {}));
  }
  EXPECT_EQ(num_done, 10) << "what waited ran";
}

TEST_F(KnowledgeBaseTest, AnotherRouterFollows) {
  Serve();
  Publish("b", {{"x", "one"}});
  FakeCluster other(1, 1, store_address_);
  other.options.knowledge_bases.cache.poll_interval = std::chrono::milliseconds(50);
  other.StartRouter();
  const auto ask_other = [&] {
    const json body = {{"prompt", json::array({Part("b", "x")})}, {"max_tokens", 12}, {"add_special_tokens", false}};
    const TestResponse response = testing::Call(other.http(), "POST", kCompletions, body.dump());
    return json::parse(response.body).value(json::json_pointer("/choices/0/text"), response.body);
  };
  const auto ask_until = [&](const char* wanted) {
    const auto deadline = Soon();
    std::string answer;
    while (answer.find(wanted) == std::string::npos && std::chrono::steady_clock::now() < deadline)
      answer = ask_other();
    return answer;
  };
  EXPECT_THAT(ask_other(), HasSubstr("one"));
  Publish("b", {{"x", "two"}});
  EXPECT_THAT(ask_until("two"), HasSubstr("two"));
  Ok("DELETE", std::string(kBases) + "/b");
  EXPECT_THAT(ask_until("knowledge_base_not_found"), HasSubstr("knowledge_base_not_found"));
}

TEST_F(KnowledgeBaseTest, BadInput) {
  Serve();
  Publish("b", {{"x", "text"}});
  const json documents = Documents({{"x", "text"}});
  struct Case {
    const char* method;
    std::string path;
    std::string body;
    int status;
    const char* expected;  // in the answer
  };
  const std::string base = std::string(kBases) + "/b";
  for (const Case& c : std::vector<Case>{
           {"POST", kBases, "", 400, "JSON"},
           {"POST", kBases, "[]", 400, "object"},
           {"POST", kBases, R"({"name":"n"})", 400, "\"param\":\"documents\""},
           {"POST", kBases, R"({"name":"n","documents":{}})", 400, "\"param\":\"documents\""},
           {"POST", kBases, R"({"name":"n","documents":[]})", 400, "\"param\":\"documents\""},
           {"POST", kBases, R"({"name":"n","documents":[1]})", 400, "documents[0]"},
           {"POST", kBases, R"({"name":"n","documents":[{"text":"t"}]})", 400, "\"param\":\"documents[0].id\""},
           {"POST", kBases, R"({"name":"n","documents":[{"id":"i"}]})", 400, "\"param\":\"documents[0].text\""},
           {"POST", kBases, R"({"name":"n","documents":[{"id":"i","text":"t","x":1}]})", 400, "documents[0].x"},
           {"POST", kBases, R"({"name":"n","documents":[{"id":"i","text":"t"},{"id":"i","text":"u"}]})", 400,
            "\"param\":\"documents[1].id\""},
           {"POST", kBases, json({{"name", "a/b"}, {"documents", documents}}).dump(), 400, "\"param\":\"name\""},
           {"POST", kBases, json({{"name", ""}, {"documents", documents}}).dump(), 400, "\"param\":\"name\""},
           {"POST", kBases, json({{"name", "n"}, {"documents", documents}, {"swop", true}}).dump(), 400, "swop"},
           {"POST", kBases, json({{"name", "n"}, {"documents", documents}, {"swap", 1}}).dump(), 400, "swap"},
           {"POST", kBases, json({{"name", "n"}, {"documents", documents}, {"instruction", 1}}).dump(), 400,
            "instruction"},
           {"GET", std::string(kBases) + "/none", "", 404, "knowledge_base_not_found"},
           {"GET", std::string(kBases) + "/%zz", "", 400, "percent"},
           {"GET", std::string(kBases) + "/%2e%2e", "", 400, "\"param\":\"name\""},
           {"GET", base + "?version=0", "", 400, "\"param\":\"version\""},
           {"GET", base + "?version=1x", "", 400, "\"param\":\"version\""},
           {"GET", base + "?version=7", "", 404, "version_not_found"},
           {"GET", base + "?v=1", "", 400, "\"param\":\"v\""},
           {"GET", base + "/diff?from=1&to=9", "", 404, "version_not_found"},
           {"GET", base + "/diff", "", 409, "no_previous_version"},
           {"POST", base + "/swap", "{}", 400, "\"param\":\"version\""},
           {"POST", base + "/swap", R"({"version":-1})", 400, "version"},
           {"POST", base + "/swap", R"({"version":99999999999999999999})", 400, "version"},
           {"DELETE", base + "/versions/zero", "", 400, "\"param\":\"version\""},
           {"DELETE", base + "/versions/9", "", 404, "version_not_found"},
           {"DELETE", std::string(kBases) + "/none", "", 404, "knowledge_base_not_found"},
           {"PUT", base, "", 405, "GET, DELETE"},
           {"GET", base + "/swap", "", 405, "POST"},
           {"GET", "/admin/v1/", "", 404, "unknown_url"},
           {"GET", base + "/", "", 404, "unknown_url"},
           {"POST", kNamespaces, R"({"name":""})", 400, "\"param\":\"name\""},
           {"POST", kNamespaces, R"({"name":"n","quota_bytes":-1})", 400, "quota_bytes"},
           {"POST", kNamespaces, R"({"name":"n","ttl_seconds":99999999999})", 400, "ttl_seconds"},
           {"GET", std::string(kNamespaces) + "/none", "", 404, "namespace_not_found"},
           {"PATCH", std::string(kNamespaces) + "/none", "{}", 404, "namespace_not_found"},
           {"PATCH", std::string(kNamespaces) + "/none", R"({"name":"m"})", 400, "name"},
           {"DELETE", std::string(kNamespaces) + "/none", "", 404, "namespace_not_found"},
           {"POST", kCompletions, R"({"prompt":[{"type":"segment","knowledge_base":"a/b","document":"x"}]})", 400,
            "\"param\":\"prompt[0].knowledge_base\""},
           {"POST", kCompletions,
            R"({"prompt":[1,2,3],"splice":{"segments":[{"begin":0,"end":2,"knowledge_base":"none"}]}})", 404,
            "splice.segments[0].knowledge_base"},
           {"POST", "/tokenize",
            R"({"messages":[{"role":"user","content":[{"type":"segment","knowledge_base":"b","document":"z"}]}]})", 404,
            "document_not_found"}}) {
    const TestResponse response = testing::Call(cluster_->http(), c.method, c.path, c.body);
    EXPECT_EQ(response.status, c.status) << c.method << " " << c.path << " " << c.body << ": " << response.body;
    EXPECT_THAT(response.body, HasSubstr(c.expected)) << c.method << " " << c.path << " " << c.body;
    EXPECT_TRUE(json::parse(response.body, nullptr, false).contains("error")) << response.body;
  }
  EXPECT_EQ(Ok("GET", kBases).at("data").size(), 1u) << "nothing was made by accident";
}

TEST_F(KnowledgeBaseTest, NamespacesOfTheCaller) {
  Serve();
  const json made = Ok("POST", kNamespaces, {{"name", "my docs/1"}, {"quota_bytes", 1'000'000}, {"ttl_seconds", 60}});
  EXPECT_EQ(made.at("implicit"), false);
  const TestResponse twice = Call("POST", kNamespaces, {{"name", "my docs/1"}});
  EXPECT_EQ(twice.status, 409);
  EXPECT_EQ(ErrorCode(twice), "namespace_exists");
  const std::string path = std::string(kNamespaces) + "/my%20docs%2F1";
  const json changed = Ok("PATCH", path, {{"quota_bytes", 5}});
  EXPECT_EQ(changed.at("quota_bytes"), 5);
  EXPECT_EQ(changed.at("ttl_seconds"), 60) << "what is not named stays";
  EXPECT_EQ(changed.at("public"), false);
  const TestResponse published = Call("PATCH", path, {{"public", true}});
  EXPECT_EQ(published.status, 400) << "that is decided by the name";
  EXPECT_THAT(published.body, HasSubstr("public/"));
  EXPECT_EQ(Ok("GET", path).at("name"), "my docs/1");
  EXPECT_EQ(Ok("GET", kNamespaces).at("data").at(0), Ok("GET", path));
  // It is the one that requests name.
  const auto namespaces = std::move(chunk::NamespaceClient::Connect(store_address_)).value();
  EXPECT_TRUE(namespaces->Stat(NamespaceKeys().Derive({.name = "anonymous"}, "my docs/1"), Soon()).ok());
  EXPECT_EQ(Ok("DELETE", path).at("deleted"), true);
  EXPECT_EQ(Call("GET", path).status, 404);
}

TEST(KnowledgeBase, WithoutAStoreEverythingNamesTheFlag) {
  FakeCluster cluster(1, 1);
  cluster.StartRouter();
  const std::string publish = json({{"name", "b"}, {"documents", Documents({{"x", "t"}})}}).dump();
  const std::string ask = R"({"prompt":[{"type":"segment","knowledge_base":"b","document":"x"}]})";
  for (const auto& [method, path, body] :
       std::vector<std::tuple<std::string, std::string, std::string>>{{"GET", kBases, ""},
                                                                      {"POST", kBases, publish},
                                                                      {"GET", std::string(kBases) + "/b", ""},
                                                                      {"POST", std::string(kBases) + "/b/rollback", ""},
                                                                      {"DELETE", std::string(kBases) + "/b", ""},
                                                                      {"GET", kNamespaces, ""},
                                                                      {"POST", kCompletions, ask}}) {
    const TestResponse response = testing::Call(cluster.http(), method, path, body);
    EXPECT_EQ(response.status, 503) << path;
    EXPECT_THAT(response.body, HasSubstr("--store")) << path;
  }
}

// A store without a disk keeps a knowledge base only when asked to.
TEST(KnowledgeBase, InMemoryOnlyWhenAskedTo) {
  kvstore::KvStoreOptions options;
  options.metrics_listen = "";
  const auto store = std::move(kvstore::KvStoreServer::Start(options)).value();
  FakeCluster cluster(1, 1, store->grpc_address());
  cluster.StartRouter();
  json body = {{"name", "b"}, {"documents", Documents({{"x", "t"}})}};
  const TestResponse refused = testing::Call(cluster.http(), "POST", kBases, body.dump());
  EXPECT_EQ(refused.status, 503) << refused.body;
  EXPECT_THAT(refused.body, HasSubstr("--data-dir"));
  body["durable"] = false;
  const TestResponse taken = testing::Call(cluster.http(), "POST", kBases, body.dump());
  EXPECT_EQ(taken.status, 200) << taken.body;
  EXPECT_EQ(testing::Call(cluster.http(), "DELETE", std::string(kBases) + "/b").status, 200);
  cluster.router->Stop();
}

}  // namespace
}  // namespace spl::router
