// A store that stops ends the calls that it has as cancelled. Its clients take that for a loss, as a crash would be:
// they go on with another store, or with what they have.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <memory>

#include "services/chunk/remote/cluster_chunk_store.h"
#include "services/chunk/remote/record_client.h"
#include "services/chunk/remote/remote_chunk_store.h"
#include "spl/v1/kvstore.grpc.pb.h"
#include "spl/v1/kvstore_records.grpc.pb.h"
#include "tests/support/chunks.h"

namespace spl::chunk {
namespace {

using testing::TestChunk;
using testing::TestKey;

std::chrono::steady_clock::time_point Soon() { return std::chrono::steady_clock::now() + std::chrono::seconds(20); }

const grpc::Status kStopped(grpc::StatusCode::CANCELLED, "");

class StoppingChunks final : public v1::KvStore::Service {
  grpc::Status Contains(grpc::ServerContext*, const v1::ContainsRequest*, v1::ContainsResponse*) override {
    return kStopped;
  }
  grpc::Status Get(grpc::ServerContext*, const v1::GetChunksRequest*, grpc::ServerWriter<v1::ChunkPart>*) override {
    return kStopped;
  }
  grpc::Status Put(grpc::ServerContext*, grpc::ServerReader<v1::ChunkPart>*, v1::PutChunksResponse*) override {
    return kStopped;
  }
};

class StoppingRecords final : public v1::KvStoreRecords::Service {
  grpc::Status GetRecord(grpc::ServerContext*, const v1::GetRecordRequest*, v1::Record*) override { return kStopped; }
  grpc::Status PutRecord(grpc::ServerContext*, const v1::PutRecordRequest*, v1::PutRecordResponse*) override {
    return kStopped;
  }
};

class StoppingStoreTest : public ::testing::Test {
 protected:
  StoppingStoreTest() {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&chunks_);
    builder.RegisterService(&records_);
    server_ = builder.BuildAndStart();
    address_ = "127.0.0.1:" + std::to_string(port);
  }

  StoppingChunks chunks_;
  StoppingRecords records_;
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
};

TEST_F(StoppingStoreTest, CallsForRecordsAreLost) {
  const auto client = std::move(RecordClient::Connect(address_)).value();
  const absl::Status read = client->Get({}, "name", Soon()).status();
  EXPECT_EQ(read.code(), absl::StatusCode::kUnavailable) << read;
  EXPECT_NE(read.message().find(address_), std::string::npos) << read;
  EXPECT_EQ(client->Put({}, "name", "value", {}, Soon()).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(StoppingStoreTest, CallsForChunksAreLost) {
  const auto store = std::move(RemoteChunkStore::Connect(address_, {})).value();
  const ChunkKey key = TestKey(1);
  const Chunk chunk = TestChunk(1, 100);
  EXPECT_EQ(store->CountLeading({&key, 1}, Soon()).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(store->GetLeading({&key, 1}, Soon(), [](Chunk&&) { return true; }).status().code(),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(store->Put({&chunk, 1}, Soon()).code(), absl::StatusCode::kUnavailable);
}

// The one store of the cluster is left alone after the first loss: a miss, and no error.
TEST_F(StoppingStoreTest, AClusterOfStoresGoesOnWithoutIt) {
  const auto cluster = std::move(ClusterChunkStore::Connect(address_, {}, {})).value();
  const ChunkKey key = TestKey(1);
  const absl::StatusOr<size_t> found = cluster->CountLeading({&key, 1}, Soon());
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(*found, 0u);
  EXPECT_EQ(cluster->num_members_up(), 0u);
}

}  // namespace
}  // namespace spl::chunk
