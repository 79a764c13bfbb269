// The server and the remote client over real gRPC, in one process.
#include "services/kvstore/kvstore_server.h"

#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>

#include <thread>

#include "services/base/fault_point.h"
#include "services/base/grpc_status.h"
#include "services/chunk/remote/chunk_wire.h"
#include "services/chunk/remote/remote_chunk_store.h"
#include "spl/v1/kvstore.grpc.pb.h"
#include "tests/support/chunks.h"
#include "tests/support/temp_dir.h"

namespace spl::kvstore {
namespace {

using chunk::Chunk;
using testing::SameChunk;
using testing::TempDir;
using testing::TestChunk;
using testing::TestKey;

std::chrono::steady_clock::time_point In(std::chrono::milliseconds delay) {
  return std::chrono::steady_clock::now() + delay;
}
constexpr std::chrono::seconds kSoon{20};

std::vector<chunk::ChunkKey> Keys(uint64_t from, uint64_t to) {
  std::vector<chunk::ChunkKey> keys;
  for (uint64_t n = from; n < to; ++n) keys.push_back(TestKey(n));
  return keys;
}

struct Fixture {
  explicit Fixture(const std::string& data_dir = "", uint64_t memory_bytes = 64 << 20) {
    KvStoreOptions options;
    options.data_dir = data_dir;
    options.memory_bytes = memory_bytes;
    auto started = KvStoreServer::Start(options);
    EXPECT_TRUE(started.ok()) << started.status();
    server = std::move(started).value();
    client = std::move(chunk::RemoteChunkStore::Connect(server->grpc_address())).value();
  }
  std::unique_ptr<v1::KvStore::Stub> Stub() const {
    return v1::KvStore::NewStub(grpc::CreateChannel(server->grpc_address(), grpc::InsecureChannelCredentials()));
  }
  v1::StoreStats Stats() const {
    grpc::ClientContext context;
    v1::StoreStats stats;
    EXPECT_TRUE(Stub()->GetStats(&context, {}, &stats).ok());
    return stats;
  }
  std::unique_ptr<KvStoreServer> server;
  std::unique_ptr<chunk::RemoteChunkStore> client;
};

TEST(KvStoreServer, PutCountGet) {
  Fixture f;
  std::vector<Chunk> chunks;
  for (uint64_t n = 0; n < 6; ++n) chunks.push_back(TestChunk(n, n == 3 ? (5 << 20) + 3 : 1000));
  ASSERT_TRUE(f.client->Put(chunks, In(kSoon)).ok());
  ASSERT_TRUE(f.client->Put(chunks, In(kSoon)).ok()) << "storing again is a no-op";
  EXPECT_EQ(*f.client->CountLeading(Keys(0, 10), In(kSoon)), 6u);
  EXPECT_EQ(*f.client->CountLeading(Keys(7, 9), In(kSoon)), 0u);
  std::vector<Chunk> got;
  EXPECT_EQ(*f.client->GetLeading(Keys(0, 10), In(kSoon),
                                  [&](Chunk&& c) {
                                    got.push_back(std::move(c));
                                    return true;
                                  }),
            6u);
  ASSERT_EQ(got.size(), 6u);
  for (size_t i = 0; i < 6; ++i) EXPECT_TRUE(SameChunk(got[i], chunks[i])) << i;
  int seen = 0;
  EXPECT_EQ(*f.client->GetLeading(Keys(0, 6), In(kSoon), [&](Chunk&&) { return ++seen < 3; }), 2u);
  EXPECT_EQ(f.Stats().memory_chunks(), 6u);
  EXPECT_EQ(f.Stats().misses(), 1u);
}

TEST(KvStoreServer, SkipMissingGoesPastGaps) {
  Fixture f;
  const std::vector<Chunk> chunks = {TestChunk(0, 100), TestChunk(2, 100)};
  ASSERT_TRUE(f.client->Put(chunks, In(kSoon)).ok());
  for (const bool skip : {false, true}) {
    grpc::ClientContext context;
    v1::GetChunksRequest request;
    for (const auto& key : Keys(0, 3)) request.add_keys(key.bytes.data(), 32);
    request.set_skip_missing(skip);
    const auto stub = f.Stub();
    const auto reader = stub->Get(&context, request);
    v1::ChunkPart part;
    int parts = 0;
    while (reader->Read(&part)) ++parts;
    EXPECT_TRUE(reader->Finish().ok());
    EXPECT_EQ(parts, skip ? 2 : 1);
  }
}

TEST(KvStoreServer, RefusesBadRequests) {
  Fixture f;
  const auto stub = f.Stub();
  {
    grpc::ClientContext context;
    v1::ContainsRequest request;
    request.add_keys("short");
    v1::ContainsResponse response;
    EXPECT_EQ(stub->Contains(&context, request, &response).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  }
  {
    grpc::ClientContext context;
    v1::GetChunksRequest request;
    for (int i = 0; i <= 1 << 16; ++i) request.add_keys(std::string(32, 'k'));
    const auto reader = stub->Get(&context, request);
    v1::ChunkPart part;
    EXPECT_FALSE(reader->Read(&part));
    EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  }
  Chunk damaged = TestChunk(1, 1000);
  damaged.payload[7] ^= std::byte(4);
  EXPECT_EQ(f.client->Put({&damaged, 1}, In(kSoon)).code(), absl::StatusCode::kDataLoss);
  {  // a stream that ends in the middle of a chunk
    grpc::ClientContext context;
    v1::PutChunksResponse response;
    const auto writer = stub->Put(&context, &response);
    const Chunk large = TestChunk(2, 3 << 20);
    chunk::ChunkCutter cutter(large);
    v1::ChunkPart part;
    cutter.Next(part);
    writer->Write(part);
    writer->WritesDone();
    EXPECT_EQ(writer->Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  }
  EXPECT_EQ(f.Stats().memory_chunks(), 0u);
  EXPECT_EQ(*f.client->CountLeading(Keys(0, 3), In(kSoon)), 0u) << "the server lives on";
}

TEST(KvStoreServer, ClientFailuresAreStatuses) {
  std::string address;
  { address = Fixture().server->grpc_address(); }
  const auto client = std::move(chunk::RemoteChunkStore::Connect(address)).value();
  const auto start = std::chrono::steady_clock::now();
  const absl::Status status = client->CountLeading(Keys(0, 1), In(std::chrono::seconds(2))).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_NE(status.ToString().find(address), std::string::npos);
  const Chunk chunk = TestChunk(1, 100);
  EXPECT_FALSE(client->Put({&chunk, 1}, In(std::chrono::seconds(2))).ok());
  EXPECT_EQ(client->GetLeading(Keys(0, 1), In(std::chrono::seconds(2)), [](Chunk&&) { return true; }).status().code(),
            absl::StatusCode::kUnavailable);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(8));
  EXPECT_EQ(chunk::RemoteChunkStore::Connect("nowhere").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(KvStoreServer, DeadlinesEndCalls) {
  ScopedFaults faults;
  TempDir dir;
  Fixture f(dir.path() + "/data", 0);
  const std::vector<Chunk> chunks = {TestChunk(0, 1000), TestChunk(1, 1000)};
  ASSERT_TRUE(f.client->Put(chunks, In(kSoon)).ok());
  while (f.Stats().disk_chunks() < 2) std::this_thread::yield();
  ASSERT_TRUE(ArmFaultFromFlag("kvstore.slab.read=delay_until(read)").ok());
  int seen = 0;
  const auto got =
      f.client->GetLeading(Keys(0, 2), In(std::chrono::milliseconds(100)), [&](Chunk&&) { return ++seen > 0; });
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(*got, 0u) << "a deadline gives what there was until then";
  FireFaultEvent("read");
  EXPECT_EQ(f.client->CountLeading(Keys(0, 2), In(std::chrono::milliseconds(-1))).status().code(),
            absl::StatusCode::kDeadlineExceeded);
}

TEST(KvStoreServer, ACorruptChunkOnDiskIsAMissAndCounted) {
  ScopedFaults faults;
  TempDir dir;
  Fixture f(dir.path() + "/data", 0);
  ASSERT_TRUE(ArmFaultFromFlag("kvstore.slab.write=corrupt@2").ok());
  const std::vector<Chunk> chunks = {TestChunk(0, 1000), TestChunk(1, 1000), TestChunk(2, 1000)};
  ASSERT_TRUE(f.client->Put(chunks, In(kSoon)).ok());
  while (f.Stats().disk_chunks() < 3) std::this_thread::yield();
  uint64_t next = 0;
  EXPECT_EQ(
      *f.client->GetLeading(Keys(0, 3), In(kSoon), [&](Chunk&& c) { return SameChunk(c, TestChunk(next++, 1000)); }),
      1u);
  EXPECT_EQ(f.Stats().corrupt_dropped(), 1u);
  EXPECT_EQ(*f.client->CountLeading(Keys(0, 3), In(kSoon)), 1u);
}

TEST(KvStoreServer, ConcurrentClients) {
  TempDir dir;
  Fixture f(dir.path() + "/data", 1 << 20);
  std::vector<std::thread> threads;
  std::atomic<int> num_wrong{0};
  for (uint64_t t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      const auto client = std::move(chunk::RemoteChunkStore::Connect(f.server->grpc_address())).value();
      for (uint64_t round = 0; round < 10; ++round) {
        const uint64_t from = (t + round) % 5 * 10;
        std::vector<Chunk> chunks;
        for (uint64_t n = from; n < from + 10; ++n) chunks.push_back(TestChunk(n, 20000));
        if (!client->Put(chunks, In(kSoon)).ok()) ++num_wrong;
        uint64_t next = from;
        const auto got = client->GetLeading(Keys(from, from + 10), In(kSoon), [&](Chunk&& c) {
          if (!SameChunk(c, TestChunk(next++, 20000))) ++num_wrong;
          return true;
        });
        if (!got.ok() || *got != 10) ++num_wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_wrong.load(), 0);
}

TEST(KvStoreServer, AStopKeepsEverythingAccepted) {
  TempDir dir;
  std::vector<Chunk> chunks;
  for (uint64_t n = 0; n < 100; ++n) chunks.push_back(TestChunk(n, 30000));
  {
    Fixture f(dir.path() + "/data");
    ASSERT_TRUE(f.client->Put(chunks, In(kSoon)).ok());
    f.server->Stop();
  }
  Fixture f(dir.path() + "/data");
  EXPECT_EQ(*f.client->GetLeading(Keys(0, 100), In(kSoon), [](Chunk&&) { return true; }), 100u);
}

TEST(KvStoreServer, RefusesBadOptions) {
  KvStoreOptions options;
  options.num_threads = 0;
  EXPECT_EQ(KvStoreServer::Start(options).status().code(), absl::StatusCode::kInvalidArgument);
  options = KvStoreOptions();
  options.data_dir = "/proc/not-a-directory";
  EXPECT_EQ(KvStoreServer::Start(options).status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace spl::kvstore
