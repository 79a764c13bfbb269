// Chunks by remote memory access: the server, its client and two transports in one process.
#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "services/base/fault_point.h"
#include "services/chunk/remote/chunk_wire.h"
#include "services/chunk/remote/remote_chunk_store.h"
#include "services/kvstore/kvstore_server.h"
#include "spl/v1/kvstore.grpc.pb.h"
#include "spl/v1/kvstore_admin.grpc.pb.h"
#include "tests/support/chunks.h"
#include "tests/support/eventually.h"
#include "tests/support/temp_dir.h"

namespace spl::kvstore {
namespace {

using chunk::Chunk;
using testing::SameChunk;
using testing::TempDir;
using testing::TestChunk;
using testing::TestKey;

std::chrono::steady_clock::time_point Soon() { return std::chrono::steady_clock::now() + std::chrono::seconds(20); }

std::vector<chunk::ChunkKey> Keys(uint64_t from, uint64_t to) {
  std::vector<chunk::ChunkKey> keys;
  for (uint64_t n = from; n < to; ++n) keys.push_back(TestKey(n));
  return keys;
}

size_t PayloadOf(uint64_t number) { return number % 7 == 3 ? 700'001 : 3000 + number * 131 % 5000; }

std::vector<Chunk> Chunks(uint64_t from, uint64_t to) {
  std::vector<Chunk> chunks;
  for (uint64_t n = from; n < to; ++n) chunks.push_back(TestChunk(n, PayloadOf(n)));
  return chunks;
}

std::unique_ptr<KvStoreServer> StartServer(const std::string& carrier, const std::string& data_dir = "",
                                           uint64_t memory_bytes = 64 << 20, const std::string& listen = "") {
  KvStoreOptions options;
  options.kv_transport = carrier;
  options.data_dir = data_dir;
  options.memory_bytes = memory_bytes;
  if (!listen.empty()) options.listen = listen;
  auto server = KvStoreServer::Start(options);
  EXPECT_TRUE(server.ok()) << server.status();
  return std::move(server).value();
}

struct Client {
  Client(const std::string& address, const std::string& carriers,
         std::optional<chunk::RemoteStoreOptions::Model> model = std::nullopt) {
    transport::TransportOptions options;
    options.carriers = carriers;
    transport = std::move(transport::KvTransport::Create(options)).value();
    chunk::RemoteStoreOptions remote;
    remote.transport = transport.get();
    remote.model = model;
    store = std::move(chunk::RemoteChunkStore::Connect(address, remote)).value();
    auto channel = grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
    rma = v1::KvStoreRma::NewStub(channel);
    plain = v1::KvStore::NewStub(channel);
  }
  ~Client() {
    store.reset();
    transport->Stop();
  }
  // How many of chunks from … to-1 arrive, in order, each right.
  size_t Get(uint64_t from, uint64_t to) {
    uint64_t next = from;
    const auto got = store->GetLeading(Keys(from, to), Soon(), [&](Chunk&& c) {
      EXPECT_TRUE(SameChunk(c, TestChunk(next, PayloadOf(next)))) << next;
      ++next;
      return true;
    });
    EXPECT_TRUE(got.ok()) << got.status();
    return got.ok() ? *got : 0;
  }
  v1::StoreStats Stats() const {
    grpc::ClientContext context;
    v1::StoreStats stats;
    EXPECT_TRUE(plain->GetStats(&context, {}, &stats).ok());
    return stats;
  }
  std::unique_ptr<transport::KvTransport> transport;
  std::unique_ptr<chunk::RemoteChunkStore> store;
  std::unique_ptr<v1::KvStoreRma::Stub> rma;
  std::unique_ptr<v1::KvStore::Stub> plain;
};

class KvStoreRma : public ::testing::TestWithParam<const char*> {};

TEST_P(KvStoreRma, PutsAndGets) {
  TempDir dir;
  const auto server = StartServer(GetParam(), dir.path() + "/data", 16 << 20);
  Client client(server->grpc_address(), GetParam());
  const std::vector<Chunk> chunks = Chunks(0, 200);  // 20 MiB: more than memory holds
  const auto put = client.store->PutWith(chunk::PointersTo(chunks), {.durable = true}, Soon());
  ASSERT_TRUE(put.ok()) << put.status();
  EXPECT_EQ(put->num_stored, 200u);
  EXPECT_EQ(put->num_durable, 200u);
  const auto again = client.store->PutWith(chunk::PointersTo(chunks), {}, Soon());
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->num_existing, 200u);
  EXPECT_EQ(again->num_durable, 200u);
  EXPECT_EQ(client.Get(0, 250), 200u);
  EXPECT_EQ(client.Get(150, 200), 50u);
  EXPECT_EQ(client.store->data_path(), GetParam());
  int seen = 0;
  EXPECT_EQ(*client.store->GetLeading(Keys(0, 200), Soon(), [&](Chunk&&) { return ++seen < 3; }), 2u);
  EXPECT_TRUE(test::Eventually([&] { return client.Stats().leases() == 0; }));
  EXPECT_EQ(client.Stats().reserved_bytes(), 0u);
}

TEST_P(KvStoreRma, FetchesIntoPiecesOfTheCaller) {
  const auto server = StartServer(GetParam());
  Client client(server->grpc_address(), GetParam());
  const std::vector<Chunk> chunks = Chunks(0, 20);
  ASSERT_TRUE(client.store->Put(chunks, Soon()).ok());
  std::vector<std::byte> memory(20 << 20);
  size_t used = 0;
  std::vector<chunk::Pieces> placed(20);
  const auto place = [&](size_t i, const chunk::ChunkHeader& header) -> chunk::Pieces {
    if (i == 15) return {};
    // Three pieces, apart from each other.
    const size_t a = header.payload_bytes / 3, b = header.payload_bytes / 2, c = header.payload_bytes - a - b;
    for (const size_t bytes : {a, b, c}) {
      placed[i].push_back({memory.data() + used, bytes});
      used += bytes + 100;
    }
    return placed[i];
  };
  size_t next = 0;
  const auto fetched =
      client.store->FetchLeading(Keys(0, 20), Soon(), place, [&](size_t i, const chunk::ChunkHeader& h) {
        EXPECT_EQ(i, next++);
        EXPECT_EQ(h.key, TestKey(i));
        std::vector<std::byte> joined;
        for (const auto& piece : placed[i]) joined.insert(joined.end(), piece.begin(), piece.end());
        EXPECT_EQ(joined, chunks[i].payload);
        return true;
      });
  ASSERT_TRUE(fetched.ok()) << fetched.status();
  EXPECT_EQ(*fetched, 15u);
  EXPECT_EQ(client.store
                ->FetchLeading(
                    Keys(0, 1), Soon(),
                    [&](size_t, const chunk::ChunkHeader&) {
                      return chunk::Pieces{{memory.data(), 1}};
                    },
                    [](size_t, const chunk::ChunkHeader&) { return true; })
                .status()
                .code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_P(KvStoreRma, LostAndWrongBytesAreNoticedAndFetchedByStream) {
  ScopedFaults faults;
  const auto server = StartServer(GetParam());
  Client client(server->grpc_address(), GetParam());
  ASSERT_TRUE(client.store->Put(Chunks(0, 10), Soon()).ok());
  ASSERT_TRUE(ArmFaultFromFlag("transport.get=drop@4").ok());
  EXPECT_EQ(client.Get(0, 10), 10u);
  EXPECT_GE(FaultHits("transport.get"), 4u);
  ASSERT_TRUE(ArmFaultFromFlag("transport.get=error(UNAVAILABLE)@2").ok());
  EXPECT_EQ(client.Get(0, 10), 10u);
  EXPECT_EQ(client.Stats().corrupt_dropped(), 0u) << "the store's own copy was good";
  ASSERT_TRUE(ArmFaultFromFlag("transport.put=drop").ok());
  EXPECT_EQ(client.store->Put(Chunks(20, 21), Soon()).code(), absl::StatusCode::kDataLoss);
  DisarmAllFaults();
  EXPECT_EQ(client.Get(20, 21), 0u) << "nothing of it is stored";
  ASSERT_TRUE(client.store->Put(Chunks(20, 21), Soon()).ok());
  EXPECT_EQ(client.Get(20, 21), 1u);
}

// A byte of the store's memory changes: counted, dropped, and the disk's copy serves.
TEST_P(KvStoreRma, DamagedMemoryIsDroppedAndCounted) {
  ScopedFaults faults;
  TempDir dir;
  for (const bool with_disk : {true, false}) {
    const auto server = StartServer(GetParam(), with_disk ? dir.path() + "/data" : "");
    Client client(server->grpc_address(), GetParam());
    const std::vector<Chunk> chunks = Chunks(0, 3);
    ASSERT_TRUE(client.store->PutWith(chunk::PointersTo(chunks), {.durable = with_disk}, Soon()).ok());
    ASSERT_TRUE(ArmFaultFromFlag("kvstore.rma.lease=corrupt@1").ok());
    EXPECT_EQ(client.Get(0, 3), with_disk ? 3u : 2u) << "the last chunk of the lease was damaged";
    EXPECT_EQ(client.Stats().corrupt_dropped(), 1u);
    DisarmAllFaults();
    ASSERT_TRUE(client.store->Put(chunks, Soon()).ok());
    EXPECT_EQ(client.Get(0, 3), 3u);
  }
}

// The reader has the damaged copy dropped while the stream it fell back to has that copy in its hands already.
TEST_P(KvStoreRma, AChunkThatIsDroppedUnderAStreamIsLookedUpAgain) {
  ScopedFaults faults;
  TempDir dir;
  for (const bool with_disk : {true, false}) {
    const auto server = StartServer(GetParam(), with_disk ? dir.path() + "/data" : "");
    Client client(server->grpc_address(), GetParam());
    ASSERT_TRUE(client.store->PutWith(chunk::PointersTo(Chunks(0, 3)), {.durable = with_disk}, Soon()).ok());
    ASSERT_TRUE(ArmFaultFromFlag("kvstore.rma.lease=corrupt@1").ok());
    ASSERT_TRUE(ArmFaultFromFlag("kvstore.rma.release=delay_until(found)").ok());
    ASSERT_TRUE(ArmFaultFromFlag("kvstore.get=delay_until(dropped)").ok());
    auto got = std::async(std::launch::async, [&] { return client.Get(0, 3); });
    ASSERT_TRUE(WaitForFaultHits("kvstore.get", 1, 20'000));
    EXPECT_EQ(client.Stats().corrupt_dropped(), 0u);
    FireFaultEvent("found");
    EXPECT_TRUE(test::Eventually([&] { return client.Stats().corrupt_dropped() > 0; }));
    EXPECT_EQ(client.Stats().corrupt_dropped(), 1u);
    FireFaultEvent("dropped");
    EXPECT_EQ(got.get(), with_disk ? 3u : 2u);
    EXPECT_EQ(client.Stats().corrupt_dropped(), 1u) << "once, however many saw it";
    DisarmAllFaults();
  }
}

TEST_P(KvStoreRma, WhatIsDamagedOnAStreamIsAMiss) {
  ScopedFaults faults;
  const auto server = StartServer("none");
  Client client(server->grpc_address(), "auto");
  ASSERT_TRUE(client.store->Put(Chunks(0, 5), Soon()).ok());
  ASSERT_TRUE(ArmFaultFromFlag("kvstore.stream=corrupt@3").ok());
  EXPECT_EQ(client.Get(0, 5), 2u);
  EXPECT_EQ(client.Get(0, 5), 5u) << "the store's own copy is good";
}

TEST_P(KvStoreRma, ARestartedStoreIsFoundAgain) {
  TempDir dir;
  auto server = StartServer(GetParam(), dir.path() + "/data");
  const std::string address = server->grpc_address();
  Client client(address, GetParam());
  const std::vector<Chunk> chunks = Chunks(0, 30);
  ASSERT_TRUE(client.store->PutWith(chunk::PointersTo(chunks), {.durable = true}, Soon()).ok());
  EXPECT_EQ(client.Get(0, 30), 30u);
  server.reset();
  server = StartServer(GetParam(), dir.path() + "/data", 64 << 20, address);
  EXPECT_TRUE(test::Eventually([&] { return client.store->CountLeading(Keys(0, 1), Soon()).value_or(0) > 0; }));
  EXPECT_EQ(client.Get(0, 30), 30u) << "whatever the old memory holds";
  ASSERT_TRUE(client.store->Put(Chunks(30, 40), Soon()).ok());
  EXPECT_EQ(client.Get(0, 40), 40u);
}

TEST_P(KvStoreRma, ConcurrentClients) {
  TempDir dir;
  const auto server = StartServer(GetParam(), dir.path() + "/data", 8 << 20);
  std::vector<std::thread> threads;
  std::atomic<int> num_wrong{0};
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      Client client(server->grpc_address(), GetParam());
      for (uint64_t round = 0; round < 6; ++round) {
        const uint64_t from = (t + round) % 5 * 10;
        const std::vector<Chunk> chunks = Chunks(from, from + 10);
        if (!client.store->PutWith(chunk::PointersTo(chunks), {.durable = true}, Soon()).ok()) ++num_wrong;
        if (client.Get(from, from + 10) != 10) ++num_wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_wrong.load(), 0);
}

INSTANTIATE_TEST_SUITE_P(Carriers, KvStoreRma, ::testing::Values("shm", "tcp"));

// One reader waits for each chunk in turn, which is a quarter of what a good disk gives.
TEST(KvStoreRmaControl, ALeaseReadsSeveralChunksFromTheDiskAtOnce) {
  ScopedFaults faults;
  const TempDir dir;
  const std::vector<Chunk> chunks = Chunks(1, 30);
  {
    auto server = StartServer("shm", dir.path());
    Client client(server->grpc_address(), "shm");
    ASSERT_TRUE(client.store->PutWith(chunk::PointersTo(chunks), {.durable = true}, Soon()).ok());
    server->Stop();
  }
  auto server = StartServer("shm", dir.path());  // its memory is empty
  Client client(server->grpc_address(), "shm");
  ASSERT_TRUE(ArmFault("kvstore.slab.read", *ParseFaultAction("delay_until(read)")).ok());
  auto fetched = std::async(std::launch::async, [&] {
    std::vector<Chunk> got;
    EXPECT_TRUE(
        client.store->GetLeading(Keys(1, 40), Soon(), [&](Chunk&& c) { return got.push_back(std::move(c)), true; })
            .ok());
    return got;
  });
  EXPECT_TRUE(WaitForFaultHits("kvstore.slab.read", 8, 20'000));
  FireFaultEvent("read");
  const std::vector<Chunk> got = fetched.get();
  ASSERT_EQ(got.size(), chunks.size());  // in order, and no further than the first that is missing
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(SameChunk(got[i], chunks[i]));
  server->Stop();
}

TEST(KvStoreRmaControl, FallsBackToStreams) {
  const auto none = StartServer("none");
  Client client(none->grpc_address(), "auto");
  ASSERT_TRUE(client.store->Put(Chunks(0, 5), Soon()).ok());
  EXPECT_EQ(client.Get(0, 5), 5u);
  EXPECT_EQ(client.store->data_path(), "grpc");
  grpc::ClientContext context;
  v1::DataEndpoint endpoint;
  EXPECT_EQ(client.rma->GetDataEndpoint(&context, {}, &endpoint).error_code(), grpc::StatusCode::UNIMPLEMENTED);
}

TEST(KvStoreRmaControl, AnUncommittedPutIsInvisibleAndCommitsOnce) {
  const auto server = StartServer("shm");
  Client client(server->grpc_address(), "shm");
  v1::ReservePutRequest reserve;
  const Chunk chunk = TestChunk(1, 5000);
  *reserve.add_chunks() = chunk::MetaFromHeader(chunk.header);
  v1::ReservePutResponse reserved;
  {
    grpc::ClientContext context;
    ASSERT_TRUE(client.rma->ReservePut(&context, reserve, &reserved).ok());
  }
  EXPECT_EQ(*client.store->CountLeading(Keys(1, 2), Soon()), 0u);
  v1::CommitPutRequest commit;
  commit.set_reservation_id(reserved.reservation_id());
  for (const auto expected : {grpc::StatusCode::DATA_LOSS, grpc::StatusCode::NOT_FOUND}) {
    grpc::ClientContext context;
    v1::PutChunksResponse response;
    EXPECT_EQ(client.rma->CommitPut(&context, commit, &response).error_code(), expected) << "nothing was written";
  }
  EXPECT_EQ(*client.store->CountLeading(Keys(1, 2), Soon()), 0u);
  EXPECT_EQ(client.Stats().memory_bytes(), 0u) << "its room is free";
}

TEST(KvStoreRmaControl, AnotherModelIsRefusedNamingBoth) {
  const auto server = StartServer("shm");
  chunk::RemoteStoreOptions::Model model;
  model.fingerprint.fill(0x11);
  model.layout_digest.fill(0x55);
  for (const char* path : {"shm", "stream"}) {
    const bool stream = std::string(path) == "stream";
    const auto plain = stream ? StartServer("none") : nullptr;
    Client client((stream ? plain : server)->grpc_address(), "auto", model);
    const std::vector<Chunk> chunks = Chunks(0, 3);
    ASSERT_TRUE(client.store->Put(chunks, Soon()).ok());
    const absl::Status status = client.store->GetLeading(Keys(0, 3), Soon(), [](Chunk&&) { return true; }).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << path << status;
    EXPECT_NE(status.ToString().find(std::string(64, '2')), std::string::npos) << status;
    EXPECT_NE(status.ToString().find(std::string(64, '5')), std::string::npos) << status;
  }
}

TEST(KvStoreAdmin, NamespacesOverTheWire) {
  TempDir dir;
  const auto server = StartServer("none", dir.path() + "/data");
  Client client(server->grpc_address(), "auto");
  const auto admin =
      v1::KvStoreAdmin::NewStub(grpc::CreateChannel(server->grpc_address(), grpc::InsecureChannelCredentials()));
  const std::string id(32, 'n');
  v1::Namespace got;
  {
    grpc::ClientContext context;
    v1::CreateNamespaceRequest request;
    request.set_id(id);
    request.mutable_settings()->set_name("docs");
    request.mutable_settings()->set_quota_chunks(2);
    ASSERT_TRUE(admin->CreateNamespace(&context, request, &got).ok());
    EXPECT_EQ(got.settings().name(), "docs");
  }
  std::vector<Chunk> chunks = Chunks(0, 3);
  for (Chunk& chunk : chunks) chunk.header.namespace_id.fill('n');
  const absl::Status full = client.store->Put(chunks, Soon());
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(full.ToString().find("'docs'"), std::string::npos) << full;
  {
    grpc::ClientContext context;
    v1::SetNamespaceRequest request;
    request.set_id(id);
    request.mutable_settings()->set_name("docs");
    request.mutable_settings()->set_owner("me");
    ASSERT_TRUE(admin->SetNamespace(&context, request, &got).ok());
  }
  ASSERT_TRUE(client.store->Put(chunks, Soon()).ok());
  {
    grpc::ClientContext context;
    v1::SetPinRequest request;
    request.set_namespace_id(id);
    request.set_pin(v1::PIN_HARD);
    v1::SetPinResponse response;
    ASSERT_TRUE(admin->SetPin(&context, request, &response).ok());
    EXPECT_EQ(response.changed(), 3u);
  }
  {
    grpc::ClientContext context;
    v1::SetPinRequest request;
    v1::SetPinResponse response;
    EXPECT_EQ(admin->SetPin(&context, request, &response).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  }
  {
    grpc::ClientContext context;
    v1::ListNamespacesRequest request;
    request.set_owner("me");
    v1::ListNamespacesResponse response;
    ASSERT_TRUE(admin->ListNamespaces(&context, request, &response).ok());
    ASSERT_EQ(response.namespaces_size(), 1);
    EXPECT_EQ(response.namespaces(0).chunks(), 3u);
    EXPECT_EQ(response.namespaces(0).settings().pin(), v1::PIN_HARD);
  }
  {
    grpc::ClientContext context;
    v1::DeleteNamespaceRequest request;
    request.set_id(id);
    v1::DeleteNamespaceResponse response;
    ASSERT_TRUE(admin->DeleteNamespace(&context, request, &response).ok());
    EXPECT_EQ(response.chunks(), 3u);
  }
  EXPECT_EQ(*client.store->CountLeading(Keys(0, 1), Soon()), 0u);
  grpc::ClientContext context;
  v1::StatNamespaceRequest request;
  request.set_id(id);
  EXPECT_EQ(admin->StatNamespace(&context, request, &got).error_code(), grpc::StatusCode::NOT_FOUND);
}

}  // namespace
}  // namespace spl::kvstore
