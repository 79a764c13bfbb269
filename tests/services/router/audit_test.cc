// What is changed by the admin and control APIs leaves a line in the audit log: who, what, and what came of it.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "services/base/log.h"
#include "services/kvstore/kvstore_server.h"
#include "spl/v1/admin.grpc.pb.h"
#include "tests/support/fake_cluster.h"
#include "tests/support/http_test_client.h"
#include "tests/support/temp_dir.h"

namespace spl::router {
namespace {

using ::testing::AllOf;
using testing::Call;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class AuditTest : public ::testing::Test {
 protected:
  AuditTest() {
    kvstore::KvStoreOptions options;
    options.metrics_listen = "";
    options.memory_bytes = 8 << 20;
    store_ = std::move(kvstore::KvStoreServer::Start(options)).value();
    cluster_ = std::make_unique<testing::FakeCluster>(1, 1, store_->grpc_address());
    std::ofstream(dir_.path() + "/keys") << "secret-key-a alice\nsecret-key-o operator role=operator\n";
    cluster_->options.api_keys_file = dir_.path() + "/keys";
    cluster_->StartRouter();
    admin_ =
        v1::Admin::NewStub(grpc::CreateChannel(cluster_->router->grpc_address(), grpc::InsecureChannelCredentials()));
  }

  // The audit lines that `work` leaves.
  std::vector<std::string> LinesOf(const std::function<void()>& work) {
    log::SetLevel(log::Level::kInfo);
    ::testing::internal::CaptureStderr();
    work();
    std::istringstream all(::testing::internal::GetCapturedStderr());
    std::vector<std::string> lines;
    for (std::string line; std::getline(all, line);) {
      EXPECT_THAT(line, Not(HasSubstr("secret-key")));
      if (line.find(" router.audit ") != std::string::npos) lines.push_back(line);
    }
    return lines;
  }
  int Http(const std::string& method, const std::string& path, const std::string& body = "",
           const std::string& key = "secret-key-a") {
    return Call(cluster_->http(), method, path, body, {"authorization: Bearer " + key}).status;
  }
  void CreateByGrpc(const std::string& name, const std::string& key) {
    grpc::ClientContext context;
    context.AddMetadata("authorization", "Bearer " + key);
    v1::CreateTenantNamespaceRequest request;
    request.set_name(name);
    v1::TenantNamespace answer;
    (void)admin_->CreateNamespace(&context, request, &answer);
  }

  const testing::TempDir dir_;
  std::unique_ptr<kvstore::KvStoreServer> store_;
  std::unique_ptr<testing::FakeCluster> cluster_;
  std::unique_ptr<v1::Admin::Stub> admin_;
};

TEST_F(AuditTest, NamespacesByHttp) {
  EXPECT_THAT(
      LinesOf([&] {
        EXPECT_EQ(Http("POST", "/admin/v1/namespaces", R"({"name":"docs"})"), 200);
        EXPECT_EQ(Http("PATCH", "/admin/v1/namespaces/docs", R"({"quota_bytes":1000})"), 200);
        EXPECT_EQ(Http("DELETE", "/admin/v1/namespaces/docs"), 200);
        EXPECT_EQ(Http("DELETE", "/admin/v1/namespaces/docs"), 404);
      }),
      ElementsAre(HasSubstr("caller=alice api=http call=CreateNamespace target=docs result=OK"),
                  HasSubstr("caller=alice api=http call=UpdateNamespace target=docs result=OK"),
                  HasSubstr("caller=alice api=http call=DeleteNamespace target=docs result=OK"),
                  HasSubstr("caller=alice api=http call=DeleteNamespace target=docs result=NOT_FOUND message=")));
}

TEST_F(AuditTest, KnowledgeBasesByHttp) {
  EXPECT_THAT(LinesOf([&] {
                Http("POST", "/admin/v1/knowledge_bases", "{");
                Http("POST", "/admin/v1/knowledge_bases/manual/swap", R"({"version":7})");
                Http("POST", "/admin/v1/knowledge_bases/manual/rollback");
                Http("DELETE", "/admin/v1/knowledge_bases/manual/versions/3");
              }),
              ElementsAre(AllOf(HasSubstr("call=PublishKnowledgeBase"), HasSubstr("result=INVALID_ARGUMENT")),
                          HasSubstr("call=SwapKnowledgeBase target=manual result=NOT_FOUND"),
                          HasSubstr("call=RollbackKnowledgeBase target=manual result=NOT_FOUND"),
                          HasSubstr("call=DeleteKnowledgeBase target=manual/3 result=NOT_FOUND")));
}

TEST_F(AuditTest, ByGrpcAndRefused) {
  EXPECT_THAT(
      LinesOf([&] {
        CreateByGrpc("docs", "secret-key-a");
        CreateByGrpc("docs", "secret-key-a");
        CreateByGrpc("docs", "secret-key-wrong");
        EXPECT_EQ(Http("DELETE", "/admin/v1/namespaces/docs", "", "secret-key-wrong"), 401);
      }),
      ElementsAre(HasSubstr("caller=alice api=grpc call=CreateNamespace target=docs result=OK"),
                  HasSubstr("caller=alice api=grpc call=CreateNamespace target=docs result=ALREADY_EXISTS"),
                  HasSubstr("caller=unknown api=grpc call=CreateNamespace target=docs result=UNAUTHENTICATED"),
                  HasSubstr("caller=unknown api=http call=DeleteNamespace target=\"\" result=UNAUTHENTICATED")));
}

TEST_F(AuditTest, OperatorsAndThoseWhoAreNone) {
  EXPECT_THAT(LinesOf([&] {
                const std::string d0 = "/control/v1/workers/d0/drain";
                EXPECT_EQ(Http("POST", d0, R"({"draining":true})", "secret-key-o"), 200);
                EXPECT_EQ(Http("POST", d0, R"({"draining":false})", "secret-key-o"), 200);
                EXPECT_EQ(Http("POST", "/control/v1/workers/x/drain", R"({"draining":true})", "secret-key-o"), 404);
                EXPECT_EQ(Http("POST", "/control/v1/requests/r1/cancel", "", "secret-key-o"), 404);
                EXPECT_EQ(Http("POST", d0, R"({"draining":true})"), 403);
              }),
              ElementsAre(HasSubstr("caller=operator api=http call=DrainWorker target=d0 result=OK"),
                          HasSubstr("caller=operator api=http call=UndrainWorker target=d0 result=OK"),
                          HasSubstr("caller=operator api=http call=DrainWorker target=x result=NOT_FOUND"),
                          HasSubstr("caller=operator api=http call=CancelRequest target=r1 result=NOT_FOUND"),
                          HasSubstr("caller=alice api=http call=Control target=/control/v1/workers/d0/drain "
                                    "result=PERMISSION_DENIED")));
}

TEST_F(AuditTest, ReadingLeavesNoLine) {
  EXPECT_THAT(LinesOf([&] {
                EXPECT_EQ(Http("GET", "/admin/v1/namespaces"), 200);
                EXPECT_EQ(Http("GET", "/admin/v1/knowledge_bases"), 200);
                EXPECT_EQ(Http("GET", "/control/v1/status", "", "secret-key-o"), 200);
              }),
              IsEmpty());
}

}  // namespace
}  // namespace spl::router
