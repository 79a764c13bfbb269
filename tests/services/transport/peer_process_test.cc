// The peer is another process, which may die.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <future>
#include <random>

#include "services/base/ids.h"
#include "services/transport/kv_transport.h"
#include "tests/support/eventually.h"
#include "tests/support/fnv.h"

namespace spl::transport {
namespace {

using namespace std::chrono_literals;

class PeerProcess {
 public:
  PeerProcess(const std::string& carriers, size_t bytes) {
    int to_child[2], from_child[2];
    EXPECT_EQ(pipe(to_child), 0);
    EXPECT_EQ(pipe(from_child), 0);
    const std::string size = std::to_string(bytes);
    pid_ = fork();
    if (pid_ == 0) {
      dup2(to_child[0], 0);
      dup2(from_child[1], 1);
      for (const int fd : {to_child[0], to_child[1], from_child[0], from_child[1]}) close(fd);
      execl(SPLICE_TRANSPORT_PEER, SPLICE_TRANSPORT_PEER, carriers.c_str(), size.c_str(), nullptr);
      _exit(127);
    }
    close(to_child[0]);
    close(from_child[1]);
    in_ = fdopen(to_child[1], "w");
    out_ = fdopen(from_child[0], "r");
    ReadMemory();
  }
  ~PeerProcess() {
    std::fclose(in_);
    std::fclose(out_);
    if (pid_ > 0) waitpid(pid_, nullptr, 0);
  }

  const RemoteMemory& memory() const { return memory_; }
  void Kill() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  uint64_t HashOf(size_t offset, size_t bytes) {
    std::fprintf(in_, "hash %zu %zu\n", offset, bytes);
    std::fflush(in_);
    unsigned long long hash = 0;
    EXPECT_EQ(std::fscanf(out_, " %llx", &hash), 1);
    return hash;
  }

  void Pause() { kill(pid_, SIGSTOP); }
  // Opens a channel from there into `memory`; the address of the peer's end.
  std::string ConnectTo(const RemoteMemory& memory) {
    const std::string rkey = HexEncode({reinterpret_cast<const uint8_t*>(memory.rkey.data()), memory.rkey.size()});
    std::fprintf(in_, "connect %s %s %llu %llu %s\n", memory.address.c_str(), memory.host_id.c_str(),
                 static_cast<unsigned long long>(memory.base), static_cast<unsigned long long>(memory.size),
                 rkey.c_str());
    std::fflush(in_);
    char writer[128] = "";
    EXPECT_EQ(std::fscanf(out_, " writer %127s", writer), 1);
    return writer;
  }

 private:
  void ReadMemory() {
    char address[128], host[256], rkey[4096];
    unsigned long long base = 0, size = 0;
    ASSERT_EQ(std::fscanf(out_, "memory %127s %255s %llu %llu %4095s", address, host, &base, &size, rkey), 5);
    memory_ = {address, *HexDecode(rkey), base, size, host};
  }

  pid_t pid_ = -1;
  FILE* in_ = nullptr;
  FILE* out_ = nullptr;
  RemoteMemory memory_;
};

class PeerProcessTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    TransportOptions options;
    options.carriers = GetParam();
    writer_ = std::move(KvTransport::Create(options)).value();
  }
  void TearDown() override { writer_->Stop(); }

  std::unique_ptr<KvChannel> ConnectTo(const PeerProcess& peer) {
    auto channel = writer_->Connect(peer.memory(), 10s);
    EXPECT_TRUE(channel.ok()) << channel.status();
    return channel.ok() ? std::move(channel).value() : nullptr;
  }

  std::unique_ptr<KvTransport> writer_;
};

TEST_P(PeerProcessTest, BytesArriveInTheOtherProcess) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  constexpr size_t kBytes = 16 << 20;
  PeerProcess peer(GetParam(), kBytes);
  const auto channel = ConnectTo(peer);
  ASSERT_NE(channel, nullptr);
  EXPECT_EQ(channel->carrier(), GetParam());
  std::vector<std::byte> source(kBytes);
  for (int round = 0; round < 5; ++round) {
    for (std::byte& byte : source) byte = static_cast<std::byte>(random());
    std::vector<PutOp> ops;
    for (size_t at = 0; at < kBytes;) {
      const size_t bytes = std::min<size_t>(1 + random() % 200000, kBytes - at);
      ops.push_back({source.data() + at, at, bytes});
      at += bytes;
    }
    std::shuffle(ops.begin(), ops.end(), random);
    ASSERT_TRUE(channel->Put(ops, [](absl::Status status) { EXPECT_TRUE(status.ok()) << status; }).ok());
    ASSERT_TRUE(channel->FlushAndWait(20s).ok());
    ASSERT_EQ(peer.HashOf(0, kBytes), testing::Fnv1a(source.data(), kBytes));
  }
  EXPECT_TRUE(channel->Close(10s).ok());
}

TEST_P(PeerProcessTest, AKilledPeerIsUnavailableWithinASecond) {
  constexpr size_t kBytes = 64 << 20;
  PeerProcess peer(GetParam(), kBytes);
  const auto channel = ConnectTo(peer);
  ASSERT_NE(channel, nullptr);
  const std::vector<std::byte> source(kBytes);
  std::atomic<int> num_done{0};
  std::atomic<int> num_accepted{0};
  std::promise<void> first_done;
  // Keeps the channel busy: every finished write starts another one, until the peer is lost.
  std::function<void(absl::Status)> again = [&](absl::Status status) {
    if (++num_done == 1) first_done.set_value();
    if (status.ok() && channel->Put({{source.data(), 0, kBytes}}, again).ok()) ++num_accepted;
  };
  for (int i = 0; i < 4; ++i) {
    ++num_accepted;
    ASSERT_TRUE(channel->Put({{source.data(), 0, kBytes}}, again).ok());
  }
  first_done.get_future().wait();
  const auto killed = std::chrono::steady_clock::now();
  peer.Kill();
  absl::Status status;
  while ((status = channel->FlushAndWait(100ms)).ok() || status.code() == absl::StatusCode::kDeadlineExceeded) {
    ASSERT_LT(std::chrono::steady_clock::now() - killed, 5s) << status;
  }
  EXPECT_LT(std::chrono::steady_clock::now() - killed, 1s);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_EQ(channel->status().code(), absl::StatusCode::kUnavailable);
  ASSERT_TRUE(channel->Close(1s).ok());
  EXPECT_EQ(num_done.load(), num_accepted.load());
  EXPECT_LT(std::chrono::steady_clock::now() - killed, 2s);
}

TEST_P(PeerProcessTest, AnIdleChannelLearnsOfThePeersDeath) {
  PeerProcess peer(GetParam(), 4096);
  const auto channel = ConnectTo(peer);
  ASSERT_NE(channel, nullptr);
  peer.Kill();
  const auto killed = std::chrono::steady_clock::now();
  while (channel->status().ok()) {
    ASSERT_LT(std::chrono::steady_clock::now() - killed, 1s);
    std::this_thread::yield();
  }
  EXPECT_EQ(channel->status().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(channel->Close(1s).ok());
}

TEST_P(PeerProcessTest, ARestartedPeerIsReachedAtItsNewAddress) {
  auto first = std::make_unique<PeerProcess>(GetParam(), 1 << 20);
  const std::vector<std::byte> source(1 << 20, std::byte(0x77));
  auto channel = ConnectTo(*first);
  ASSERT_NE(channel, nullptr);
  first->Kill();
  EXPECT_TRUE(channel->Close(2s).ok());
  PeerProcess second(GetParam(), 1 << 20);
  channel = ConnectTo(second);
  ASSERT_NE(channel, nullptr);
  ASSERT_TRUE(channel->Put({{source.data(), 0, source.size()}}, [](absl::Status) {}).ok());
  ASSERT_TRUE(channel->FlushAndWait(10s).ok());
  EXPECT_EQ(second.HashOf(0, source.size()), testing::Fnv1a(source.data(), source.size()));
  EXPECT_TRUE(channel->Close(2s).ok());
}

// The owner of the memory learns at once that a writer is dead; one that is stopped still counts.
TEST_P(PeerProcessTest, ADeadWriterIsGoneAndAStoppedOneIsNot) {
  constexpr auto kEver = std::chrono::steady_clock::time_point::max();
  const auto memory = std::move(writer_->Allocate(1 << 20)).value();
  const RemoteMemory own{writer_->listen_address(), memory->packed_rkey(), reinterpret_cast<uint64_t>(memory->data()),
                         memory->size(), HostId()};
  PeerProcess peer(GetParam(), 4096), other(GetParam(), 4096);
  const std::string id = peer.ConnectTo(own), other_id = other.ConnectTo(own);
  ASSERT_NE(id, other_id);
  EXPECT_EQ(writer_->ConnectionsOf(id, kEver).all(), 1u);
  peer.Pause();
  other.Kill();
  EXPECT_TRUE(test::Eventually([&] { return writer_->ConnectionsOf(other_id, kEver).all() == 0; }, 5s));
  EXPECT_EQ(writer_->ConnectionsOf(id, kEver).all(), 1u) << "it may go on to write";
  peer.Kill();  // stopped as it is
  EXPECT_TRUE(test::Eventually([&] { return writer_->ConnectionsOf(id, kEver).all() == 0; }, 5s));
}

INSTANTIATE_TEST_SUITE_P(Carriers, PeerProcessTest, ::testing::Values("shm", "tcp"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace spl::transport
