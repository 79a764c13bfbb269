// Several stores as one: placement, losses, copies of pinned chunks.
#include <gtest/gtest.h>

#include <cstdlib>
#include <set>
#include <thread>

#include "services/chunk/remote/cluster_chunk_store.h"
#include "services/chunk/rendezvous.h"
#include "services/kvstore/kvstore_server.h"
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
using namespace std::chrono_literals;

std::chrono::steady_clock::time_point In(std::chrono::milliseconds delay) {
  return std::chrono::steady_clock::now() + delay;
}
std::chrono::steady_clock::time_point Soon() { return In(60s); }

std::vector<chunk::ChunkKey> Keys(uint64_t from, uint64_t to) {
  std::vector<chunk::ChunkKey> keys;
  for (uint64_t n = from; n < to; ++n) keys.push_back(TestKey(n));
  return keys;
}

std::vector<Chunk> Chunks(uint64_t from, uint64_t to, size_t bytes = 2000) {
  std::vector<Chunk> chunks;
  for (uint64_t n = from; n < to; ++n) chunks.push_back(TestChunk(n, bytes));
  return chunks;
}

TEST(Rendezvous, SharesEvenlyAndMovesOnlyWhatItMust) {
  const std::vector<std::string> three = {"a:1", "b:1", "c:1"}, four = {"d:1", "b:1", "a:1", "c:1"};
  const chunk::Rendezvous with_three(three), with_four(four);
  constexpr uint64_t kKeys = 40'000;
  std::map<std::string, int> owned, second;
  int moved = 0;
  for (uint64_t n = 0; n < kKeys; ++n) {
    const std::vector<size_t> before = with_three.Rank(TestKey(n)), after = with_four.Rank(TestKey(n));
    ++owned[four[after[0]]];
    if (after[0] == 2) ++second[four[after[1]]];
    if (three[before[0]] == four[after[0]]) continue;
    ++moved;
    ASSERT_EQ(four[after[0]], "d:1") << "keys move to the new member only";
  }
  for (const std::string& name : four) EXPECT_NEAR(owned[name], kKeys / 4, kKeys / 100) << name;
  EXPECT_NEAR(moved, kKeys / 4, kKeys / 100);
  EXPECT_EQ(second.size(), 3u);
  for (const auto& [name, count] : second) EXPECT_NEAR(count, kKeys / 12, kKeys / 100) << "heirs of a:1, " << name;
}

TEST(CircuitBreaker, OpensProbesAndCloses) {
  FakeClock clock;
  chunk::CircuitBreaker breaker({.timeouts_to_open = 2, .min_backoff = 500ms, .max_backoff = 1500ms}, clock);
  EXPECT_FALSE(breaker.Failed(true)) << "one time-out may be a slow moment";
  EXPECT_FALSE(breaker.Succeeded());
  EXPECT_FALSE(breaker.Failed(true));
  EXPECT_TRUE(breaker.Failed(true));
  EXPECT_FALSE(breaker.closed());
  EXPECT_FALSE(breaker.TakeProbe());
  clock.Advance(500ms);
  EXPECT_TRUE(breaker.TakeProbe());
  EXPECT_FALSE(breaker.TakeProbe()) << "one probe at a time";
  EXPECT_FALSE(breaker.Failed(false)) << "it was open already";
  clock.Advance(999ms);
  EXPECT_FALSE(breaker.TakeProbe());
  clock.Advance(1ms);
  EXPECT_TRUE(breaker.TakeProbe());
  EXPECT_TRUE(breaker.Succeeded());
  EXPECT_TRUE(breaker.closed());
  EXPECT_TRUE(breaker.Failed(false)) << "a lost connection opens at once";
}

TEST(MemberList, Parses) {
  EXPECT_EQ(*chunk::ParseMemberList("a:1,b:2"), (std::vector<std::string>{"a:1", "b:2"}));
  for (const char* bad : {"", "a", "a:1,", ",a:1", "a:1,a:1", "a:1;b:2"}) {
    EXPECT_EQ(chunk::ParseMemberList(bad).status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
}

// Nodes that can be stopped and started again under their address.
struct Nodes {
  explicit Nodes(size_t count, const std::string& data_dir = "", uint64_t memory_bytes = 64 << 20)
      : data_dir(data_dir), memory_bytes(memory_bytes) {
    addresses.resize(count, "127.0.0.1:0");
    servers.resize(count);
    for (size_t i = 0; i < count; ++i) Start(i);
  }
  void Start(size_t i) {
    KvStoreOptions options;
    options.listen = addresses[i];
    options.memory_bytes = memory_bytes;
    if (!data_dir.empty()) options.data_dir = data_dir + "/" + std::to_string(i);
    options.kv_transport = "shm";
    auto started = KvStoreServer::Start(options);
    ASSERT_TRUE(started.ok()) << started.status();
    servers[i] = std::move(started).value();
    addresses[i] = servers[i]->grpc_address();
  }
  std::unique_ptr<chunk::ClusterChunkStore> Connect(transport::KvTransport* transport = nullptr) {
    std::string list;
    for (const std::string& address : addresses) list += (list.empty() ? "" : ",") + address;
    chunk::ClusterStoreOptions options;
    options.metrics = &metrics;
    chunk::RemoteStoreOptions remote;
    remote.transport = transport;
    return std::move(chunk::ClusterChunkStore::Connect(list, remote, options)).value();
  }
  const std::string data_dir;
  const uint64_t memory_bytes;
  std::vector<std::string> addresses;
  std::vector<std::unique_ptr<KvStoreServer>> servers;
  Metrics metrics;
};

// In order and right; how many.
size_t GetAll(chunk::ChunkStore& store, uint64_t from, uint64_t to, size_t bytes = 2000) {
  uint64_t next = from;
  const auto got = store.GetLeading(Keys(from, to), Soon(), [&](Chunk&& c) {
    EXPECT_TRUE(SameChunk(c, TestChunk(next, bytes))) << next;
    ++next;
    return true;
  });
  EXPECT_TRUE(got.ok()) << got.status();
  return got.ok() ? *got : 0;
}

TEST(ClusterStore, SpreadsChunksAndAnswersInOrder) {
  Nodes nodes(3);
  const auto store = nodes.Connect();
  ASSERT_TRUE(store->Put(Chunks(0, 300), Soon()).ok());
  EXPECT_EQ(*store->CountLeading(Keys(0, 400), Soon()), 300u);
  EXPECT_EQ(GetAll(*store, 0, 400), 300u);
  EXPECT_EQ(GetAll(*store, 250, 251), 1u);
  EXPECT_EQ(GetAll(*store, 300, 310), 0u);
  size_t sum = 0;
  for (const std::string& address : nodes.addresses) {
    const auto one = std::move(chunk::RemoteChunkStore::Connect(address)).value();
    size_t here = 0;
    for (uint64_t n = 0; n < 300; ++n) here += *one->CountLeading(Keys(n, n + 1), Soon());
    EXPECT_GT(here, 60u);
    sum += here;
  }
  EXPECT_EQ(sum, 300u) << "each on one node";
  int seen = 0;
  EXPECT_EQ(*store->GetLeading(Keys(0, 300), Soon(), [&](Chunk&&) { return ++seen < 10; }), 9u);
}

TEST(ClusterStore, ALostNodeCostsItsHitsAndPinnedChunksLiveOn) {
  TempDir dir;
  Nodes nodes(2, dir.path());
  const auto store = nodes.Connect();
  const std::vector<Chunk> plain = Chunks(0, 100), pinned = Chunks(1000, 1100);
  ASSERT_TRUE(store->PutWith(chunk::PointersTo(plain), {.durable = true}, Soon()).ok());
  const auto report = store->PutWith(chunk::PointersTo(pinned), {.durable = true, .pin = chunk::Pin::kHard}, Soon());
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->num_stored, 100u) << "copies are not counted";
  nodes.servers[1].reset();
  EXPECT_EQ(GetAll(*store, 1000, 1100), 100u);
  size_t hits = 0;
  const auto start = std::chrono::steady_clock::now();
  for (uint64_t n = 0; n < 100; ++n) hits += GetAll(*store, n, n + 1);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 10s) << "nobody waits for the lost node";
  EXPECT_GT(hits, 25u);
  EXPECT_LT(hits, 75u);
  EXPECT_EQ(store->num_members_up(), 1u);
  EXPECT_NE(nodes.metrics.Render().find("splice_store_node_up{node=\"" + nodes.addresses[1] + "\"} 0"),
            std::string::npos);
  EXPECT_TRUE(store->Put(Chunks(2000, 2050), Soon()).ok()) << "the other one takes the puts";
  EXPECT_EQ(GetAll(*store, 2000, 2050), 50u);
  nodes.Start(1);
  EXPECT_TRUE(test::Eventually([&] { return store->num_members_up() == 2; }));
  EXPECT_EQ(GetAll(*store, 0, 100), 100u) << "what it had is there again";
  nodes.servers[0].reset();
  nodes.servers[1].reset();
  EXPECT_EQ(GetAll(*store, 0, 100), 0u);
  EXPECT_EQ(*store->CountLeading(Keys(0, 10), Soon()), 0u);
  EXPECT_EQ(store->Put(Chunks(0, 1), Soon()).code(), absl::StatusCode::kUnavailable);
}

// A member that accepts calls and never answers.
class SilentStore final : public chunk::ChunkStore {
 public:
  explicit SilentStore(std::atomic<int>& calls) : calls_(calls) {}
  absl::StatusOr<size_t> CountLeading(std::span<const chunk::ChunkKey>,
                                      std::chrono::steady_clock::time_point deadline) override {
    ++calls_;
    std::this_thread::sleep_until(deadline);
    return absl::DeadlineExceededError("silence");
  }
  absl::StatusOr<size_t> GetLeading(std::span<const chunk::ChunkKey>, std::chrono::steady_clock::time_point deadline,
                                    const std::function<bool(Chunk&&)>&) override {
    ++calls_;
    std::this_thread::sleep_until(deadline);
    return 0;
  }
  absl::Status Put(std::span<const Chunk>, std::chrono::steady_clock::time_point deadline) override {
    return CountLeading({}, deadline).status();
  }

 private:
  std::atomic<int>& calls_;
};

TEST(ClusterStore, ASilentNodeIsAskedTwiceAndThenByTheProberOnly) {
  std::atomic<int> calls{0};
  std::vector<chunk::ClusterChunkStore::Member> members;
  members.push_back({"silent:1", std::make_unique<SilentStore>(calls)});
  chunk::ClusterStoreOptions options;
  options.breaker.min_backoff = 1h;
  options.breaker.max_backoff = 1h;
  const auto store = chunk::ClusterChunkStore::Create(std::move(members), options);
  for (int i = 0; i < 20; ++i) {
    const auto got = store->GetLeading(Keys(0, 5), In(20ms), [](Chunk&&) { return true; });
    ASSERT_TRUE(got.ok()) << got.status();
    ASSERT_EQ(*got, 0u);
  }
  EXPECT_EQ(calls.load(), 2);
}

// SPLICE_STORE_CHUNKS=100000 for the long version.
TEST(ClusterStore, ManySmallChunksOverTwoNodes) {
  const char* const wanted = std::getenv("SPLICE_STORE_CHUNKS");
  const uint64_t count = wanted == nullptr ? 5'000 : std::strtoull(wanted, nullptr, 10);
  TempDir dir;
  Nodes nodes(2, dir.path(), 64 << 20);
  const auto transport = std::move(transport::KvTransport::Create({})).value();
  {
    const auto store = nodes.Connect(transport.get());
    constexpr uint64_t kBatch = 1000;
    size_t num_durable = 0;
    for (uint64_t n = 0; n < count; n += kBatch) {
      const std::vector<Chunk> chunks = Chunks(n, std::min(count, n + kBatch));
      const auto report = store->PutWith(chunk::PointersTo(chunks), {.durable = true}, Soon());
      ASSERT_TRUE(report.ok()) << report.status();
      num_durable += report->num_durable;
    }
    EXPECT_EQ(num_durable, count);
    uint64_t got = 0;
    for (uint64_t n = 0; n < count; n += kBatch) got += GetAll(*store, n, std::min(count, n + kBatch));
    EXPECT_EQ(got, count) << "each compared byte by byte";
  }
  transport->Stop();
}

}  // namespace
}  // namespace spl::kvstore
