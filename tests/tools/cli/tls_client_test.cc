// The tools' clients against a router with TLS over fake workers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/support/certificates.h"
#include "tests/support/fake_cluster.h"
#include "tests/support/temp_dir.h"
#include "tools/cli/api_client.h"
#include "tools/cli/load_client.h"
#include "tools/cli/load_report.h"
#include "tools/cli/text_generator.h"

namespace spl::cli {
namespace {

using absl::StatusCode;
using nlohmann::json;
using spl::test::TestCa;
using ::testing::AllOf;
using testing::FakeCluster;
using ::testing::HasSubstr;

class TlsClientTest : public ::testing::Test {
 protected:
  TlsClientTest() : cluster_(1, 1) {
    const PeerTlsOptions files = ca_.IssueFiles(dir_.path(), "good");
    good_ca_ = files.ca_file;
    other_ca_ = TestCa("another CA").IssueFiles(dir_.path(), "other").ca_file;
    cluster_.options.public_tls = {.cert_file = files.cert_file, .key_file = files.key_file};
    cluster_.options.http.listen = cluster_.options.grpc_listen = "0.0.0.0:0";  // 127.0.0.2 answers, too
    cluster_.options.insecure_open = true;
    cluster_.StartRouter();
  }

  std::string Url(const std::string& scheme, const std::string& host = "127.0.0.1") const {
    const std::string address = scheme[0] == 'g' ? cluster_.router->grpc_address() : cluster_.http();
    return scheme + "://" + host + address.substr(address.rfind(':'));
  }
  static absl::StatusOr<json> Models(const std::string& url, const std::string& ca_file) {
    auto client = ApiClient::Create({.url = url, .ca_file = ca_file});
    if (!client.ok()) return client.status();
    return (*client)->Get("/v1/models");
  }
  static absl::StatusOr<std::string> Text(const std::string& url, const std::string& ca_file) {
    auto generator = MakeEndpointGenerator({.url = url, .ca_file = ca_file});
    if (!generator.ok()) return generator.status();
    TextRequest request;
    request.text = "tell me a story";
    request.max_tokens = 8;
    auto result = (*generator)->Generate(request, [](const std::string&) { return true; });
    if (!result.ok()) return result.status();
    return result->text;
  }
  static std::string Message(const absl::Status& status) {
    EXPECT_EQ(status.code(), StatusCode::kUnavailable) << status;
    return std::string(status.message());
  }

  const spl::testing::TempDir dir_;
  const TestCa ca_{"CA"};
  std::string good_ca_, other_ca_;
  FakeCluster cluster_;
};

TEST_F(TlsClientTest, BothApisAnswerTheSame) {
  const auto http = Text(Url("https"), good_ca_), grpc = Text(Url("grpcs"), good_ca_);
  ASSERT_TRUE(http.ok()) << http.status();
  ASSERT_TRUE(grpc.ok()) << grpc.status();
  EXPECT_FALSE(http->empty());
  EXPECT_EQ(*http, *grpc);
  EXPECT_TRUE(Text(Url("https", "localhost"), good_ca_).ok());
}

TEST_F(TlsClientTest, AClientIsUsedAgainAfterItsConnectionIsGone) {
  const auto client = ApiClient::Create({.url = Url("https"), .ca_file = good_ca_}).value();
  for (int i = 0; i < 3; ++i) {
    const auto models = client->Get("/v1/models");
    ASSERT_TRUE(models.ok()) << models.status();
    EXPECT_EQ((*models)["data"][0]["id"], "splice-tiny");
  }
  int events = 0;
  const json body = {{"prompt", "x"}, {"max_tokens", 50}, {"stream", true}};
  EXPECT_EQ(client->PostStream("/v1/completions", body, [&](const json&) { return ++events < 3; }), absl::OkStatus());
  EXPECT_TRUE(client->Get("/v1/models").ok());
}

TEST_F(TlsClientTest, CertificatesAreCheckedAndRefusalsSayWhy) {
  EXPECT_THAT(Message(Models(Url("https"), other_ca_).status()),
              AllOf(HasSubstr("is not believed"), HasSubstr("--ca")));
  EXPECT_THAT(Message(Models(Url("https"), "").status()), HasSubstr("is not believed"));  // no CA of the system
  EXPECT_THAT(Message(Models(Url("https", "127.0.0.2"), good_ca_).status()), HasSubstr("does not name '127.0.0.2'"));
  EXPECT_THAT(Message(Text(Url("grpcs"), other_ca_).status()), AllOf(HasSubstr("is not believed"), HasSubstr("--ca")));
  EXPECT_THAT(Message(Text(Url("grpcs"), "").status()), HasSubstr("is not believed"));
  EXPECT_THAT(Message(Text(Url("grpcs", "127.0.0.2"), good_ca_).status()),
              HasSubstr("127.0.0.2 is not in peer certificate"));
  for (const char* scheme : {"https", "grpcs"}) {
    const absl::Status absent = Text(Url(scheme), dir_.path() + "/absent").status();
    EXPECT_EQ(absent.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(absent.message()), HasSubstr("--ca " + dir_.path() + "/absent cannot be read"));
  }
}

TEST_F(TlsClientTest, TheWrongSchemeIsTold) {
  const absl::Status plain = Models(Url("http"), "").status();
  EXPECT_EQ(plain.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(plain.message()), HasSubstr("use https://"));
  FakeCluster other(1, 1);
  other.StartRouter();
  EXPECT_THAT(Message(Models("https://" + other.http(), good_ca_).status()), HasSubstr("http://"));
  EXPECT_EQ(Models("ftp://" + other.http(), "").status().code(), StatusCode::kInvalidArgument);
}

TEST_F(TlsClientTest, TheLoadGeneratorSpeaksIt) {
  LoadOptions options;
  options.endpoint = ParseApiUrl(Url("https")).value();
  options.ca_file = good_ca_;
  options.concurrency = 8;
  const LoadPlanOptions plan = {
      .alphabet = {300, 301, 302, 303}, .input_tokens = 32, .output_tokens = 10, .num_requests = 40};
  const LoadOutcome outcome = RunLoad(options, MakeSyntheticPlan(plan), nullptr).value();
  ASSERT_EQ(outcome.results.size(), 40u);
  for (const RequestResult& result : outcome.results) {
    EXPECT_EQ(result.error, "");
    EXPECT_EQ(result.completion_tokens, 10u);
  }
  EXPECT_TRUE(FetchJson(options, "GET", "/v1/models", "").ok());

  options.ca_file = other_ca_;
  EXPECT_THAT(Message(FetchJson(options, "GET", "/v1/models", "").status()), HasSubstr("is not believed"));
  const LoadReport report = MakeReport(RunLoad(options, MakeSyntheticPlan(plan), nullptr).value(), {});
  EXPECT_EQ(report.num_ok, 0u);
  ASSERT_EQ(report.errors.size(), 1u);
  EXPECT_THAT(report.errors.begin()->first, HasSubstr("is not believed"));
  options.ca_file = dir_.path() + "/absent";
  EXPECT_EQ(RunLoad(options, MakeSyntheticPlan(plan), nullptr).status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace spl::cli
