// The real program: it is killed at bad moments and started again on the same directory.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <thread>

#include "services/chunk/remote/record_client.h"
#include "services/chunk/remote/remote_chunk_store.h"
#include "tests/support/chunks.h"
#include "tests/support/temp_dir.h"

namespace spl::kvstore {
namespace {

using chunk::Chunk;
using testing::SameChunk;
using testing::TempDir;
using testing::TestChunk;
using testing::TestKey;

constexpr size_t kPayload = 50000;

std::chrono::steady_clock::time_point Soon() { return std::chrono::steady_clock::now() + std::chrono::seconds(20); }

class Process {
 public:
  explicit Process(std::vector<std::string> arguments) {
    int out[2];
    EXPECT_EQ(pipe(out), 0);
    pid_ = fork();
    if (pid_ == 0) {
      std::vector<char*> argv = {const_cast<char*>(SPLICE_KVSTORE)};
      for (std::string& argument : arguments) argv.push_back(argument.data());
      argv.push_back(nullptr);
      dup2(out[1], 1);
      close(out[0]);
      close(out[1]);
      execv(SPLICE_KVSTORE, argv.data());
      _exit(127);
    }
    close(out[1]);
    out_ = fdopen(out[0], "r");
    char grpc[128] = "", metrics[128] = "";
    if (std::fscanf(out_, "ready grpc=%127s metrics=%127s", grpc, metrics) == 2) address_ = grpc;
  }
  ~Process() {
    if (pid_ > 0) Kill(SIGKILL);
    std::fclose(out_);
  }
  const std::string& address() const { return address_; }
  void Signal(int signal_number) { kill(pid_, signal_number); }
  int Kill(int signal_number) {
    Signal(signal_number);
    return Wait();
  }
  int Wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return status;
  }

 private:
  pid_t pid_ = -1;
  FILE* out_ = nullptr;
  std::string address_;
};

std::vector<std::string> Arguments(const TempDir& dir) {
  return {"--listen",   "127.0.0.1:0",        "--metrics-listen", "127.0.0.1:0", "--memory-bytes", "1MiB",
          "--data-dir", dir.path() + "/data", "--disk-bytes",     "2GiB",        "--log-level",    "error"};
}

// How many of chunks 0 … n-1 come back; each that does must be right.
uint64_t CountGood(const std::string& address, uint64_t n) {
  const auto store = std::move(chunk::RemoteChunkStore::Connect(address)).value();
  uint64_t good = 0;
  for (uint64_t i = 0; i < n; ++i) {
    const chunk::ChunkKey key = TestKey(i);
    const auto got = store->GetLeading({&key, 1}, Soon(), [&](Chunk&& c) {
      EXPECT_TRUE(SameChunk(c, TestChunk(i, kPayload))) << i;
      return true;
    });
    EXPECT_TRUE(got.ok()) << got.status();
    good += got.ok() ? *got : 0;
  }
  return good;
}

TEST(KvStoreProcess, SigtermKeepsEverything) {
  TempDir dir;
  constexpr uint64_t kChunks = 100;
  {
    Process process(Arguments(dir));
    ASSERT_NE(process.address(), "");
    const auto store = std::move(chunk::RemoteChunkStore::Connect(process.address())).value();
    for (uint64_t i = 0; i < kChunks; ++i) {
      const Chunk chunk = TestChunk(i, kPayload);
      ASSERT_TRUE(store->Put({&chunk, 1}, Soon()).ok());
    }
    const int status = process.Kill(SIGTERM);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
  Process process(Arguments(dir));
  EXPECT_EQ(CountGood(process.address(), kChunks), kChunks);
}

// Killed between any two of its steps, and in the middle of them, round after round on one directory: nothing wrong is
// ever served, and what was on disk before a round is there after it.
TEST(KvStoreProcess, SurvivesKillAtNamedMoments) {
  TempDir dir;
  uint64_t next = 0;
  uint64_t good_before = 0;
  for (const char* fault : {"kvstore.slab.write=kill@5", "kvstore.disk.synced=kill@2", "kvstore.disk.committed=kill@2",
                            "kvstore.slab.write=kill@1", "kvstore.disk.committed=kill@1"}) {
    SCOPED_TRACE(fault);
    std::vector<std::string> arguments = Arguments(dir);
    arguments.insert(arguments.end(), {"--fault", fault});
    Process process(arguments);
    ASSERT_NE(process.address(), "");
    const auto store = std::move(chunk::RemoteChunkStore::Connect(process.address())).value();
    for (int i = 0; i < 1000; ++i) {  // until it dies of its fault
      const Chunk chunk = TestChunk(next++, kPayload);
      if (!store->Put({&chunk, 1}, Soon()).ok()) break;
    }
    const int status = process.Wait();
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
    Process again(Arguments(dir));
    ASSERT_NE(again.address(), "") << "it starts on what the dead one left";
    const uint64_t good = CountGood(again.address(), next);
    EXPECT_GE(good, good_before);
    good_before = good;
    again.Kill(SIGTERM);
  }
  EXPECT_GT(good_before, 0u);
}

TEST(KvStoreProcess, SurvivesKillAtRandomMoments) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  TempDir dir;
  uint64_t next = 0;
  uint64_t good_before = 0;
  for (int round = 0; round < 6; ++round) {
    Process process(Arguments(dir));
    ASSERT_NE(process.address(), "");
    EXPECT_GE(CountGood(process.address(), next), good_before);
    const auto store = std::move(chunk::RemoteChunkStore::Connect(process.address())).value();
    const uint64_t puts = 1 + random() % 60;
    for (uint64_t i = 0; i < puts; ++i) {
      const Chunk chunk = TestChunk(next++, kPayload);
      ASSERT_TRUE(store->Put({&chunk, 1}, Soon()).ok());
    }
    process.Kill(SIGKILL);  // the writer is somewhere behind
    Process again(Arguments(dir));
    ASSERT_NE(again.address(), "");
    good_before = CountGood(again.address(), next);
    again.Kill(SIGKILL);
  }
}

// What a commit called durable is there after kill -9 at any moment, by either way of putting; what was not yet called
// so may be, and is right when it is. SPLICE_KILL_ROUNDS sets the number of rounds (8; the full test has 50),
// SPLICE_SEED the seed.
TEST(KvStoreProcess, NothingDurableIsLostByKill) {
  const char* const wanted = std::getenv("SPLICE_KILL_ROUNDS");
  const int num_rounds = wanted == nullptr ? 8 : std::atoi(wanted);
  const char* const given = std::getenv("SPLICE_SEED");
  const uint64_t seed = given == nullptr ? std::random_device()() : std::strtoull(given, nullptr, 10);
  std::printf("seed %llu, %d rounds\n", static_cast<unsigned long long>(seed), num_rounds);
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  TempDir dir;
  const auto transport = std::move(transport::KvTransport::Create({})).value();
  constexpr size_t kBytes = 20'000;
  uint64_t next = 0;
  std::vector<uint64_t> durable, uncertain;
  uint64_t num_lost_of_uncertain = 0, num_killed_while_putting = 0;
  for (int round = 0; round < num_rounds; ++round) {
    Process process(Arguments(dir));
    ASSERT_NE(process.address(), "");
    chunk::RemoteStoreOptions options;
    if (round % 2 == 0) options.transport = transport.get();
    auto store = std::move(chunk::RemoteChunkStore::Connect(process.address(), options)).value();
    // The killer strikes after 5 to 300 ms, in the middle of whatever is going on.
    const auto strike = std::chrono::steady_clock::now() + std::chrono::milliseconds(5 + random() % 296);
    std::thread killer([&process, strike] {
      std::this_thread::sleep_until(strike);
      process.Signal(SIGKILL);
    });
    for (bool alive = true; alive;) {
      std::vector<Chunk> batch;
      for (uint64_t n = 1 + random() % 12; n > 0; --n) batch.push_back(TestChunk(next++, kBytes));
      const bool ask = random() % 4 != 0;
      const auto report = store->PutWith(chunk::PointersTo(batch), {.durable = ask}, Soon());
      alive = report.ok();
      if (alive && ask) {
        EXPECT_EQ(report->num_durable, batch.size());
      }
      auto& list = alive && ask ? durable : uncertain;
      for (const Chunk& chunk : batch) {
        uint64_t number = next - batch.size() + static_cast<uint64_t>(&chunk - batch.data());
        list.push_back(number);
      }
      num_killed_while_putting += !alive;
    }
    killer.join();
    const int status = process.Wait();
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
    store.reset();
    Process again(Arguments(dir));
    ASSERT_NE(again.address(), "") << "it starts on what the dead one left";
    options.transport = round % 4 < 2 ? transport.get() : nullptr;
    store = std::move(chunk::RemoteChunkStore::Connect(again.address(), options)).value();
    const auto has = [&](uint64_t number) {
      const chunk::ChunkKey key = TestKey(number);
      const auto got = store->GetLeading({&key, 1}, Soon(), [&](Chunk&& c) {
        EXPECT_TRUE(SameChunk(c, TestChunk(number, kBytes))) << number;
        return true;
      });
      EXPECT_TRUE(got.ok()) << got.status();
      return got.ok() && *got == 1;
    };
    for (const uint64_t number : durable) ASSERT_TRUE(has(number)) << "durable chunk " << number << " is lost";
    for (const uint64_t number : uncertain) num_lost_of_uncertain += !has(number);
    uncertain.clear();
    store.reset();
    again.Kill(random() % 2 == 0 ? SIGKILL : SIGTERM);
  }
  std::printf("%zu durable chunks, none lost; %llu not durable were lost; %llu kills during a put\n", durable.size(),
              static_cast<unsigned long long>(num_lost_of_uncertain),
              static_cast<unsigned long long>(num_killed_while_putting));
  EXPECT_GT(durable.size(), static_cast<size_t>(num_rounds));
  transport->Stop();
}

// A record that was acknowledged is there after kill -9, with the revision that was told; one that was not is the old
// or the new one, and nothing in between.
TEST(KvStoreProcess, AcknowledgedRecordsSurviveKill) {
  const char* const given = std::getenv("SPLICE_SEED");
  const uint64_t seed = given == nullptr ? std::random_device()() : std::strtoull(given, nullptr, 10);
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  TempDir dir;
  constexpr chunk::Digest kOwner = {7};
  const auto value_of = [](uint64_t n) { return std::to_string(n) + ":" + std::string(n * 7919 % 300'000, 'r'); };
  std::map<std::string, std::pair<uint64_t, uint64_t>> acknowledged;  // name → revision, value's number
  uint64_t next = 0;
  for (int round = 0; round < 8; ++round) {
    std::vector<std::string> arguments = Arguments(dir);
    if (round == 0) arguments.insert(arguments.end(), {"--fault", "kvstore.record.saved=kill@9"});
    Process process(arguments);
    ASSERT_NE(process.address(), "");
    const auto records = std::move(chunk::RecordClient::Connect(process.address())).value();
    const auto strike = std::chrono::steady_clock::now() + std::chrono::milliseconds(20 + random() % 200);
    std::thread killer([&process, strike, round] {
      if (round == 0) return;  // dies of its fault
      std::this_thread::sleep_until(strike);
      process.Signal(SIGKILL);
    });
    std::pair<std::string, uint64_t> last;  // that nobody acknowledged
    while (true) {
      last = {"r" + std::to_string(random() % 5), next++};
      const auto known = acknowledged.find(last.first);
      const uint64_t expected = known == acknowledged.end() ? 0 : known->second.first;
      const auto put = records->Put(kOwner, last.first, value_of(last.second), {.expected_revision = expected}, Soon());
      if (!put.ok()) {
        EXPECT_NE(put.status().code(), absl::StatusCode::kAborted) << put.status();
        break;
      }
      acknowledged[last.first] = {*put, last.second};
    }
    killer.join();
    const int status = process.Wait();
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
    Process again(Arguments(dir));
    ASSERT_NE(again.address(), "") << "it starts on what the dead one left";
    const auto after = std::move(chunk::RecordClient::Connect(again.address())).value();
    for (const auto& [name, known] : acknowledged) {
      const auto record = after->Get(kOwner, name, Soon());
      ASSERT_TRUE(record.ok()) << name << " " << record.status();
      if (name == last.first && record->revision > known.first) {
        EXPECT_EQ(record->value, value_of(last.second)) << name;
        continue;
      }
      EXPECT_EQ(record->revision, known.first) << name;
      EXPECT_EQ(record->value, value_of(known.second)) << name;
    }
    if (const auto record = after->Get(kOwner, last.first, Soon()); record.ok()) {
      acknowledged[last.first] = {
          record->revision, record->value == value_of(last.second) ? last.second : acknowledged[last.first].second};
    }
    again.Kill(SIGKILL);
  }
  EXPECT_EQ(acknowledged.size(), 5u);
}

TEST(KvStoreProcess, RefusesBadFlagsAndDirectories) {
  for (const auto& arguments : std::vector<std::vector<std::string>>{
           {"--memory-bytes", "lots"}, {"--no-such-flag"}, {"--log-level", "loud"}, {"--fault", "x=y"}}) {
    Process process(arguments);
    const int status = process.Wait();
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 2) << arguments[0] << " " << status;
  }
  TempDir dir;
  std::fclose(std::fopen((dir.path() + "/foreign").c_str(), "w"));
  Process process({"--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0", "--data-dir", dir.path()});
  const int status = process.Wait();
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 1) << status;
}

}  // namespace
}  // namespace spl::kvstore
