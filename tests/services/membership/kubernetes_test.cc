// Against an API server that speaks list and watch over TLS (tests/support/kubernetes_api.h).
#include "services/membership/kubernetes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "services/membership/endpoint_slices.h"
#include "tests/services/membership/watcher.h"
#include "tests/support/eventually.h"
#include "tests/support/kubernetes_api.h"
#include "tests/support/temp_dir.h"

namespace spl::membership {
namespace {

using nlohmann::json;
using spl::testing::KubernetesApi;
using namespace std::chrono_literals;
using ::testing::ElementsAre;

json Endpoint(const std::string& address, const std::string& pod, bool terminating = false) {
  return {{"addresses", json::array({address})},
          {"conditions", {{"ready", !terminating}, {"serving", true}, {"terminating", terminating}}},
          {"targetRef", {{"kind", "Pod"}, {"name", pod}}}};
}

json Slice(const std::string& name, const std::string& service, unsigned port, std::vector<json> endpoints,
           const std::string& type = "IPv4") {
  return {{"apiVersion", "discovery.k8s.io/v1"},
          {"kind", "EndpointSlice"},
          {"metadata", {{"name", name}, {"labels", {{"kubernetes.io/service-name", service}}}}},
          {"addressType", type},
          {"endpoints", endpoints},
          {"ports", json::array({json{{"name", "grpc"}, {"port", port}, {"protocol", "TCP"}}})}};
}

std::vector<std::string> Addresses(const Members& members) {
  std::vector<std::string> addresses;
  for (const Member& member : members) addresses.push_back(std::string(RoleName(member.role)) + " " + member.address);
  return addresses;
}

TEST(EndpointSlicesTest, EndpointsAreMembersUntilTheyTerminate) {
  EndpointSlices slices("splice", "grpc");
  ASSERT_TRUE(
      slices
          .Put(Slice("a", "splice-decode", 7102,
                     {Endpoint("10.0.0.2", "d1"), Endpoint("10.0.0.1", "d0"), Endpoint("10.0.0.3", "d2", true)}))
          .ok());
  ASSERT_TRUE(slices.Put(Slice("b", "splice-prefill", 7101, {Endpoint("10.0.1.1", "p0")})).ok());
  EXPECT_THAT(Addresses(slices.members()),
              ElementsAre("prefill 10.0.1.1:7101", "decode 10.0.0.1:7102", "decode 10.0.0.2:7102"));
  // The same pods by their other address are the same members.
  ASSERT_TRUE(
      slices.Put(Slice("c", "splice-decode", 7102, {Endpoint("fd00::1", "d0"), Endpoint("fd00::9", "d9")}, "IPv6"))
          .ok());
  EXPECT_THAT(Addresses(slices.members()), ElementsAre("prefill 10.0.1.1:7101", "decode 10.0.0.1:7102",
                                                       "decode 10.0.0.2:7102", "decode [fd00::9]:7102"));
  slices.Remove(Slice("a", "splice-decode", 7102, {}));
  EXPECT_THAT(Addresses(slices.members()),
              ElementsAre("prefill 10.0.1.1:7101", "decode [fd00::1]:7102", "decode [fd00::9]:7102"));
}

TEST(EndpointSlicesTest, WhatIsNoSliceOfTheServiceCountsAsEmpty) {
  EndpointSlices slices("splice", "grpc");
  ASSERT_TRUE(slices.Put(Slice("a", "splice-decode", 7102, {Endpoint("10.0.0.1", "d0")})).ok());
  json no_port = Slice("a", "splice-decode", 7102, {Endpoint("10.0.0.1", "d0")});
  no_port["ports"][0]["name"] = "http";
  EXPECT_FALSE(slices.Put(no_port).ok());
  EXPECT_TRUE(slices.members().empty());
  for (const json& bad : {json(5), json::object(), json{{"metadata", 5}}, json::parse(R"({"metadata": {"name": [1]}})"),
                          Slice("x", "other-decode", 1, {Endpoint("10.0.0.1", "d0")})})
    EXPECT_FALSE(slices.Put(bad).ok()) << bad;
  json odd = Slice("y", "splice-decode", 7102, {});
  odd["endpoints"] = json::parse(R"([5, {"addresses": 5}, {"addresses": [5]}, {"addresses": []}])");
  EXPECT_TRUE(slices.Put(odd).ok());
  EXPECT_TRUE(slices.members().empty());
}

class KubernetesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    options_ = {.api_server = api_.address(),
                .token_file = dir_.path() + "/token",
                .ca_file = dir_.path() + "/ca.crt",
                .name_space = "prod",
                .service = "splice",
                .call_timeout = 5s,
                .retry_pause = 50ms};
  }
  void Start() {
    auto made = MakeKubernetesDiscovery(options_);
    ASSERT_TRUE(made.ok()) << made.status();
    discovery_ = *std::move(made);
    discovery_->Start(watcher_.callback());
  }

  spl::testing::TempDir dir_;
  KubernetesApi api_{dir_.path()};
  KubernetesOptions options_;
  Watcher watcher_;
  std::unique_ptr<Discovery> discovery_;
};

TEST_F(KubernetesTest, FollowsTheSlices) {
  api_.Put(Slice("d", "splice-decode", 7102, {Endpoint("10.0.0.1", "d0")}));
  api_.Put(Slice("p", "splice-prefill", 7101, {Endpoint("10.0.1.1", "p0")}));
  api_.Put(Slice("s", "splice-store", 7103, {Endpoint("10.0.2.1", "s0")}));
  Start();
  ASSERT_TRUE(watcher_.WaitForSize(2));
  EXPECT_THAT(Addresses(watcher_.members()), ElementsAre("prefill 10.0.1.1:7101", "decode 10.0.0.1:7102"));
  EXPECT_EQ(api_.counters().last_target.rfind("/apis/discovery.k8s.io/v1/namespaces/prod/endpointslices?", 0), 0u);
  ASSERT_TRUE(spl::test::Eventually([&] { return api_.counters().watches == 1; }));
  api_.Put(Slice("d", "splice-decode", 7102, {Endpoint("10.0.0.1", "d0"), Endpoint("10.0.0.2", "d1")}));
  ASSERT_TRUE(watcher_.WaitForSize(3));
  api_.Put(Slice("d", "splice-decode", 7102, {Endpoint("10.0.0.1", "d0", true), Endpoint("10.0.0.2", "d1")}));
  ASSERT_TRUE(watcher_.WaitForSize(2));
  api_.Remove("p");
  ASSERT_TRUE(watcher_.WaitForSize(1));
  EXPECT_THAT(Addresses(watcher_.members()), ElementsAre("decode 10.0.0.2:7102"));
}

TEST_F(KubernetesTest, ABrokenWatchGoesOnWhereItWas) {
  api_.Put(Slice("d", "splice-decode", 7102, {Endpoint("10.0.0.1", "d0")}));
  Start();
  ASSERT_TRUE(spl::test::Eventually([&] { return api_.counters().watches == 1; }));
  ASSERT_TRUE(watcher_.WaitForSize(1));
  const int lists = api_.counters().lists;
  api_.CutWatches();
  api_.Put(Slice("e", "splice-decode", 7102, {Endpoint("10.0.0.2", "d1")}));
  ASSERT_TRUE(watcher_.WaitForSize(2));
  EXPECT_EQ(api_.counters().lists, lists);
}

TEST_F(KubernetesTest, AVersionThatIsGoneIsListedAnew) {
  api_.Put(Slice("d", "splice-decode", 7102, {Endpoint("10.0.0.1", "d0")}));
  Start();
  ASSERT_TRUE(spl::test::Eventually([&] { return api_.counters().watches == 1; }));
  options_.retry_pause = 1s;
  api_.CutWatches();
  api_.Put(Slice("e", "splice-decode", 7102, {Endpoint("10.0.0.2", "d1")}));
  api_.Remove("d");
  api_.ForgetHistory();
  ASSERT_TRUE(watcher_.WaitFor([](const Members& m) { return m.size() == 1 && m[0].address == "10.0.0.2:7102"; }));
}

TEST_F(KubernetesTest, TheTokenIsReadAgain) {
  api_.Put(Slice("d", "splice-decode", 7102, {Endpoint("10.0.0.1", "d0")}));
  Start();
  ASSERT_TRUE(watcher_.WaitForSize(1));
  api_.SetToken("second-token");
  api_.CutWatches();
  api_.Put(Slice("e", "splice-decode", 7102, {Endpoint("10.0.0.2", "d1")}));
  ASSERT_TRUE(watcher_.WaitForSize(2));
  // One that it does not take changes nothing.
  std::ofstream(dir_.path() + "/token") << "stolen";
  api_.CutWatches();
  ASSERT_TRUE(spl::test::Eventually([&] { return api_.counters().refused > 1; }));
  EXPECT_EQ(watcher_.members().size(), 2u);
}

TEST_F(KubernetesTest, AServerOfAnotherCaIsNotTalkedTo) {
  spl::testing::TempDir other;
  KubernetesApi impostor(other.path());
  impostor.SetToken("first-token");
  impostor.Put(Slice("d", "splice-decode", 7102, {Endpoint("10.6.6.6", "d0")}));
  options_.api_server = impostor.address();
  Start();
  EXPECT_FALSE(watcher_.WaitFor([](const Members&) { return true; }, 500ms));
  EXPECT_EQ(impostor.counters().lists, 0) << "the token was not sent";
}

TEST_F(KubernetesTest, WithoutCredentialsItDoesNotStart) {
  options_.token_file = dir_.path() + "/none";
  EXPECT_EQ(MakeKubernetesDiscovery(options_).status().code(), absl::StatusCode::kInvalidArgument);
  options_.token_file = dir_.path() + "/token";
  options_.ca_file = dir_.path() + "/none";
  EXPECT_EQ(MakeKubernetesDiscovery(options_).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(KubernetesTest, EndsAtOnceInTheMiddleOfAWatch) {
  Start();
  ASSERT_TRUE(spl::test::Eventually([&] { return api_.counters().watches == 1; }));
  const auto start = std::chrono::steady_clock::now();
  discovery_->Stop();
  EXPECT_LT(std::chrono::steady_clock::now() - start, 2s);
}

}  // namespace
}  // namespace spl::membership
