// The admin API by gRPC, and parts of a knowledge base in gRPC requests.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <fstream>

#include "services/kvstore/kvstore_server.h"
#include "spl/v1/admin.grpc.pb.h"
#include "spl/v1/inference.grpc.pb.h"
#include "tests/support/fake_cluster.h"
#include "tests/support/temp_dir.h"

namespace spl::router {
namespace {

using grpc::StatusCode;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class AdminGrpcTest : public ::testing::Test {
 protected:
  AdminGrpcTest() {
    kvstore::KvStoreOptions options;
    options.metrics_listen = "";
    options.data_dir = dir_.path() + "/store";
    options.disk_bytes = 64 << 20;
    options.memory_bytes = 8 << 20;
    store_ = std::move(kvstore::KvStoreServer::Start(options)).value();
    cluster_ = std::make_unique<testing::FakeCluster>(1, 1, store_->grpc_address());
    std::ofstream(dir_.path() + "/keys") << "key-a alice\nkey-b bob\n";
    cluster_->options.api_keys_file = dir_.path() + "/keys";
    cluster_->StartRouter();
    const auto channel = grpc::CreateChannel(cluster_->router->grpc_address(), grpc::InsecureChannelCredentials());
    admin_ = v1::Admin::NewStub(channel);
    inference_ = v1::Inference::NewStub(channel);
  }
  ~AdminGrpcTest() override { cluster_.reset(); }

  using Stub = v1::Admin::Stub;
  template <typename Request, typename Response>
  grpc::Status Call(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                    const Request& request, Response* response, const std::string& key = "key-a") {
    grpc::ClientContext context;
    if (!key.empty()) context.AddMetadata("authorization", "Bearer " + key);
    return (admin_.get()->*method)(&context, request, response);
  }
  grpc::Status Publish(const v1::PublishKnowledgeBaseRequest& request, v1::KnowledgeBaseVersion* version = nullptr,
                       int* progress = nullptr, const std::string& key = "key-a") {
    grpc::ClientContext context;
    if (!key.empty()) context.AddMetadata("authorization", "Bearer " + key);
    auto reader = admin_->PublishKnowledgeBase(&context, request);
    v1::PublishKnowledgeBaseResponse response;
    while (reader->Read(&response)) {
      if (response.has_progress() && progress != nullptr) ++*progress;
      if (response.has_version() && version != nullptr) *version = response.version();
    }
    return reader->Finish();
  }
  static v1::PublishKnowledgeBaseRequest Request(const std::string& name,
                                                 const std::vector<std::pair<std::string, std::string>>& documents) {
    v1::PublishKnowledgeBaseRequest request;
    request.set_name(name);
    for (const auto& [id, text] : documents) {
      request.add_documents()->set_id(id);
      request.mutable_documents()->rbegin()->set_text(text);
    }
    return request;
  }
  grpc::Status Ask(const v1::GenerateRequest& request, std::string* text, v1::Receipt* receipt = nullptr) {
    grpc::ClientContext context;
    context.AddMetadata("authorization", "Bearer key-a");
    auto reader = inference_->Generate(&context, request);
    v1::GenerateResponse response;
    while (reader->Read(&response)) {
      if (response.has_delta()) *text += response.delta().text();
      if (response.has_final() && receipt != nullptr) *receipt = response.final().receipt();
    }
    return reader->Finish();
  }

  testing::TempDir dir_;
  std::unique_ptr<kvstore::KvStoreServer> store_;
  std::unique_ptr<testing::FakeCluster> cluster_;
  std::unique_ptr<v1::Admin::Stub> admin_;
  std::unique_ptr<v1::Inference::Stub> inference_;
};

TEST_F(AdminGrpcTest, PublishAskSwapRollbackDelete) {
  v1::KnowledgeBaseVersion version;
  int progress = 0;
  ASSERT_TRUE(Publish(Request("b", {{"x", "one"}, {"y", "same"}}), &version, &progress).ok());
  EXPECT_EQ(version.version(), 1u);
  EXPECT_EQ(version.state(), "ready");
  EXPECT_TRUE(version.current());
  EXPECT_EQ(version.model_fingerprint().size(), 32u);
  EXPECT_GE(progress, 1);
  v1::PublishKnowledgeBaseRequest second = Request("b", {{"x", "two"}, {"z", "new"}});
  second.set_swap(false);
  ASSERT_TRUE(Publish(second, &version).ok());
  EXPECT_FALSE(version.current());

  v1::GenerateRequest request;
  v1::ContentPart* part = request.mutable_prompt()->mutable_parts()->add_parts();
  part->set_segment(true);
  part->set_knowledge_base("b");
  part->set_document("x");
  request.mutable_sampling()->set_max_tokens(4);
  std::string text;
  v1::Receipt receipt;
  ASSERT_TRUE(Ask(request, &text, &receipt).ok());
  EXPECT_THAT(text, HasSubstr("one"));
  EXPECT_EQ(receipt.knowledge_bases().at("b"), 1u);

  v1::SwapKnowledgeBaseRequest swap;
  swap.set_name("b");
  swap.set_version(2);
  v1::KnowledgeBase base;
  ASSERT_TRUE(Call(&Stub::SwapKnowledgeBase, swap, &base).ok());
  EXPECT_EQ(base.current(), 2u);
  text.clear();
  ASSERT_TRUE(Ask(request, &text).ok());
  EXPECT_THAT(text, HasSubstr("two"));

  v1::DiffKnowledgeBaseRequest diff;
  diff.set_name("b");
  v1::DiffKnowledgeBaseResponse difference;
  ASSERT_TRUE(Call(&Stub::DiffKnowledgeBase, diff, &difference).ok());
  EXPECT_THAT(difference.added(), ElementsAre("z"));
  EXPECT_THAT(difference.removed(), ElementsAre("y"));
  EXPECT_THAT(difference.changed(), ElementsAre("x"));

  v1::RollbackKnowledgeBaseRequest rollback;
  rollback.set_name("b");
  v1::KnowledgeBase rolled_back;
  ASSERT_TRUE(Call(&Stub::RollbackKnowledgeBase, rollback, &rolled_back).ok());
  EXPECT_EQ(rolled_back.current(), 1u);

  v1::GetKnowledgeBaseRequest get;
  get.set_name("b");
  get.set_version(2);
  v1::KnowledgeBase shown;
  ASSERT_TRUE(Call(&Stub::GetKnowledgeBase, get, &shown).ok());
  EXPECT_EQ(shown.versions_size(), 2);
  EXPECT_EQ(shown.documents(1).id(), "z");
  EXPECT_EQ(shown.shown_version(), 2u);
  v1::ListKnowledgeBasesResponse list;
  ASSERT_TRUE(Call(&Stub::ListKnowledgeBases, v1::ListKnowledgeBasesRequest(), &list).ok());
  EXPECT_EQ(list.knowledge_bases_size(), 1);
  v1::ListKnowledgeBasesResponse of_bob;
  ASSERT_TRUE(Call(&Stub::ListKnowledgeBases, v1::ListKnowledgeBasesRequest(), &of_bob, "key-b").ok());
  EXPECT_EQ(of_bob.knowledge_bases_size(), 0);

  v1::DeleteKnowledgeBaseRequest remove;
  remove.set_name("b");
  v1::DeleteKnowledgeBaseResponse removed;
  ASSERT_TRUE(Call(&Stub::DeleteKnowledgeBase, remove, &removed).ok());
  EXPECT_EQ(removed.versions(), 2u);
  EXPECT_EQ(removed.chunks(), 4u);
  EXPECT_EQ(Call(&Stub::DeleteKnowledgeBase, remove, &removed).error_code(), StatusCode::NOT_FOUND);
  EXPECT_EQ(Ask(request, &text).error_code(), StatusCode::NOT_FOUND);
}

TEST_F(AdminGrpcTest, BadInputAndState) {
  EXPECT_EQ(Publish(Request("b", {{"x", "t"}}), nullptr, nullptr, "").error_code(), StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(Publish(Request("b", {{"x", "t"}}), nullptr, nullptr, "key-c").error_code(), StatusCode::UNAUTHENTICATED);
  v1::ListKnowledgeBasesResponse list;
  EXPECT_EQ(Call(&Stub::ListKnowledgeBases, v1::ListKnowledgeBasesRequest(), &list, "").error_code(),
            StatusCode::UNAUTHENTICATED);
  for (const auto& request :
       {v1::PublishKnowledgeBaseRequest(), Request("a b", {{"x", "t"}}), Request("b", {}), Request("b", {{"", "t"}}),
        Request("b", {{"x", ""}}), Request("b", {{"x", "t"}, {"x", "u"}}),
        Request("b", {{"x", std::string(1 << 17, 'y')}}), Request("b", {{std::string(257, 'i'), "t"}})}) {
    EXPECT_EQ(Publish(request).error_code(), StatusCode::INVALID_ARGUMENT) << request.ShortDebugString().substr(0, 80);
  }
  ASSERT_TRUE(Publish(Request("b", {{"x", "t"}})).ok());
  v1::KnowledgeBase base;
  v1::RollbackKnowledgeBaseRequest rollback;
  rollback.set_name("b");
  EXPECT_EQ(Call(&Stub::RollbackKnowledgeBase, rollback, &base).error_code(), StatusCode::FAILED_PRECONDITION);
  v1::SwapKnowledgeBaseRequest swap;
  swap.set_name("b");
  EXPECT_EQ(Call(&Stub::SwapKnowledgeBase, swap, &base).error_code(), StatusCode::NOT_FOUND);
  v1::DeleteKnowledgeBaseRequest remove;
  remove.set_name("b");
  remove.set_version(1);
  v1::DeleteKnowledgeBaseResponse removed;
  EXPECT_EQ(Call(&Stub::DeleteKnowledgeBase, remove, &removed).error_code(), StatusCode::FAILED_PRECONDITION);

  v1::GenerateRequest request;
  v1::ContentPart* part = request.mutable_prompt()->mutable_parts()->add_parts();
  part->set_knowledge_base("b");
  std::string text;
  EXPECT_EQ(Ask(request, &text).error_code(), StatusCode::INVALID_ARGUMENT) << "not marked as a segment";
  part->set_segment(true);
  part->set_document("x");
  part->set_text("t");
  EXPECT_EQ(Ask(request, &text).error_code(), StatusCode::INVALID_ARGUMENT) << "text and document";
  part->clear_text();
  part->set_namespace_name("n");
  EXPECT_EQ(Ask(request, &text).error_code(), StatusCode::INVALID_ARGUMENT) << "namespace and knowledge base";
  part->clear_namespace_name();
  part->set_document("none");
  EXPECT_EQ(Ask(request, &text).error_code(), StatusCode::NOT_FOUND);
  v1::GenerateRequest ids;
  ids.mutable_prompt()->mutable_tokens()->mutable_ids()->Add(5);
  v1::TokenSegment* segment = ids.mutable_prompt()->mutable_tokens()->add_segments();
  segment->set_end(1);
  segment->set_knowledge_base("b");
  ids.mutable_sampling()->set_max_tokens(1);
  EXPECT_TRUE(Ask(ids, &text).ok());
  EXPECT_TRUE(cluster_->prefill[0]->last_run().segments(0).frozen());
  segment->set_namespace_name("n");
  EXPECT_EQ(Ask(ids, &text).error_code(), StatusCode::INVALID_ARGUMENT);
}

TEST_F(AdminGrpcTest, ACancelledPublishEndsOnTheWorker) {
  cluster_->prefill[0]->HoldPublishes(true);
  grpc::ClientContext context;
  context.AddMetadata("authorization", "Bearer key-a");
  auto reader = admin_->PublishKnowledgeBase(&context, Request("b", {{"x", "t"}}));
  v1::PublishKnowledgeBaseResponse response;
  ASSERT_TRUE(reader->Read(&response));
  ASSERT_TRUE(cluster_->prefill[0]->WaitFor([](const auto& c) { return c.publishes == 1; }));
  context.TryCancel();
  while (reader->Read(&response)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), StatusCode::CANCELLED);
  EXPECT_TRUE(cluster_->prefill[0]->WaitFor([](const auto& c) { return c.publishes_cancelled == 1; }));
}

TEST_F(AdminGrpcTest, Namespaces) {
  v1::CreateTenantNamespaceRequest create;
  create.set_name("docs");
  create.set_quota_bytes(100);
  v1::TenantNamespace ns;
  ASSERT_TRUE(Call(&Stub::CreateNamespace, create, &ns).ok());
  EXPECT_EQ(Call(&Stub::CreateNamespace, create, &ns).error_code(), StatusCode::ALREADY_EXISTS);
  v1::UpdateTenantNamespaceRequest update;
  update.set_name("docs");
  update.set_ttl_seconds(9);
  v1::TenantNamespace updated;
  ASSERT_TRUE(Call(&Stub::UpdateNamespace, update, &updated).ok());
  EXPECT_EQ(updated.quota_bytes(), 100u);
  EXPECT_EQ(updated.ttl_seconds(), 9u);
  v1::GetTenantNamespaceRequest get;
  get.set_name("docs");
  EXPECT_EQ(Call(&Stub::GetNamespace, get, &ns, "key-b").error_code(), StatusCode::NOT_FOUND);
  v1::ListTenantNamespacesResponse list;
  ASSERT_TRUE(Call(&Stub::ListNamespaces, v1::ListTenantNamespacesRequest(), &list).ok());
  ASSERT_EQ(list.namespaces_size(), 1);
  EXPECT_EQ(list.namespaces(0).name(), "docs");
  v1::DeleteTenantNamespaceRequest remove;
  remove.set_name("docs");
  v1::DeleteTenantNamespaceResponse removed;
  EXPECT_TRUE(Call(&Stub::DeleteNamespace, remove, &removed).ok());
  EXPECT_EQ(Call(&Stub::DeleteNamespace, remove, &removed).error_code(), StatusCode::NOT_FOUND);
}

}  // namespace
}  // namespace spl::router
