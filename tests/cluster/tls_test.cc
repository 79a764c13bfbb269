// The four programs with TLS between them: everything works as without, and nobody else gets in. And the APIs with TLS,
// as the tools use them.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <thread>

#include "services/base/grpc_status.h"
#include "services/chunk/remote/record_client.h"
#include "spl/v1/decode.grpc.pb.h"
#include "spl/v1/prefill.grpc.pb.h"
#include "tests/cluster/processes.h"
#include "tests/support/certificates.h"
#include "tests/support/eventually.h"
#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"

namespace spl::test {
namespace {

using namespace std::chrono_literals;
using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::StartsWith;

std::vector<std::string> FlagsOf(const PeerTlsOptions& options) {
  return {"--tls-cert", options.cert_file, "--tls-key", options.key_file, "--tls-ca", options.ca_file};
}

std::chrono::steady_clock::time_point Soon() { return std::chrono::steady_clock::now() + 10s; }

HttpReply Complete(const std::string& http) {
  std::string prompt;
  for (int i = 0; i < 30; ++i) prompt += "The captain of ship " + std::to_string(i * i) + " is lost. ";
  const json body = {
      {"model", "splice-tiny"}, {"prompt", prompt}, {"max_tokens", 16}, {"temperature", 0}, {"ignore_eos", true}};
  return HttpPost(http, "/v1/completions", body.dump());
}

std::string TextOf(const HttpReply& reply) {
  if (reply.status != 200) return "HTTP " + std::to_string(reply.status) + ": " + reply.body;
  return json::parse(reply.body)["choices"][0]["text"];
}

class TlsClusterTest : public ::testing::Test {
 protected:
  // Each program has a certificate of its own; no flags: none has one.
  std::unique_ptr<ProcessCluster> StartCluster(bool tls) {
    ClusterConfig config;
    config.model_dir = kTinyModel;
    config.prefill_flags = {"--kv-bytes", "128MiB", "--threads", "1"};
    config.decode_flags = config.prefill_flags;
    const auto add = [&](const std::string& name, std::vector<std::string>& flags) {
      const auto more = FlagsOf(ca_.IssueFiles(dir_.path(), name));
      if (tls) flags.insert(flags.end(), more.begin(), more.end());
    };
    add("store", config.store_flags);
    add("prefill", config.prefill_flags);
    add("decode", config.decode_flags);
    add("router", config.router_flags);
    return ProcessCluster::Start(config);
  }
  std::shared_ptr<const PeerTls> Load(const PeerTlsOptions& options) {
    auto tls = PeerTls::Load(options);
    EXPECT_TRUE(tls.ok()) << tls.status();
    return tls.value_or(nullptr);
  }

  const spl::testing::TempDir dir_;
  const TestCa ca_{"CA"}, other_ca_{"another CA"};
};

double MetricOf(const Process& process, const std::string& name) {
  return MetricValue(HttpGet(process.ready("metrics"), "/metrics").body, name);
}

TEST_F(TlsClusterTest, WorksAsWithout) {
  std::string plain;
  {
    const auto cluster = StartCluster(false);
    ASSERT_NE(cluster, nullptr);
    const HttpReply reply = Complete(cluster->http());
    ASSERT_EQ(reply.status, 200) << reply.body;
    plain = TextOf(reply);
  }
  const auto cluster = StartCluster(true);
  ASSERT_NE(cluster, nullptr);
  EXPECT_EQ(TextOf(Complete(cluster->http())), plain);  // router → workers, prefill → decode
  // prefill → store, and router → records.
  EXPECT_TRUE(Eventually([&] { return MetricOf(*cluster->store, "splice_store_chunks") > 0; }));
  EXPECT_EQ(HttpGet(cluster->http(), "/admin/v1/knowledge_bases").status, 200);
  EXPECT_EQ(HttpGet(cluster->http(), "/admin/v1/namespaces").status, 200);
}

TEST_F(TlsClusterTest, StrangersGetNowhere) {
  const auto cluster = StartCluster(true);
  ASSERT_NE(cluster, nullptr);
  const std::string decode = cluster->decode[0]->ready("grpc"), prefill = cluster->prefill[0]->ready("grpc"),
                    store = cluster->store->ready("grpc");
  ASSERT_EQ(Complete(cluster->http()).status, 200);
  ASSERT_TRUE(Eventually([&] { return MetricOf(*cluster->decode[0], "splice_kv_pages_used") == 0; }));
  const PeerTlsOptions friend_files = ca_.IssueFiles(dir_.path(), "friend");
  PeerTlsOptions stranger_files = other_ca_.IssueFiles(dir_.path(), "stranger");
  stranger_files.ca_file = friend_files.ca_file;  // it would take any server of the cluster
  const chunk::Digest owner{};
  const auto put = [&](const PeerTls* tls) {
    return (*chunk::RecordClient::Connect(store, tls))->Put(owner, "record", "value", {.durable = false}, Soon());
  };
  const auto calls = [&](const PeerTls* tls) {
    std::vector<absl::Status> answers = {put(tls).status()};
    {
      v1::ReserveRequest request;
      request.set_prompt_tokens(100);
      grpc::ClientContext context;
      context.set_deadline(ToGrpcDeadline(Soon()));
      v1::Ticket ticket;
      answers.push_back(
          FromGrpcStatus(v1::Decode::NewStub(MakePeerChannel(decode, tls))->Reserve(&context, request, &ticket)));
    }
    grpc::ClientContext context;
    context.set_deadline(ToGrpcDeadline(Soon()));
    v1::PrefillInfo info;
    answers.push_back(
        FromGrpcStatus(v1::Prefill::NewStub(MakePeerChannel(prefill, tls))->GetInfo(&context, {}, &info)));
    return answers;
  };
  for (const auto& tls : {Load(stranger_files), std::shared_ptr<const PeerTls>()}) {
    for (const absl::Status& status : calls(tls.get()))
      EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  }
  EXPECT_EQ(MetricOf(*cluster->decode[0], "splice_kv_pages_used"), 0);
  const auto good = Load(friend_files);
  const auto records = *chunk::RecordClient::Connect(store, good.get());
  EXPECT_EQ(records->Get(owner, "record", Soon()).status().code(), absl::StatusCode::kNotFound);
  // It was the certificate: the same calls arrive with one of the CA.
  EXPECT_TRUE(put(good.get()).ok());
  for (const absl::Status& status : calls(good.get())) EXPECT_NE(status.code(), absl::StatusCode::kUnavailable);

  // A whole router of another CA, and one without: no worker answers either.
  for (const auto& flags : {FlagsOf(other_ca_.IssueFiles(dir_.path(), "stranger")), std::vector<std::string>()}) {
    std::vector<std::string> argv = {BinDir() + "/splice-router",
                                     "--model",
                                     kTinyModel,
                                     "--http",
                                     "127.0.0.1:0",
                                     "--grpc",
                                     "127.0.0.1:0",
                                     "--prefill",
                                     prefill,
                                     "--decode",
                                     decode};
    argv.insert(argv.end(), flags.begin(), flags.end());
    const auto router = Process::StartAndWaitReady(argv);
    ASSERT_NE(router, nullptr);
    EXPECT_TRUE(Eventually([&] {  // ten polls of both
      const std::string log = router->Stderr();
      const size_t first = log.find("router.worker_unreachable");
      return first != std::string::npos && log.find("router.worker_unreachable", first + 1) != std::string::npos;
    })) << router->Stderr();
    EXPECT_EQ(HttpGet(router->ready("http"), "/readyz").status, 503);
    EXPECT_EQ(Complete(router->ready("http")).status, 503);
    if (!flags.empty()) {
      EXPECT_THAT(router->Stderr(), HasSubstr("certificate verify failed"));
    }
  }
  EXPECT_EQ(Complete(cluster->http()).status, 200);
}

TEST_F(TlsClusterTest, ProgramsDoNotStartWithWhatCannotWork) {
  const auto old = FlagsOf(ca_.IssueFiles(dir_.path(), "old", {.valid_from = -3h, .valid_until = -1h}));
  const std::vector<std::vector<std::string>> programs = {
      {"splice-kvstore", "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"},
      {"splice-decode", "--model", kTinyModel},
      {"splice-prefill", "--model", kTinyModel},
      {"splice-router", "--model", kTinyModel, "--prefill", "127.0.0.1:1", "--decode", "127.0.0.1:1"}};
  for (std::vector<std::string> argv : programs) {
    argv[0] = BinDir() + "/" + argv[0];
    const size_t size = argv.size();
    argv.insert(argv.end(), old.begin(), old.end());
    Process::Result result = Process::Run(argv, 20s);
    EXPECT_GT(result.exit_code, 0) << argv[0];
    EXPECT_THAT(result.err, HasSubstr("has expired")) << argv[0];
    argv.resize(size + 2);  // --tls-cert alone
    result = Process::Run(argv, 20s);
    EXPECT_GT(result.exit_code, 0) << argv[0];
    EXPECT_THAT(result.err, HasSubstr("give all three, or none")) << argv[0];
  }
}

TEST_F(TlsClusterTest, TheToolsUseTheApisOverTls) {
  const PeerTlsOptions files = ca_.IssueFiles(dir_.path(), "public");
  const std::string splice = BinDir() + "/splice";
  std::vector<std::string> serve = {splice,   "serve",       "--model",    kTinyModel, "--http",    "127.0.0.1:0",
                                    "--grpc", "127.0.0.1:0", "--kv-bytes", "64MiB",    "--threads", "1"};
  const auto with = [](std::vector<std::string> argv, const std::vector<std::string>& more) {
    argv.insert(argv.end(), more.begin(), more.end());
    return argv;
  };
  const std::vector<std::string> certificate = {"--public-tls-cert", files.cert_file, "--public-tls-key",
                                                files.key_file};
  const auto server = Process::StartAndWaitReady(with(serve, certificate));
  ASSERT_NE(server, nullptr);
  const std::string http = server->ready("http"), grpc = server->ready("grpc");
  EXPECT_THAT(http, StartsWith("https://127.0.0.1:"));
  EXPECT_THAT(grpc, StartsWith("grpcs://127.0.0.1:"));
  const auto run = [&](const std::vector<std::string>& argv, const std::string& ca_file) {
    return Process::Run(with(with({splice}, argv), {"--ca", ca_file}), 60s);
  };
  std::string text;
  for (const std::string& endpoint : {http, grpc}) {
    const auto told =
        run({"generate", "--endpoint", endpoint, "--prompt", "The captain", "--max-tokens", "8"}, files.ca_file);
    ASSERT_EQ(told.exit_code, 0) << told.err;
    EXPECT_FALSE(told.out.empty());
    if (!text.empty()) {
      EXPECT_EQ(told.out, text);
    }
    text = told.out;
  }
  const auto status = run({"ctl", "status", "--url", http}, files.ca_file);
  EXPECT_EQ(status.exit_code, 0) << status.err;
  const auto bench = run({"bench", "--endpoint", http, "--concurrency", "2", "--num-requests", "4", "--input-tokens",
                          "32", "--output-tokens", "4"},
                         files.ca_file);
  EXPECT_EQ(bench.exit_code, 0) << bench.err;

  const std::string other = other_ca_.IssueFiles(dir_.path(), "other").ca_file;
  for (const std::string& endpoint : {http, grpc}) {
    const auto refused = run({"generate", "--endpoint", endpoint, "--prompt", "The captain"}, other);
    EXPECT_EQ(refused.exit_code, 1);
    EXPECT_THAT(refused.err, HasSubstr("the server's certificate is not believed"));
  }
}

TEST_F(TlsClusterTest, ApisAreNotServedWithACertificateThatCannotWork) {
  const PeerTlsOptions old = ca_.IssueFiles(dir_.path(), "old", {.valid_from = -3h, .valid_until = -1h});
  const std::vector<std::vector<std::string>> programs = {
      {BinDir() + "/splice-router", "--model", kTinyModel, "--prefill", "127.0.0.1:1", "--decode", "127.0.0.1:1"},
      {BinDir() + "/splice", "serve", "--model", kTinyModel}};
  for (std::vector<std::string> argv : programs) {
    argv.insert(argv.end(), {"--public-tls-cert", old.cert_file});
    Process::Result result = Process::Run(argv, 20s);
    EXPECT_EQ(result.exit_code, 2) << argv[0];
    EXPECT_THAT(result.err, HasSubstr("give both, or neither")) << argv[0];
    argv.insert(argv.end(), {"--public-tls-key", old.key_file});
    result = Process::Run(argv, 20s);
    EXPECT_EQ(result.exit_code, 2) << argv[0];
    EXPECT_THAT(result.err, HasSubstr("has expired")) << argv[0];
  }
}

}  // namespace
}  // namespace spl::test
