// HTTPS and gRPC over TLS at the router's own ports, over fake workers.
#include "services/base/public_tls.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "services/base/grpc_status.h"
#include "spl/v1/inference.grpc.pb.h"
#include "tests/support/certificates.h"
#include "tests/support/eventually.h"
#include "tests/support/fake_cluster.h"
#include "tests/support/http_test_client.h"
#include "tests/support/temp_dir.h"

namespace spl::router {
namespace {

using namespace std::chrono_literals;
using absl::StatusCode;
using nlohmann::json;
using spl::test::CertificateOptions;
using spl::test::Eventually;
using spl::test::TestCa;
using ::testing::AnyOf;
using testing::FakeCluster;
using testing::FakeDecode;
using ::testing::HasSubstr;
using testing::HttpTestClient;
using testing::TestResponse;
using testing::TestTls;

constexpr char kBody[] = R"({"prompt":"tell me a story","max_tokens":8})";

class PublicTlsTest : public ::testing::Test {
 protected:
  PublicTlsTest() : cluster_(1, 1) { cluster_.options.public_tls = Issue(ca_); }

  PublicTlsOptions Issue(const TestCa& ca, const CertificateOptions& options = {}) {
    const PeerTlsOptions files = ca.IssueFiles(dir_.path(), "public", options);
    return {.cert_file = files.cert_file, .key_file = files.key_file, .refresh = 1s};
  }
  TestTls Trust(const TestCa& ca) const { return {.ca_pem = ca.pem()}; }
  HttpServerOptions& http() { return cluster_.options.http; }
  const std::string address() const { return cluster_.http(); }

  TestResponse Ask(const TestCa& ca) { return Call(address(), Trust(ca), "POST", "/v1/completions", kBody); }
  TestResponse Ask() { return Ask(ca_); }
  // The whole answer of the typed API.
  absl::Status AskGrpc(const std::shared_ptr<grpc::ChannelCredentials>& credentials) {
    grpc::ChannelArguments own;
    own.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    const auto stub =
        v1::Inference::NewStub(grpc::CreateCustomChannel(cluster_.router->grpc_address(), credentials, own));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + 20s);
    v1::GenerateRequest request;
    request.mutable_prompt()->set_text("the typed interface");
    request.mutable_sampling()->set_max_tokens(4);
    const auto reader = stub->Generate(&context, request);
    v1::GenerateResponse response;
    while (reader->Read(&response)) {
    }
    return FromGrpcStatus(reader->Finish());
  }
  absl::Status AskGrpc(const TestCa& ca) {
    return AskGrpc(grpc::SslCredentials(grpc::SslCredentialsOptions{.pem_root_certs = ca.pem()}));
  }
  // By the server, not by the client's own time-out.
  static void ExpectClosed(HttpTestClient& client) {
    client.AtEnd();
    EXPECT_THAT(client.why(), AnyOf("the server has closed", "recv: Connection reset by peer"));
  }
  // A series of /metrics; -1 when it is not there.
  double Metric(const std::string& series) {
    const std::string text = Call(address(), Trust(ca_), "GET", "/metrics").body;
    const size_t at = text.find("\n" + series + " ");
    return at == std::string::npos ? -1 : std::stod(text.substr(at + series.size() + 2));
  }
  double Handshakes(const std::string& result) {
    return Metric("splice_router_public_tls_handshakes_total{result=\"" + result + "\"}");
  }

  const spl::testing::TempDir dir_;
  const TestCa ca_{"CA"}, other_ca_{"another CA"};
  FakeCluster cluster_;
};

TEST_F(PublicTlsTest, ServesCompletionsAndStreamsOnOneConnection) {
  cluster_.StartRouter();
  HttpTestClient client(address(), Trust(ca_));
  ASSERT_TRUE(client.connected()) << client.why();
  const TestResponse whole = client.Call("POST", "/v1/completions", kBody);
  ASSERT_EQ(whole.status, 200) << whole.body;
  const std::string text = json::parse(whole.body)["choices"][0]["text"];
  EXPECT_FALSE(text.empty());

  client.SendRequest("POST", "/v1/completions", R"({"prompt":"tell me a story","max_tokens":8,"stream":true})");
  ASSERT_EQ(client.ReadHead().status, 200);
  std::string streamed;
  bool done = false;
  while (const auto event = client.NextEvent()) {
    done = *event == "[DONE]";
    if (done) continue;
    const json piece = json::parse(*event);
    if (!piece["choices"].empty()) streamed += piece["choices"][0]["text"].get<std::string>();
  }
  EXPECT_TRUE(done);
  EXPECT_EQ(streamed, text);
  EXPECT_EQ(client.Call("GET", "/v1/models").status, 200);  // the connection goes on
  EXPECT_EQ(Handshakes("ok"), 2);                           // the second is the one that asks
  EXPECT_GT(Metric("splice_router_public_tls_valid_until_seconds"),
            static_cast<double>(std::chrono::system_clock::to_time_t(std::chrono::system_clock::now())));
}

TEST_F(PublicTlsTest, ServesGrpc) {
  cluster_.StartRouter();
  EXPECT_EQ(AskGrpc(ca_), absl::OkStatus());
  EXPECT_EQ(AskGrpc(grpc::InsecureChannelCredentials()).code(), StatusCode::kUnavailable);
  const absl::Status stranger = AskGrpc(other_ca_);
  EXPECT_EQ(stranger.code(), StatusCode::kUnavailable);
  EXPECT_THAT(std::string(stranger.message()), HasSubstr("certificate verify failed"));
}

TEST_F(PublicTlsTest, TheReadyLineSaysHowToCall) {
  cluster_.StartRouter();
  EXPECT_EQ(ReadyLine(*cluster_.router),
            "ready http=https://" + address() + " grpc=grpcs://" + cluster_.router->grpc_address());
  FakeCluster plain(1, 1);
  plain.StartRouter();
  EXPECT_EQ(ReadyLine(*plain.router), "ready http=" + plain.http() + " grpc=" + plain.router->grpc_address());
}

TEST_F(PublicTlsTest, ClientsSeeWhoTheServerIs) {
  cluster_.StartRouter();
  const HttpTestClient stranger(address(), Trust(other_ca_));
  EXPECT_FALSE(stranger.connected());
  EXPECT_THAT(stranger.why(), HasSubstr("certificate verify failed"));
  TestTls other_name = Trust(ca_);
  other_name.host = "127.0.0.2";
  EXPECT_THAT(HttpTestClient(address(), other_name).why(), HasSubstr("certificate verify failed"));
  other_name.host = "localhost";
  EXPECT_TRUE(HttpTestClient(address(), other_name).connected());
  EXPECT_TRUE(Eventually([&] { return Handshakes("failed") == 2; }));
}

TEST_F(PublicTlsTest, OldVersionsAndOtherProtocolsAreRefused) {
  cluster_.StartRouter();
  TestTls client = Trust(ca_);
  client.max_version = TLS1_1_VERSION;
  EXPECT_FALSE(HttpTestClient(address(), client).connected());
  client.max_version = TLS1_2_VERSION;
  EXPECT_TRUE(HttpTestClient(address(), client).connected());
  client.alpn = "h2";
  EXPECT_THAT(HttpTestClient(address(), client).why(), HasSubstr("no application protocol"));
  client.alpn = "";
  EXPECT_EQ(Call(address(), client, "GET", "/v1/models").status, 200);
}

TEST_F(PublicTlsTest, WrongFilesAreRefusedAtStart) {
  const auto error = [&](const PublicTlsOptions& options) {
    const absl::Status checked = options.Check();
    EXPECT_EQ(checked.code(), StatusCode::kInvalidArgument);
    RouterOptions router = cluster_.options;
    router.public_tls = options;
    EXPECT_EQ(RouterServer::Start(router).status(), checked);
    return std::string(checked.message());
  };
  EXPECT_EQ(PublicTlsOptions().Check(), absl::OkStatus());
  const PublicTlsOptions good = cluster_.options.public_tls;
  EXPECT_EQ(good.Check(), absl::OkStatus());
  for (std::string PublicTlsOptions::*file : {&PublicTlsOptions::cert_file, &PublicTlsOptions::key_file}) {
    PublicTlsOptions one = good;
    one.*file = "";
    EXPECT_THAT(error(one), HasSubstr("give both, or neither"));
    one.*file = dir_.path() + "/absent";
    EXPECT_THAT(error(one), HasSubstr("absent cannot be read: No such file"));
    one.*file = dir_.path();
    EXPECT_THAT(error(one), HasSubstr("cannot be read: Is a directory"));
    one.*file = dir_.path() + "/garbage";
    std::ofstream(one.*file) << "no PEM\n";
    EXPECT_THAT(error(one), HasSubstr("garbage holds no"));
  }
  PublicTlsOptions mixed = good;
  mixed.key_file = ca_.IssueFiles(dir_.path(), "another").key_file;
  EXPECT_THAT(error(mixed), HasSubstr("is not the key of the certificate --public-tls-cert"));
  EXPECT_THAT(error(Issue(ca_, {.valid_from = -3h, .valid_until = -1h})), HasSubstr("has expired"));
  EXPECT_THAT(error(Issue(ca_, {.valid_from = 1h})), HasSubstr("is not valid before"));
}

TEST_F(PublicTlsTest, PlainTextIsToldInPlainTextAndCounted) {
  cluster_.StartRouter();
  HttpTestClient plain(address());
  const TestResponse response = plain.Call("POST", "/v1/completions", kBody);
  EXPECT_EQ(response.status, 400);
  EXPECT_THAT(response.body, HasSubstr("https://"));
  ExpectClosed(plain);
  HttpTestClient noise(address());
  noise.Send(std::string("\x00\x01\x02", 3));
  ExpectClosed(noise);
  HttpTestClient no_handshake(address());  // the first byte is right
  no_handshake.Send("\x16 is not all that it takes\r\n\r\n");
  ExpectClosed(no_handshake);
  { const HttpTestClient probe(address()); }  // connects and goes: a load balancer's look, nothing to count
  EXPECT_TRUE(Eventually([&] { return Handshakes("plain_text") == 1 && Handshakes("failed") == 2; }));
  EXPECT_EQ(Handshakes("timeout"), 0);
  EXPECT_EQ(Ask().status, 200);
}

TEST_F(PublicTlsTest, WhoStallsInTheHandshakeIsDroppedWhileOthersAreServed) {
  http().handshake_timeout = 400ms;
  cluster_.options.io_threads = 1;
  cluster_.StartRouter();
  std::vector<std::unique_ptr<HttpTestClient>> stalled;
  for (int i = 0; i < 30; ++i) stalled.push_back(std::make_unique<HttpTestClient>(address()));
  for (int i = 10; i < 20; ++i) stalled[i]->Send("\x16");                          // a first byte
  for (int i = 20; i < 30; ++i) stalled[i]->Send("\x16\x03\x01\x01\x00\x01\x02");  // half of a hello
  HttpTestClient grpc(cluster_.router->grpc_address());
  EXPECT_EQ(Ask().status, 200);
  for (const auto& client : stalled) ExpectClosed(*client);
  ExpectClosed(grpc);
  EXPECT_TRUE(Eventually([&] { return Handshakes("timeout") == 30; }));
  EXPECT_EQ(AskGrpc(ca_), absl::OkStatus());
}

TEST_F(PublicTlsTest, AReplacedCertificateIsUsedAndAWrongOneIsNot) {
  cluster_.StartRouter();
  HttpTestClient before(address(), Trust(ca_));
  ASSERT_EQ(before.Call("POST", "/v1/completions", kBody).status, 200);
  Issue(other_ca_);
  EXPECT_TRUE(Eventually([&] { return Ask(other_ca_).status == 200; }));
  EXPECT_TRUE(Eventually([&] { return AskGrpc(other_ca_).ok(); }));
  EXPECT_EQ(Ask(ca_).status, 0);
  const auto reloads = [&](const std::string& result) {  // on the connection that was there before: it stays
    const std::string text = before.Call("GET", "/metrics").body;
    const std::string series = "\nsplice_router_public_tls_reloads_total{result=\"" + result + "\"} ";
    const size_t at = text.find(series);
    return at == std::string::npos ? -1 : std::stod(text.substr(at + series.size()));
  };
  EXPECT_EQ(reloads("ok"), 1);
  EXPECT_EQ(reloads("refused"), 0);

  std::ofstream(dir_.path() + "/public.key") << other_ca_.Issue().key;  // of another certificate
  EXPECT_TRUE(Eventually([&] { return reloads("refused") == 1; }));
  EXPECT_EQ(Ask(other_ca_).status, 200);
  Issue(other_ca_);
  EXPECT_TRUE(Eventually([&] { return reloads("ok") == 2; }));
  EXPECT_EQ(Ask(other_ca_).status, 200);
  EXPECT_TRUE(Eventually([&] { return AskGrpc(other_ca_).ok(); }));
}

TEST_F(PublicTlsTest, LargeBodiesBothWaysAndTheirLimit) {
  http().max_body_bytes = 3 << 20;
  cluster_.StartRouter();
  HttpTestClient client(address(), Trust(ca_));
  std::string body = R"({"prompt":"x","max_tokens":2000,"logprobs":5})";
  body.resize((3 << 20) - 100, ' ');
  const TestResponse large = client.Call("POST", "/v1/completions", body);
  ASSERT_EQ(large.status, 200);
  EXPECT_GT(large.body.size(), 100u << 10);  // several records of TLS
  EXPECT_EQ(json::parse(large.body)["usage"]["completion_tokens"], 2000);

  // Refused at its header, while the client still sends: the answer arrives all the same.
  body.resize(12 << 20, ' ');
  const TestResponse refused = client.Call("POST", "/v1/completions", body);
  EXPECT_EQ(refused.status, 413) << client.why();
  EXPECT_TRUE(client.AtEnd());
  EXPECT_TRUE(client.ended_by_notice());
  HttpTestClient header(address(), Trust(ca_));
  EXPECT_EQ(header.Call("GET", "/v1/models", "", {"x-long: " + std::string(20'000, 'a')}).status, 431);
}

TEST_F(PublicTlsTest, EndsAreAnnounced) {
  http().idle_timeout = 200ms;
  cluster_.StartRouter();
  HttpTestClient last(address(), Trust(ca_));
  EXPECT_EQ(last.Call("POST", "/v1/completions", kBody, {"connection: close"}).status, 200);
  EXPECT_TRUE(last.AtEnd());
  EXPECT_TRUE(last.ended_by_notice());
  HttpTestClient idle(address(), Trust(ca_));
  EXPECT_TRUE(idle.AtEnd());
  EXPECT_TRUE(idle.ended_by_notice());
  HttpTestClient used(address(), Trust(ca_));
  EXPECT_EQ(used.Call("GET", "/v1/models").status, 200);
  EXPECT_TRUE(used.AtEnd());
  EXPECT_TRUE(used.ended_by_notice());
}

TEST_F(PublicTlsTest, PipelinedRequestsAreAnsweredInOrder) {
  cluster_.StartRouter();
  HttpTestClient client(address(), Trust(ca_));
  std::string three;
  for (int i = 1; i <= 3; ++i) {
    const std::string body = R"({"prompt":"tell me a story","max_tokens":)" + std::to_string(i) + "}";
    three += "POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-length: " + std::to_string(body.size()) +
             "\r\n\r\n" + body;
  }
  for (int round = 0; round < 20; ++round) {
    client.Send(three);
    for (int i = 1; i <= 3; ++i) {
      const TestResponse response = client.Read();
      ASSERT_EQ(response.status, 200) << client.why();
      EXPECT_EQ(json::parse(response.body)["usage"]["completion_tokens"], i);
    }
  }
}

TEST_F(PublicTlsTest, ClientsThatLeaveMidStreamFreeTheSequence) {
  cluster_.StartRouter();
  cluster_.decode[0]->SetGate(20);
  for (const bool killed : {false, true}) {
    HttpTestClient client(address(), Trust(ca_));
    client.SendRequest("POST", "/v1/completions", R"({"prompt":"a long story","max_tokens":500,"stream":true})");
    ASSERT_EQ(client.ReadHead().status, 200);
    ASSERT_TRUE(client.NextEvent().has_value());
    killed ? client.Abort() : client.Close();
    EXPECT_TRUE(cluster_.decode[0]->WaitIdle());
  }
}

TEST_F(PublicTlsTest, WithoutRoomNoHandshakeIsSpent) {
  http().max_connections = 1;
  cluster_.StartRouter();
  HttpTestClient first(address(), Trust(ca_));
  ASSERT_EQ(first.Call("GET", "/v1/models").status, 200);
  EXPECT_FALSE(HttpTestClient(address(), Trust(ca_)).connected());
  const std::string text = first.Call("GET", "/metrics").body;
  EXPECT_THAT(text, HasSubstr("splice_router_public_tls_handshakes_total{result=\"ok\"} 1"));
  EXPECT_THAT(text, HasSubstr("splice_router_public_tls_handshakes_total{result=\"failed\"} 0"));
}

TEST_F(PublicTlsTest, ManyClientsAtOnce) {
  cluster_.StartRouter();
  std::vector<std::thread> clients;
  std::atomic<int> good{0};
  for (int i = 0; i < 8; ++i) {
    clients.emplace_back([&] {
      for (int connection = 0; connection < 5; ++connection) {
        HttpTestClient client(address(), Trust(ca_));
        for (int call = 0; call < 4; ++call) good += client.Call("POST", "/v1/completions", kBody).status == 200;
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(good, 8 * 5 * 4);
}

// The operators' port is not concerned: probes and scrapers need no certificates.
TEST_F(PublicTlsTest, TheMetricsPortStaysPlain) {
  cluster_.options.metrics_listen = "127.0.0.1:0";
  cluster_.StartRouter();
  const std::string metrics = cluster_.router->metrics_address();
  EXPECT_TRUE(Eventually([&] { return testing::Call(metrics, "GET", "/readyz").status == 200; }));
  EXPECT_THAT(testing::Call(metrics, "GET", "/metrics").body, HasSubstr("splice_router_public_tls"));
}

}  // namespace
}  // namespace spl::router
