// Knowledge bases through the real programs: what is published is what requests hit, versions change under requests,
// what is deleted is gone, and what is durable outlives the store.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/cluster/processes.h"
#include "tests/support/paths.h"

namespace spl::test {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

constexpr char kBases[] = "/admin/v1/knowledge_bases";

// About ten tokens a sentence; every document is several chunks long, and no two begin alike.
std::string Document(int number, const std::string& cargo) {
  std::string text = "Document " + std::to_string(number) + ".";
  for (int i = 0; i < 12; ++i) {
    text += " Ship " + std::to_string(100 * number + i) + " carries " + cargo + " and left on day " +
            std::to_string(7 * number + i) + ".";
  }
  return text;
}

json Documents(const std::string& cargo) {
  json documents = json::array();
  for (int i = 0; i < 5; ++i) {
    documents.push_back({{"id", "doc-" + std::to_string(i)}, {"text", Document(i, cargo)}});
  }
  return documents;
}

class KnowledgeBaseClusterTest : public ::testing::Test {
 protected:
  void SetUp() override {
    data_dir_ = std::filesystem::path(::testing::TempDir()) / ("splice-kb-" + std::to_string(::getpid()));
    std::filesystem::remove_all(data_dir_);
    std::filesystem::create_directories(data_dir_);
    ClusterConfig config{.model_dir = kTinyModel, .data_dir = (data_dir_ / "store").string()};
    cluster_ = ProcessCluster::Start(config);
    ASSERT_NE(cluster_, nullptr);
  }
  void TearDown() override {
    cluster_.reset();
    std::filesystem::remove_all(data_dir_);
  }

  HttpReply Call(const std::string& method, const std::string& path, const json& body = nullptr) {
    return HttpCall(cluster_->http(), method, path, body.is_null() ? "" : body.dump());
  }
  json Ok(const std::string& method, const std::string& path, const json& body = nullptr) {
    const HttpReply reply = Call(method, path, body);
    EXPECT_EQ(reply.status, 200) << method << " " << path << ": " << reply.body;
    return json::parse(reply.body, nullptr, false);
  }
  json Publish(const std::string& cargo, bool swap = true) {
    return Ok("POST", kBases,
              {{"name", "ships"},
               {"instruction", "Answer from the documents."},
               {"documents", Documents(cargo)},
               {"swap", swap}});
  }
  // Documents in another order than they were published in, so that none stands where it was computed.
  json Ask(const std::string& reuse = "sparsex") {
    json parts = json::array({{{"type", "text"}, {"text", "Read this.\n"}}});
    for (const int i : {3, 1}) {
      parts.push_back({{"type", "segment"}, {"knowledge_base", "ships"}, {"document", "doc-" + std::to_string(i)}});
    }
    parts.push_back({{"type", "text"}, {"text", "\nWhat does ship 105 carry?"}});
    return Ok("POST", "/v1/completions",
              {{"prompt", parts}, {"max_tokens", 4}, {"temperature", 0}, {"splice", {{"reuse", reuse}}}});
  }
  static uint64_t Tokens(const json& answer, const char* kind) {
    return answer.at("splice").at("tokens").at(kind).get<uint64_t>();
  }
  double StoredChunks() {
    return MetricValue(HttpGet(cluster_->store->ready("metrics"), "/metrics").body, "splice_store_chunks");
  }

  std::filesystem::path data_dir_;
  std::unique_ptr<ProcessCluster> cluster_;
};

TEST_F(KnowledgeBaseClusterTest, PublishedDocumentsAreAligned) {
  const json version = Publish("tea");
  EXPECT_EQ(version.at("state"), "ready");
  EXPECT_GT(version.at("chunks"), 10);
  const json shown = Ok("GET", std::string(kBases) + "/ships");
  const uint64_t expected = shown.at("documents").at(3).at("tokens").get<uint64_t>() +
                            shown.at("documents").at(1).at("tokens").get<uint64_t>();
  const json answer = Ask();
  EXPECT_EQ(Tokens(answer, "aligned"), expected) << answer.dump();
  EXPECT_EQ(answer.at("splice").at("exact"), false);
  EXPECT_EQ(answer.at("splice").at("knowledge_bases").at("ships"), 1);
  const json exact = Ask("exact");
  EXPECT_EQ(Tokens(exact, "aligned"), 0u);
  EXPECT_EQ(exact.at("splice").at("exact"), true);
}

TEST_F(KnowledgeBaseClusterTest, SwapRollbackDelete) {
  Publish("tea");
  const json second = Publish("salt", false);
  const std::string base = std::string(kBases) + "/ships";
  EXPECT_EQ(Ask().at("splice").at("knowledge_bases").at("ships"), 1);
  EXPECT_EQ(Ok("GET", base + "/diff?from=1&to=2").at("changed").size(), 5u);
  Ok("POST", base + "/swap", {{"version", 2}});
  const json swapped = Ask();
  EXPECT_EQ(swapped.at("splice").at("knowledge_bases").at("ships"), 2);
  EXPECT_GT(Tokens(swapped, "aligned"), 200u) << "the version was ready when it became current";
  EXPECT_EQ(Ok("POST", base + "/rollback").at("current"), 1);
  EXPECT_EQ(Ask().at("splice").at("knowledge_bases").at("ships"), 1);
  const double before = StoredChunks();
  const json gone = Ok("DELETE", base + "/versions/2");
  EXPECT_GT(gone.at("chunks"), 10);
  EXPECT_EQ(gone.at("kv_bytes"), second.at("bytes"));
  EXPECT_GT(gone.at("bytes"), gone.at("kv_bytes")) << "summaries and four-bit copies";
  EXPECT_LT(StoredChunks(), before);
  Ok("DELETE", base);
  const HttpReply missing =
      Call("POST", "/v1/completions",
           {{"prompt", json::array({{{"type", "segment"}, {"knowledge_base", "ships"}, {"document", "doc-1"}}})}});
  EXPECT_EQ(missing.status, 404);
  EXPECT_THAT(missing.body, HasSubstr("knowledge_base_not_found"));
}

// The store is killed, and with it every worker's memory of the documents: they come back from its disk.
TEST_F(KnowledgeBaseClusterTest, OutlivesTheStoreAndTheWorkers) {
  Publish("tea");
  const uint64_t aligned = Tokens(Ask(), "aligned");
  const std::string store_address = cluster_->store->ready("grpc");
  cluster_->store->Signal(SIGKILL);
  EXPECT_EQ(cluster_->store->WaitForExit(), 128 + SIGKILL);
  EXPECT_EQ(Ask().at("choices").size(), 1u) << "what the router and the worker know is served on";
  cluster_->store =
      Process::StartAndWaitReady({BinDir() + "/splice-kvstore", "--listen", store_address, "--metrics-listen",
                                  "127.0.0.1:0", "--data-dir", (data_dir_ / "store").string()});
  ASSERT_NE(cluster_->store, nullptr);
  const std::string prefill_address = cluster_->prefill[0]->ready("grpc");
  cluster_->prefill[0]->Signal(SIGKILL);
  EXPECT_EQ(cluster_->prefill[0]->WaitForExit(), 128 + SIGKILL);
  cluster_->prefill[0] = Process::StartAndWaitReady(
      {BinDir() + "/splice-prefill", "--model", kTinyModel, "--listen", prefill_address, "--store", store_address,
       "--fetch", "always"});  // the first prompt may compute faster than the store is connected
  ASSERT_NE(cluster_->prefill[0], nullptr);
  ASSERT_TRUE(cluster_->WaitReady());
  const json again = Ask();
  EXPECT_EQ(Tokens(again, "aligned"), aligned) << again.dump();
  EXPECT_GT(again.at("splice").at("bytes").at("fetched"), 0);
  EXPECT_EQ(Ok("GET", std::string(kBases) + "/ships").at("current"), 1);
}

TEST_F(KnowledgeBaseClusterTest, TheCommandLine) {
  const std::string file = (data_dir_ / "documents.jsonl").string();
  {
    std::ofstream out(file);
    for (const json& document : Documents("tea")) out << document.dump() << "\n";
  }
  const std::string url = "http://" + cluster_->http();
  const auto splice = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), BinDir() + "/splice");
    arguments.insert(arguments.end(), {"--url", url});
    return Process::Run(arguments);
  };
  const auto published = splice({"kb", "publish", "ships", "--documents", file, "--instruction", "Read."});
  EXPECT_EQ(published.exit_code, 0) << published.err;
  EXPECT_THAT(published.out, HasSubstr("version 1 is ready and current"));
  EXPECT_THAT(splice({"kb", "show", "ships"}).out, HasSubstr("doc-4"));
  EXPECT_EQ(json::parse(splice({"kb", "list", "--json"}).out).at("data").size(), 1u);
  const auto missing = splice({"kb", "rollback", "ships"});
  EXPECT_EQ(missing.exit_code, 1);
  EXPECT_THAT(missing.err, HasSubstr("409"));
  EXPECT_EQ(splice({"kb", "swap", "ships", "none"}).exit_code, 2);
  EXPECT_EQ(splice({"ctl", "namespaces", "create", "docs", "--quota", "1GiB"}).exit_code, 0);
  EXPECT_THAT(splice({"ctl", "namespaces", "list"}).out, HasSubstr("docs"));
  EXPECT_EQ(splice({"kb", "delete", "ships"}).exit_code, 0);
  EXPECT_EQ(splice({"kb", "show", "ships"}).exit_code, 1);
}

}  // namespace
}  // namespace spl::test
