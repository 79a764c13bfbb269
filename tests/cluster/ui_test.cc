// The router's page in a real browser, over a real cluster of four programs: what its sections say. Skipped where there
// is no headless Chromium. ui_browser_test.py uses the page as a person does.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/cluster/processes.h"
#include "tests/support/eventually.h"
#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"

namespace spl::test {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kBrowser[] = "/usr/bin/chromium-headless-shell";

size_t Count(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++count;
  return count;
}

class UiTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(kBrowser)) GTEST_SKIP() << kBrowser << " is not installed";
  }
  // The elements of a section once the page's scripts have run for two of its rounds; no complaint on the console.
  std::string Dom(const std::string& address, const std::string& section = "overview") {
    const std::string profile = dir_.path() + "/browser";
    std::vector<std::string> argv = {kBrowser,
                                     "--no-sandbox",  // tests run as root in containers
                                     "--disable-gpu",
                                     "--disable-dev-shm-usage",
                                     "--user-data-dir=" + profile,
                                     "--enable-logging=stderr",
                                     "--virtual-time-budget=5000"};
    argv.insert(argv.end(), {"--dump-dom", "http://" + address + "/ui#" + section});
    const auto run = Process::Run(argv);
    EXPECT_EQ(run.exit_code, 0) << run.err;
    EXPECT_THAT(run.err, Not(HasSubstr("Uncaught"))) << run.err;
    EXPECT_THAT(run.err, Not(HasSubstr("Refused to"))) << "what its own content security policy forbids: " << run.err;
    return run.out;
  }

  testing::TempDir dir_;
};

TEST_F(UiTest, ShowsTheFleetRequestsReuseAndHeads) {
  auto cluster = ProcessCluster::Start({.model_dir = kTinyModel,
                                        .prefill_flags = {"--worker-id", "one-prefill", "--kv-bytes", "128MiB"},
                                        .decode_flags = {"--worker-id", "one-decode", "--kv-bytes", "128MiB"}});
  ASSERT_NE(cluster, nullptr);
  std::string page = Dom(cluster->http());
  EXPECT_THAT(page, HasSubstr("splice-tiny"));
  EXPECT_THAT(page, HasSubstr("no prompt yet"));
  std::string prompt;
  for (int i = 0; i < 40; ++i) prompt += "Ship " + std::to_string(i) + " left port " + std::to_string(i % 7) + ". ";
  double cached = 0, tokens = 0;
  for (const char* id : {"first-of-two", "second-of-two"}) {
    const json body = {{"model", "splice-tiny"}, {"prompt", prompt}, {"max_tokens", 2}, {"temperature", 0}};
    const HttpReply reply = HttpPost(cluster->http(), "/v1/completions", body.dump(), {{"x-request-id", id}});
    ASSERT_EQ(reply.status, 200) << reply.body;
    const json usage = json::parse(reply.body)["usage"];
    cached += usage["prompt_tokens_details"]["cached_tokens"].get<double>();
    tokens += usage["prompt_tokens"].get<double>();
  }
  ASSERT_GT(cached, 64);
  page = Dom(cluster->http(), "requests");
  for (const char* text : {"first-of-two", "second-of-two", "one-prefill → one-decode", ">OK<", ">exact<", ">dense<"})
    EXPECT_THAT(page, HasSubstr(text));
  page = Dom(cluster->http(), "workers");
  for (const char* text : {"one-prefill", "one-decode", ">Drain<"}) EXPECT_THAT(page, HasSubstr(text));
  page = Dom(cluster->http());
  EXPECT_THAT(page, HasSubstr("class=\"pill good\">ready<"));
  EXPECT_THAT(page, HasSubstr("id=\"chart-ttft\""));
  char share[64];
  std::snprintf(share, sizeof share, "%.1f", 100 * cached / tokens);
  EXPECT_THAT(page, HasSubstr(std::string(share) + " % reused as prefixes"));
  // The map that is in the model's folder, but for the first layers, which decoding keeps whole.
  std::ifstream file(std::string(kTinyModel) + "/head_classes.json");
  const json written = json::parse(file), &map = written["class"];
  const auto dense_layers = written.value("dense_layers", size_t{2});
  size_t locals = 0, heads = 0;
  for (size_t layer = 0; layer < map.size(); ++layer) {
    for (const json& kind : map[layer]) locals += layer >= dense_layers && kind == "local";
    heads += map[layer].size();
  }
  EXPECT_EQ(Count(page, "class=\"l\""), locals);
  EXPECT_EQ(Count(page, "class=\"g\""), heads - locals);
}

TEST_F(UiTest, AsksForAnOperatorsKey) {
  const std::string keys = dir_.path() + "/keys";
  std::ofstream(keys) << "key-of-a-tenant alice\nkey-of-an-operator root role=operator\n";
  auto cluster = ProcessCluster::Start({.model_dir = kTinyModel, .router_flags = {"--api-keys", keys}});
  ASSERT_NE(cluster, nullptr);
  const std::string page = Dom(cluster->http());
  EXPECT_THAT(page, HasSubstr("<form id=\"ask\">")) << "not hidden any more";
  EXPECT_THAT(page, Not(HasSubstr("splice-tiny")));
}

}  // namespace
}  // namespace spl::test
