// Two transports in one process, as the all-in-one mode has them.
#include "services/transport/kv_transport.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <future>
#include <random>
#include <thread>

#include "services/base/address.h"
#include "services/base/fault_point.h"
#include "services/transport/bandwidth.h"
#include "tests/support/eventually.h"

namespace spl::transport {
namespace {

using namespace std::chrono_literals;

std::unique_ptr<KvTransport> MakeTransport(const std::string& carriers) {
  TransportOptions options;
  options.carriers = carriers;
  auto transport = KvTransport::Create(options);
  EXPECT_TRUE(transport.ok()) << transport.status();
  return std::move(transport).value();
}

RemoteMemory Describe(const KvTransport& transport, const RegisteredMemory& memory) {
  return {transport.listen_address(), memory.packed_rkey(), reinterpret_cast<uint64_t>(memory.data()), memory.size(),
          HostId()};
}

// A writer and a reader with memory, connected.
struct Pair {
  Pair(const std::string& writer_carriers, const std::string& reader_carriers, size_t bytes)
      : writer(MakeTransport(writer_carriers)), reader(MakeTransport(reader_carriers)) {
    memory = std::move(reader->Allocate(bytes)).value();
    auto connected = writer->Connect(Describe(*reader, *memory), 10s);
    EXPECT_TRUE(connected.ok()) << connected.status();
    if (connected.ok()) channel = std::move(connected).value();
  }
  ~Pair() {
    if (channel != nullptr) {
      EXPECT_TRUE(channel->Close(10s).ok());
    }
    writer->Stop();
    memory.reset();
    reader->Stop();
  }
  std::unique_ptr<KvTransport> writer, reader;
  std::unique_ptr<RegisteredMemory> memory;
  std::unique_ptr<KvChannel> channel;
};

std::vector<std::byte> RandomBytes(size_t size, uint64_t seed) {
  std::vector<std::byte> bytes(size);
  std::mt19937_64 random(seed);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

struct Carriers {
  const char* writer;
  const char* reader;
  const char* expected;
};

class KvTransportTest : public ::testing::TestWithParam<Carriers> {};

TEST_P(KvTransportTest, RandomPutsArriveByteByByte) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  constexpr size_t kBytes = 4 << 20;
  Pair pair(GetParam().writer, GetParam().reader, kBytes);
  ASSERT_NE(pair.channel, nullptr);
  EXPECT_EQ(pair.channel->carrier(), GetParam().expected);
  EXPECT_TRUE(
      std::all_of(pair.memory->data(), pair.memory->data() + kBytes, [](std::byte b) { return b == std::byte(0); }));
  const std::vector<std::byte> source = RandomBytes(kBytes, seed);
  std::vector<std::byte> expected(kBytes);
  for (int round = 0; round < 20; ++round) {
    // Ops of one round do not overlap: within one Put their order is the transport's business.
    std::vector<PutOp> ops;
    size_t offset = 0;
    while (offset < kBytes) {
      offset += random() % 3 == 0 ? random() % 70000 : 0;
      const size_t bytes =
          std::min<size_t>(1 + random() % (random() % 4 == 0 ? 300000 : 5000), kBytes - std::min(offset, kBytes));
      if (bytes == 0 || offset >= kBytes) break;
      const size_t from = random() % (kBytes - bytes + 1);
      ops.push_back({source.data() + from, offset, bytes});
      std::memcpy(expected.data() + offset, source.data() + from, bytes);
      offset += bytes;
    }
    std::shuffle(ops.begin(), ops.end(), random);
    std::atomic<int> num_done{0};
    ASSERT_TRUE(pair.channel
                    ->Put(ops,
                          [&](absl::Status status) {
                            EXPECT_TRUE(status.ok()) << status;
                            ++num_done;
                          })
                    .ok());
    ASSERT_TRUE(pair.channel->FlushAndWait(10s).ok());
    ASSERT_EQ(num_done.load(), 1);
    ASSERT_EQ(std::memcmp(pair.memory->data(), expected.data(), kBytes), 0) << "round " << round;
  }
}

TEST_P(KvTransportTest, RandomGetsBringWhatThePeerHas) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  constexpr size_t kBytes = 4 << 20;
  Pair pair(GetParam().writer, GetParam().reader, kBytes);
  ASSERT_NE(pair.channel, nullptr);
  const std::vector<std::byte> source = RandomBytes(kBytes, seed);
  std::memcpy(pair.memory->data(), source.data(), kBytes);
  for (int round = 0; round < 20; ++round) {
    std::vector<std::byte> got(kBytes), expected(kBytes);
    std::vector<GetOp> ops;
    for (size_t to = random() % 5000; to < kBytes;) {
      const size_t bytes = std::min<size_t>(1 + random() % (random() % 4 == 0 ? 300000 : 5000), kBytes - to);
      const size_t from = random() % (kBytes - bytes + 1);
      ops.push_back({got.data() + to, from, bytes});
      std::memcpy(expected.data() + to, source.data() + from, bytes);
      to += bytes + random() % 3000;
    }
    std::promise<absl::Status> done;
    ASSERT_TRUE(pair.channel->Get(ops, [&](absl::Status status) { done.set_value(status); }).ok());
    const absl::Status status = done.get_future().get();
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_EQ(got, expected) << "round " << round;
  }
  std::byte one{};
  EXPECT_EQ(pair.channel->Get({{&one, kBytes, 1}}, [](absl::Status) { FAIL(); }).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_P(KvTransportTest, FlushCallbackSeesTheBytesOfEarlierPuts) {
  Pair pair(GetParam().writer, GetParam().reader, 1 << 20);
  ASSERT_NE(pair.channel, nullptr);
  const std::vector<std::byte> source = RandomBytes(1 << 20, 7);
  for (int i = 0; i < 50; ++i) {
    std::memset(pair.memory->data(), 0, 1 << 20);
    std::promise<bool> equal;
    for (size_t at = 0; at < 1 << 20; at += 1 << 16) {
      ASSERT_TRUE(pair.channel->Put({{source.data() + at, at, 1 << 16}}, [](absl::Status) {}).ok());
    }
    ASSERT_TRUE(pair.channel
                    ->Flush([&](absl::Status status) {
                      equal.set_value(status.ok() && std::memcmp(pair.memory->data(), source.data(), 1 << 20) == 0);
                    })
                    .ok());
    ASSERT_TRUE(equal.get_future().get()) << "iteration " << i;
  }
}

TEST_P(KvTransportTest, RefusesOpsOutsideTheMemory) {
  Pair pair(GetParam().writer, GetParam().reader, 4096);
  ASSERT_NE(pair.channel, nullptr);
  const std::vector<std::byte> source(8192);
  const absl::Status status = pair.channel->Put({{source.data(), 4000, 97}}, [](absl::Status) { FAIL(); });
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(pair.channel->FlushAndWait(10s).ok()) << "the channel stays usable";
}

TEST_P(KvTransportTest, CloseIsQuietAndEndsEveryCallback) {
  Pair pair(GetParam().writer, GetParam().reader, 32 << 20);
  ASSERT_NE(pair.channel, nullptr);
  auto source = std::make_unique<std::vector<std::byte>>(RandomBytes(32 << 20, 3));
  std::atomic<int> num_accepted{0}, num_done{0};
  for (int i = 0; i < 64; ++i) {
    if (pair.channel
            ->Put({{source->data(), 0, source->size()}},
                  [&](absl::Status status) {
                    EXPECT_TRUE(status.ok() || status.code() == absl::StatusCode::kCancelled) << status;
                    ++num_done;
                  })
            .ok()) {
      ++num_accepted;
    }
  }
  ASSERT_TRUE(pair.channel->Close(20s).ok());
  EXPECT_EQ(num_done.load(), num_accepted.load());
  std::memset(pair.memory->data(), 0x5a, pair.memory->size());
  source.reset();  // a write on its way would now read freed memory or break the pattern
  EXPECT_EQ(pair.channel->Put({}, [](absl::Status) {}).code(), absl::StatusCode::kCancelled);
  // A second connection's traffic goes through the same threads: when it is through, so is anything left over.
  auto second = pair.writer->Connect(Describe(*pair.reader, *pair.memory), 10s);
  ASSERT_TRUE(second.ok()) << second.status();
  ASSERT_TRUE((*second)->FlushAndWait(10s).ok());
  EXPECT_TRUE(std::all_of(pair.memory->data(), pair.memory->data() + pair.memory->size(),
                          [](std::byte b) { return b == std::byte(0x5a); }));
  EXPECT_TRUE((*second)->Close(10s).ok());
}

TEST_P(KvTransportTest, ManyChannelsAndThreads) {
  constexpr int kChannels = 16;
  constexpr size_t kSlice = 256 << 10;
  Pair pair(GetParam().writer, GetParam().reader, kChannels * kSlice);
  ASSERT_NE(pair.channel, nullptr);
  std::vector<std::thread> threads;
  std::vector<std::byte> source = RandomBytes(kChannels * kSlice, 11);
  for (int c = 0; c < kChannels; ++c) {
    threads.emplace_back([&, c] {
      auto channel = pair.writer->Connect(Describe(*pair.reader, *pair.memory), 20s);
      ASSERT_TRUE(channel.ok()) << channel.status();
      for (size_t at = c * kSlice; at < (c + 1) * kSlice; at += 4096) {
        ASSERT_TRUE((*channel)->Put({{source.data() + at, at, 4096}}, [](absl::Status) {}).ok());
      }
      ASSERT_TRUE((*channel)->FlushAndWait(20s).ok());
      ASSERT_TRUE((*channel)->Close(20s).ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(std::memcmp(pair.memory->data(), source.data(), source.size()), 0);
}

TEST_P(KvTransportTest, AFullQueueRefuses) {
  Pair pair(GetParam().writer, GetParam().reader, 4 << 20);
  ASSERT_NE(pair.channel, nullptr);
  const std::vector<std::byte> source(4 << 20);
  absl::Status status;
  std::atomic<int> num_done{0};
  int num_accepted = 0;
  while (status.ok() && num_accepted < 1'000'000) {
    status = pair.channel->Put({{source.data(), 0, source.size()}}, [&](absl::Status) { ++num_done; });
    if (status.ok()) ++num_accepted;
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(pair.channel->Close(60s).ok());
  EXPECT_EQ(num_done.load(), num_accepted);
}

// ---- fences (decision 0002)

constexpr auto kForever = std::chrono::steady_clock::time_point::max();

TEST_P(KvTransportTest, AWriteThatIsLateForItsLeaseIsDroppedAndItsChannelLost) {
  constexpr size_t kBytes = 4 << 20;
  Pair pair(GetParam().writer, GetParam().reader, kBytes);
  ASSERT_NE(pair.channel, nullptr);
  const std::vector<std::byte> source(kBytes, std::byte(0x77));
  const ScopedFaults faults;
  ASSERT_TRUE(ArmFaultFromFlag("transport.put=delay(60)").ok());  // between the caller's own check and the copy
  std::promise<absl::Status> done;
  ASSERT_TRUE(pair.channel
                  ->Put(
                      {{source.data(), 0, kBytes / 2}, {source.data(), kBytes / 2 + 1, kBytes / 4}},
                      [&](absl::Status status) { done.set_value(status); }, std::chrono::steady_clock::now() + 30ms)
                  .ok());
  EXPECT_EQ(done.get_future().get().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(pair.channel->status().code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(pair.channel->FlushAndWait(10s).ok()) << "a lost channel must not say that its writer is quiet";
  ASSERT_TRUE(pair.channel->Close(10s).ok());
  EXPECT_TRUE(
      std::all_of(pair.memory->data(), pair.memory->data() + kBytes, [](std::byte b) { return b == std::byte(0); }));
}

TEST_P(KvTransportTest, AWriteWithinItsLeaseArrivesAndOneWithNothingToWriteIsNeverLate) {
  Pair pair(GetParam().writer, GetParam().reader, 1 << 20);
  ASSERT_NE(pair.channel, nullptr);
  const std::vector<std::byte> source(1 << 20, std::byte(0x55));
  ASSERT_TRUE(pair.channel
                  ->Put(
                      {{source.data(), 0, source.size()}}, [](absl::Status) {}, std::chrono::steady_clock::now() + 60s)
                  .ok());
  std::promise<absl::Status> empty;
  ASSERT_TRUE(pair.channel
                  ->Put(
                      {}, [&](absl::Status status) { empty.set_value(status); }, std::chrono::steady_clock::now())
                  .ok());
  EXPECT_TRUE(empty.get_future().get().ok());
  ASSERT_TRUE(pair.channel->FlushAndWait(10s).ok());
  EXPECT_EQ(std::memcmp(pair.memory->data(), source.data(), source.size()), 0);
}

TEST_P(KvTransportTest, AWriterCountsUntilItsChannelIsClosed) {
  Pair pair(GetParam().writer, GetParam().reader, 1 << 20);
  ASSERT_NE(pair.channel, nullptr);
  const std::string first = pair.channel->local_address();
  const bool maps = std::string(GetParam().expected) == "shm";
  const auto connections = pair.reader->ConnectionsOf(first, kForever);
  EXPECT_EQ(connections.mapped, maps ? 1u : 0u);
  EXPECT_EQ(connections.over_network, maps ? 0u : 1u);
  EXPECT_EQ(pair.reader->ConnectionsOf("127.0.0.1:1", kForever).all(), 0u);
  const auto between = std::chrono::steady_clock::now();
  auto connected = pair.writer->Connect(Describe(*pair.reader, *pair.memory), 10s);
  ASSERT_TRUE(connected.ok()) << connected.status();
  const std::string second = (*connected)->local_address();
  EXPECT_NE(first, second);
  EXPECT_EQ(pair.reader->ConnectionsOf(second, kForever).all(), 1u);
  EXPECT_EQ(pair.reader->ConnectionsOf(second, between).all(), 0u);
  ASSERT_TRUE(pair.channel->Close(10s).ok());
  EXPECT_TRUE(test::Eventually([&] { return pair.reader->ConnectionsOf(first, kForever).all() == 0; }));
  EXPECT_EQ(pair.reader->ConnectionsOf(second, kForever).all(), 1u);
  ASSERT_TRUE((*connected)->Close(10s).ok());
  EXPECT_TRUE(test::Eventually([&] { return pair.reader->ConnectionsOf(second, kForever).all() == 0; }));
}

TEST_P(KvTransportTest, AWriterThatWasCutOffReachesNothing) {
  if (std::string(GetParam().expected) == "shm") GTEST_SKIP() << "nobody can take a mapping away from a peer";
  constexpr size_t kBytes = 1 << 20;
  Pair pair(GetParam().writer, GetParam().reader, kBytes);
  ASSERT_NE(pair.channel, nullptr);
  const std::vector<std::byte> source(kBytes, std::byte(0x33));
  ASSERT_TRUE(pair.channel->Put({{source.data(), 0, kBytes}}, [](absl::Status) {}).ok());
  ASSERT_TRUE(pair.channel->FlushAndWait(10s).ok());
  pair.reader->CutWriter(pair.channel->local_address(), kForever);
  ASSERT_TRUE(
      test::Eventually([&] { return pair.reader->ConnectionsOf(pair.channel->local_address(), kForever).all() == 0; }));
  std::memset(pair.memory->data(), 0, kBytes);
  // The writer does not know yet.
  for (int i = 0; i < 100; ++i) (void)pair.channel->Put({{source.data(), 0, kBytes}}, [](absl::Status) {});
  EXPECT_TRUE(test::Eventually([&] { return !pair.channel->status().ok(); }));
  EXPECT_FALSE(pair.channel->FlushAndWait(10s).ok());
  ASSERT_TRUE(pair.channel->Close(10s).ok());
  // Traffic of a new connection goes through the same threads.
  auto second = pair.writer->Connect(Describe(*pair.reader, *pair.memory), 10s);
  ASSERT_TRUE(second.ok()) << second.status();
  ASSERT_TRUE((*second)->FlushAndWait(10s).ok());
  EXPECT_TRUE(
      std::all_of(pair.memory->data(), pair.memory->data() + kBytes, [](std::byte b) { return b == std::byte(0); }));
  ASSERT_TRUE((*second)->Put({{source.data(), 0, kBytes}}, [](absl::Status) {}).ok());
  ASSERT_TRUE((*second)->FlushAndWait(10s).ok());
  EXPECT_EQ(std::memcmp(pair.memory->data(), source.data(), kBytes), 0);
  EXPECT_TRUE((*second)->Close(10s).ok());
}

INSTANTIATE_TEST_SUITE_P(Carriers, KvTransportTest,
                         ::testing::Values(Carriers{"auto", "auto", "shm"}, Carriers{"shm", "shm", "shm"},
                                           Carriers{"tcp", "tcp", "tcp"}, Carriers{"tcp", "auto", "tcp"}),
                         [](const auto& info) { return std::string(info.param.writer) + "_to_" + info.param.reader; });

TEST(KvTransport, ConnectToNobodyFailsByItsDeadline) {
  for (const char* carriers : {"auto", "tcp"}) {
    RemoteMemory to_gone;
    {
      const auto short_lived = MakeTransport(carriers);
      auto memory = std::move(short_lived->Allocate(4096)).value();
      to_gone = Describe(*short_lived, *memory);
      memory.reset();
      short_lived->Stop();
    }
    const auto writer = MakeTransport(carriers);
    const auto start = std::chrono::steady_clock::now();
    const auto channel = writer->Connect(to_gone, 3s);
    EXPECT_LT(std::chrono::steady_clock::now() - start, 4s);
    ASSERT_FALSE(channel.ok());
    EXPECT_TRUE(channel.status().code() == absl::StatusCode::kUnavailable ||
                channel.status().code() == absl::StatusCode::kDeadlineExceeded)
        << channel.status();
    EXPECT_NE(channel.status().ToString().find(to_gone.address), std::string::npos) << channel.status();
  }
}

TEST(KvTransport, PeersOnThisHostWriteUnmappedMemoryOverTheNetwork) {
  const auto reader = MakeTransport("auto"), writer = MakeTransport("auto");
  auto memory = std::move(reader->Allocate((1 << 20) + 100, KvTransport::Mapping::kNone)).value();
  EXPECT_EQ(memory->size(), (1 << 20) + 100);
  const std::span<const std::byte> all(memory->data(), memory->size());
  EXPECT_TRUE(std::all_of(all.begin(), all.end(), [](std::byte b) { return b == std::byte{0}; }));
  auto channel = writer->Connect(Describe(*reader, *memory), 10s);
  ASSERT_TRUE(channel.ok()) << channel.status();
  EXPECT_EQ((*channel)->carrier(), "tcp");
  EXPECT_TRUE((*channel)->mapped_memory().empty());
  const std::vector<std::byte> sent = RandomBytes(memory->size(), 17);
  ASSERT_TRUE(
      (*channel)->Put({{sent.data(), 0, sent.size()}}, [](const absl::Status& s) { EXPECT_TRUE(s.ok()) << s; }).ok());
  ASSERT_TRUE((*channel)->FlushAndWait(10s).ok());
  EXPECT_TRUE(std::equal(sent.begin(), sent.end(), memory->data()));
  EXPECT_TRUE((*channel)->Close(10s).ok());
  EXPECT_EQ(reader->Allocate(0, KvTransport::Mapping::kNone).status().code(), absl::StatusCode::kInvalidArgument);
  writer->Stop();
  memory.reset();
  reader->Stop();
}

TEST(KvTransport, ShmRefusesAnotherHost) {
  const auto reader = MakeTransport("shm");
  const auto memory = std::move(reader->Allocate(4096)).value();
  RemoteMemory remote = Describe(*reader, *memory);
  remote.host_id = "elsewhere";
  const auto writer = MakeTransport("shm");
  EXPECT_EQ(writer->Connect(remote, 5s).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(KvTransport, RefusesADamagedRkey) {
  const auto reader = MakeTransport("auto");
  const auto memory = std::move(reader->Allocate(4096)).value();
  RemoteMemory remote = Describe(*reader, *memory);
  remote.rkey[remote.rkey.size() / 2] ^= 0x40;
  const auto writer = MakeTransport("auto");
  EXPECT_EQ(writer->Connect(remote, 5s).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(KvTransport, RefusesBadOptions) {
  TransportOptions options;
  options.carriers = "pigeon";
  EXPECT_EQ(KvTransport::Create(options).status().code(), absl::StatusCode::kInvalidArgument);
  const auto first = MakeTransport("tcp");
  TransportOptions taken;
  taken.listen_port = ParseHostPort(first->listen_address())->port;
  EXPECT_EQ(KvTransport::Create(taken).status().code(), absl::StatusCode::kUnavailable);
}

TEST(KvTransport, MeasuresWhatWritesCost) {
  Pair pair("auto", "auto", 8 << 20);
  ASSERT_NE(pair.channel, nullptr);
  const auto cost = MeasureWriteCost(*pair.channel, 0, 8 << 20, 20s);
  ASSERT_TRUE(cost.ok()) << cost.status();
  EXPECT_GT(cost->bytes_per_s, 1e7);
  EXPECT_GE(cost->write_s, 0);
  EXPECT_EQ(MeasureWriteCost(*pair.channel, 0, kMinScratchBytes - 1, 20s).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(KvTransport, StopEndsEverythingWithoutClose) {
  const auto reader = MakeTransport("auto");
  auto memory = std::move(reader->Allocate(1 << 20)).value();
  const auto writer = MakeTransport("auto");
  auto channel = std::move(writer->Connect(Describe(*reader, *memory), 10s)).value();
  const std::vector<std::byte> source(1 << 20);
  std::atomic<int> num_done{0};
  for (int i = 0; i < 10; ++i)
    ASSERT_TRUE(channel->Put({{source.data(), 0, 1 << 20}}, [&](absl::Status) { ++num_done; }).ok());
  writer->Stop();
  EXPECT_EQ(num_done.load(), 10);
  EXPECT_FALSE(channel->Put({}, [](absl::Status) {}).ok());
  EXPECT_FALSE(writer->Connect(Describe(*reader, *memory), 1s).ok());
  channel.reset();
  memory.reset();
  reader->Stop();
}

}  // namespace
}  // namespace spl::transport
