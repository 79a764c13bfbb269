#include "services/base/tls.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <fstream>

#include "services/base/grpc_status.h"
#include "services/base/service_host.h"
#include "spl/v1/kvstore_admin.grpc.pb.h"
#include "tests/support/certificates.h"
#include "tests/support/eventually.h"
#include "tests/support/temp_dir.h"

namespace spl {
namespace {

using namespace std::chrono_literals;
using absl::StatusCode;
using test::PemPair;
using ::testing::HasSubstr;

// Something to be called, and whether it was.
class CountingService final : public v1::KvStoreAdmin::Service {
 public:
  grpc::Status ListNamespaces(grpc::ServerContext*, const v1::ListNamespacesRequest*,
                              v1::ListNamespacesResponse*) override {
    ++calls;
    return grpc::Status::OK;
  }
  std::atomic<int> calls{0};
};

std::shared_ptr<const PeerTls> LoadOrDie(const PeerTlsOptions& options) {
  auto tls = PeerTls::Load(options);
  EXPECT_TRUE(tls.ok()) << tls.status();
  return tls.value_or(nullptr);
}

class PeerTlsTest : public ::testing::Test {
 protected:
  PeerTlsTest() { good_ = ca_.IssueFiles(dir_.path(), "good"); }
  void TearDown() override {
    if (host_ != nullptr) host_->Stop();
  }

  void Serve(std::shared_ptr<grpc::ServerCredentials> credentials) {
    ServiceHostOptions options;
    options.name = "test";
    options.metrics_listen = "";
    options.credentials = std::move(credentials);
    auto host = ServiceHost::Start(options, {&service_}, metrics_);
    ASSERT_TRUE(host.ok()) << host.status();
    host_ = *std::move(host);
  }
  void ServeWith(const PeerTlsOptions& options) { Serve(LoadOrDie(options)->MakeServerCredentials()); }
  // What PeerTls::Load would not take.
  void ServeWith(const PemPair& pair) {
    grpc::SslServerCredentialsOptions options(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
    options.pem_root_certs = ca_.pem();
    options.pem_key_cert_pairs.push_back({pair.key, pair.certificate});
    Serve(grpc::SslServerCredentials(options));
  }

  // One call on a connection of its own, which is tried for some seconds.
  static absl::Status CallOn(const std::shared_ptr<grpc::Channel>& channel) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + 20s);
    v1::ListNamespacesResponse response;
    return FromGrpcStatus(v1::KvStoreAdmin::NewStub(channel)->ListNamespaces(&context, {}, &response));
  }
  static grpc::ChannelArguments OwnConnection() {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return arguments;
  }
  absl::Status CallWith(const PeerTlsOptions& options) {
    return CallOn(MakePeerChannel(host_->grpc_address(), LoadOrDie(options).get(), OwnConnection()));
  }
  absl::Status CallWith(const grpc::SslCredentialsOptions& options) {
    return CallOn(grpc::CreateCustomChannel(host_->grpc_address(), grpc::SslCredentials(options), OwnConnection()));
  }

  const spl::testing::TempDir dir_;
  const test::TestCa ca_{"CA"}, other_ca_{"another CA"};
  PeerTlsOptions good_;
  CountingService service_;
  Metrics metrics_;
  std::unique_ptr<ServiceHost> host_;
};

TEST_F(PeerTlsTest, CertificatesOfTheSameCaTalk) {
  ServeWith(good_);
  EXPECT_EQ(CallWith(good_), absl::OkStatus());
  EXPECT_EQ(CallWith(ca_.IssueFiles(dir_.path(), "another")), absl::OkStatus());
  EXPECT_EQ(service_.calls, 2);
}

TEST_F(PeerTlsTest, ServersRefuseWhoCannotProveWhoTheyAre) {
  ServeWith(good_);
  const test::TestCa impostor("CA");  // of the same name, with another key
  for (const test::TestCa* ca : {&other_ca_, &impostor}) {
    PeerTlsOptions stranger = ca->IssueFiles(dir_.path(), "stranger");
    stranger.ca_file = good_.ca_file;  // it would believe the server
    EXPECT_EQ(CallWith(stranger).code(), StatusCode::kUnavailable);
  }

  grpc::SslCredentialsOptions without_certificate{.pem_root_certs = ca_.pem()};
  EXPECT_EQ(CallWith(without_certificate).code(), StatusCode::kUnavailable);

  const PemPair old = ca_.Issue({.valid_from = -3h, .valid_until = -1h});
  const grpc::SslCredentialsOptions expired{ca_.pem(), old.key, old.certificate};
  EXPECT_EQ(CallWith(expired).code(), StatusCode::kUnavailable);

  EXPECT_EQ(CallOn(MakePeerChannel(host_->grpc_address(), nullptr, OwnConnection())).code(), StatusCode::kUnavailable);
  EXPECT_EQ(service_.calls, 0);
  // The same two ways with what is right: it was the certificates.
  const PemPair valid = ca_.Issue();
  EXPECT_EQ(CallWith(grpc::SslCredentialsOptions{ca_.pem(), valid.key, valid.certificate}), absl::OkStatus());
  EXPECT_EQ(CallWith(good_), absl::OkStatus());
}

TEST_F(PeerTlsTest, ClientsRefuseServersOfAnotherCa) {
  ServeWith(good_);
  PeerTlsOptions other = good_;
  other.ca_file = other_ca_.IssueFiles(dir_.path(), "other").ca_file;
  const absl::Status status = CallWith(other);
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("certificate verify failed"));
  EXPECT_EQ(service_.calls, 0);
}

TEST_F(PeerTlsTest, ClientsRefuseExpiredServers) {
  ServeWith(ca_.Issue({.valid_from = -3h, .valid_until = -1h}));
  const absl::Status status = CallWith(good_);
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("certificate verify failed"));
  EXPECT_EQ(service_.calls, 0);
}

TEST_F(PeerTlsTest, ClientsRefuseServersOfAnotherName) {
  ServeWith(ca_.Issue({.dns = "splice.internal", .ip = ""}));
  EXPECT_EQ(CallWith(good_).code(), StatusCode::kUnavailable);
  EXPECT_EQ(service_.calls, 0);
  PeerTlsOptions named = good_;
  named.server_name = "splice.internal";
  EXPECT_EQ(CallWith(named), absl::OkStatus());
  named.server_name = "store.internal";
  EXPECT_EQ(CallWith(named).code(), StatusCode::kUnavailable);
  EXPECT_EQ(service_.calls, 1);
}

// Files that change are used without a restart, by the server and by the client.
TEST_F(PeerTlsTest, ReplacedFilesAreUsed) {
  good_.refresh = 1s;
  PeerTlsOptions client = ca_.IssueFiles(dir_.path(), "client");
  client.refresh = 1s;
  const auto server_tls = LoadOrDie(good_), client_tls = LoadOrDie(client);
  Serve(server_tls->MakeServerCredentials());
  const auto call = [&] { return CallOn(MakePeerChannel(host_->grpc_address(), client_tls.get(), OwnConnection())); };
  ASSERT_EQ(call(), absl::OkStatus());
  // Everything of the server is of the other CA now: the client is a stranger to it, and it to the client.
  other_ca_.IssueFiles(dir_.path(), "good");
  EXPECT_TRUE(test::Eventually([&] { return call().code() == StatusCode::kUnavailable; }));
  other_ca_.IssueFiles(dir_.path(), "client");
  EXPECT_TRUE(test::Eventually([&] { return call().ok(); }));
}

TEST_F(PeerTlsTest, LoadSaysWhatIsWrong) {
  const auto error = [](const PeerTlsOptions& options) {
    const absl::Status status = PeerTls::Load(options).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  const auto none = PeerTls::Load({});
  ASSERT_TRUE(none.ok());
  EXPECT_EQ(*none, nullptr);

  for (std::string PeerTlsOptions::*file :
       {&PeerTlsOptions::cert_file, &PeerTlsOptions::key_file, &PeerTlsOptions::ca_file}) {
    PeerTlsOptions missing = good_;
    missing.*file = "";
    EXPECT_THAT(error(missing), HasSubstr("give all three, or none"));
    PeerTlsOptions absent = good_;
    absent.*file = dir_.path() + "/absent";
    EXPECT_THAT(error(absent), HasSubstr("absent cannot be read"));
    PeerTlsOptions garbage = good_;
    garbage.*file = dir_.path() + "/garbage";
    std::ofstream(garbage.*file) << "no PEM\n";
    EXPECT_THAT(error(garbage), HasSubstr("garbage holds no"));
  }
  EXPECT_THAT(error({.server_name = "splice.internal"}), HasSubstr("--tls-server-name needs"));
  PeerTlsOptions mixed = good_;
  mixed.key_file = ca_.IssueFiles(dir_.path(), "another").key_file;
  EXPECT_THAT(error(mixed), HasSubstr("is not the key of the certificate"));
  EXPECT_THAT(error(ca_.IssueFiles(dir_.path(), "old", {.valid_from = -3h, .valid_until = -1h})),
              HasSubstr("has expired"));
  EXPECT_THAT(error(ca_.IssueFiles(dir_.path(), "early", {.valid_from = 1h})), HasSubstr("is not valid before"));
}

}  // namespace
}  // namespace spl
