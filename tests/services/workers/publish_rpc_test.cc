// Prefill.Publish over the wire with a real chunk store behind it.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <random>

#include "kernels/backend/backend.h"
#include "services/base/grpc_status.h"
#include "services/kvstore/kvstore_server.h"
#include "services/prefill/prefill_server.h"
#include "services/wire/convert.h"
#include "spl/v1/kvstore_admin.grpc.pb.h"
#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"

namespace spl {
namespace {

class PublishRpcTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    auto model = engine::Model::Load(test::kTinyModel, kernels::MakeCpuBackend());
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *model;
  }
  static void TearDownTestSuite() { model_.reset(); }

  void StartStore(const std::string& data_dir) {
    kvstore::KvStoreOptions options;
    options.data_dir = data_dir;
    options.memory_bytes = 64 << 20;
    auto store = kvstore::KvStoreServer::Start(options);
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = std::move(*store);
    admin_ = v1::KvStoreAdmin::NewStub(Channel(store_->grpc_address()));
  }
  void StartPrefill(const std::string& store_address) {
    prefill::PrefillServerOptions options;
    options.metrics_listen = "";
    options.kv_bytes = 64 << 20;
    options.store_address = store_address;
    auto prefill = prefill::PrefillServer::Start(model_, options);
    ASSERT_TRUE(prefill.ok()) << prefill.status();
    prefill_ = std::move(*prefill);
    stub_ = v1::Prefill::NewStub(Channel(prefill_->grpc_address()));
  }
  void TearDown() override {
    if (prefill_) prefill_->Stop();
  }
  static std::shared_ptr<grpc::Channel> Channel(const std::string& address) {
    return grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
  }

  v1::PublishRequest Request(uint32_t seed, uint32_t length) const {
    v1::PublishRequest request;
    std::mt19937 random(seed);
    for (uint32_t i = 0; i < length; ++i) request.add_token_ids(static_cast<uint32_t>(random() % 4000));
    v1::TokenSegment& segment = *request.add_segments();
    segment.set_begin(10);
    segment.set_end(length);
    segment.set_namespace_key(std::string(32, 'k'));
    return request;
  }
  absl::Status Publish(const v1::PublishRequest& request, v1::PublishResponse* response = nullptr) {
    v1::PublishResponse ignored;
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    return FromGrpcStatus(stub_->Publish(&context, request, response != nullptr ? response : &ignored));
  }
  v1::Namespace Stat() {
    grpc::ClientContext context;
    v1::StatNamespaceRequest request;
    request.set_id(std::string(32, 'k'));
    v1::Namespace space;
    EXPECT_TRUE(admin_->StatNamespace(&context, request, &space).ok());
    return space;
  }

  static inline std::shared_ptr<const engine::Model> model_;
  std::unique_ptr<kvstore::KvStoreServer> store_;
  std::unique_ptr<prefill::PrefillServer> prefill_;
  std::unique_ptr<v1::Prefill::Stub> stub_;
  std::unique_ptr<v1::KvStoreAdmin::Stub> admin_;
};

TEST_F(PublishRpcTest, StoresSegmentsDurablyAndSaysWhatExisted) {
  spl::testing::TempDir dir;
  StartStore(dir.path() + "/data");
  StartPrefill(store_->grpc_address());
  v1::PublishRequest request = Request(1, 210);
  request.set_durable(true);
  request.set_pin(v1::PIN_SOFT);
  v1::PublishResponse response;
  ASSERT_TRUE(Publish(request, &response).ok());
  EXPECT_EQ(response.chunks(), 4u);
  EXPECT_EQ(response.existing_chunks(), 0u);
  EXPECT_EQ(response.bytes(), 4 * engine::ChunkPayloadBytes(*model_));
  EXPECT_EQ(response.computed_tokens(), 210u);
  EXPECT_GT(response.prefill_seconds(), 0);
  EXPECT_EQ(Stat().chunks(), 4u + 4 + 1) << "and their quantized copies, and the segment's summary";
  ASSERT_TRUE(Publish(request, &response).ok());
  EXPECT_EQ(response.existing_chunks(), 4u);
  EXPECT_EQ(response.computed_tokens(), 210u - 192u);
  // On disk: a store that is started on the same folder has them.
  prefill_->Stop();
  store_.reset();
  StartStore(dir.path() + "/data");
  EXPECT_EQ(Stat().chunks(), 4u + 4 + 1);
}

TEST_F(PublishRpcTest, ErrorsSayWhatIsMissing) {
  StartPrefill("");
  EXPECT_EQ(Publish(Request(2, 100)).code(), absl::StatusCode::kFailedPrecondition);
  prefill_->Stop();
  StartStore("");
  StartPrefill(store_->grpc_address());
  {
    grpc::ClientContext context;
    v1::CreateNamespaceRequest request;
    request.set_id(std::string(32, 'k'));
    request.mutable_settings()->set_name("ships");
    request.mutable_settings()->set_quota_chunks(1);
    v1::Namespace created;
    ASSERT_TRUE(admin_->CreateNamespace(&context, request, &created).ok());
  }
  const absl::Status full = Publish(Request(3, 210));
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted) << full;
  EXPECT_THAT(full.ToString(), ::testing::HasSubstr("'ships'"));
  v1::PublishRequest request = Request(4, 60);
  request.set_durable(true);
  const absl::Status no_disk = Publish(request);
  EXPECT_EQ(no_disk.code(), absl::StatusCode::kFailedPrecondition) << no_disk;
  EXPECT_THAT(no_disk.ToString(), ::testing::HasSubstr("--data-dir"));
  request.set_pin(static_cast<v1::Pin>(7));
  EXPECT_EQ(Publish(request).code(), absl::StatusCode::kInvalidArgument);
  request = Request(4, 60);
  request.mutable_segments(0)->set_namespace_key("short");
  EXPECT_EQ(Publish(request).code(), absl::StatusCode::kInvalidArgument);
  store_.reset();
  const absl::Status gone = Publish(Request(5, 100));
  EXPECT_EQ(gone.code(), absl::StatusCode::kUnavailable) << gone;
}

}  // namespace
}  // namespace spl
