// The disk tier and the wire, beside the bare disk and a bare checksum of the same bytes. Directories are under TMPDIR.
#include <benchmark/benchmark.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "kernels/kv_copy/crc32c.h"
#include "services/base/log.h"
#include "services/chunk/remote/remote_chunk_store.h"
#include "services/kvstore/disk_tier.h"
#include "services/kvstore/kvstore_server.h"
#include "tests/support/stored_chunks.h"
#include "tests/support/temp_dir.h"

namespace {

using namespace spl;

constexpr size_t kPayload = 1 << 20;
constexpr uint64_t kBatch = 64;

// A disk tier in a directory of its own.
struct Tier {
  Tier() {
    disk = std::move(kvstore::DiskTier::Open({dir.path() + "/data", 1ull << 30, {}}, catalog, namespaces)).value();
  }
  std::vector<kvstore::StoredChunkRef> Batch(uint64_t from) {
    std::vector<kvstore::StoredChunkRef> batch;
    for (uint64_t n = from; n < from + kBatch; ++n) {
      batch.push_back(testing::Stored(catalog, testing::TestChunk(n, kPayload)));
    }
    return batch;
  }
  const testing::TempDir dir;
  kvstore::NamespaceTable namespaces{Clock::Real()};
  kvstore::ChunkCatalog catalog{namespaces, Clock::Real()};
  std::unique_ptr<kvstore::DiskTier> disk;
};

// The disk alone: one file, O_DIRECT, pieces of a payload's size, one sync for each batch.
struct RawFile {
  RawFile() {
    fd = open((dir.path() + "/raw").c_str(), O_RDWR | O_CREAT | O_DIRECT, 0600);
    buffer = static_cast<char*>(std::aligned_alloc(4096, kPayload));
    std::memset(buffer, 1, kPayload);
    (void)!fallocate(fd, 0, 0, static_cast<off_t>(kBatch * kPayload));
  }
  ~RawFile() {
    close(fd);
    std::free(buffer);
  }
  bool WriteBatch() {
    for (uint64_t n = 0; n < kBatch; ++n) {
      if (pwrite(fd, buffer, kPayload, static_cast<off_t>(n * kPayload)) != static_cast<ssize_t>(kPayload))
        return false;
    }
    return fdatasync(fd) == 0;
  }
  const testing::TempDir dir;
  int fd = -1;
  char* buffer = nullptr;
};

void SetBytes(benchmark::State& state, uint64_t chunks) {
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(chunks * kPayload));
}

void Checksum(benchmark::State& state) {
  const chunk::Chunk chunk = testing::TestChunk(1, kPayload);
  for (auto _ : state) benchmark::DoNotOptimize(kernels::Crc32cExtend(0, chunk.payload.data(), kPayload));
  SetBytes(state, 1);
}

void RawDiskWrite(benchmark::State& state) {
  RawFile file;
  for (auto _ : state) {
    if (!file.WriteBatch()) state.SkipWithError("write failed");
  }
  SetBytes(state, kBatch);
}

void DiskWrite(benchmark::State& state) {
  Tier tier;
  uint64_t next = 0;
  for (auto _ : state) {
    state.PauseTiming();
    const auto batch = tier.Batch(next += kBatch);
    state.ResumeTiming();
    if (!tier.disk->Write(batch).status.ok()) state.SkipWithError("write failed");
  }
  SetBytes(state, kBatch);
}

void RawDiskRead(benchmark::State& state) {
  RawFile file;
  if (!file.WriteBatch()) state.SkipWithError("write failed");
  uint64_t next = 0;
  for (auto _ : state) {
    if (pread(file.fd, file.buffer, kPayload, static_cast<off_t>(next++ % kBatch * kPayload)) !=
        static_cast<ssize_t>(kPayload)) {
      state.SkipWithError("read failed");
    }
  }
  SetBytes(state, 1);
}

void DiskRead(benchmark::State& state) {
  Tier tier;
  if (!tier.disk->Write(tier.Batch(0)).status.ok()) state.SkipWithError("write failed");
  uint64_t next = 0;
  for (auto _ : state) {
    const auto chunk = tier.disk->Read(testing::TestKey(next++ % kBatch), testing::HeapSlot);
    if (!chunk.ok() || *chunk == nullptr) state.SkipWithError("read failed");
  }
  SetBytes(state, 1);
}

void RemoteGet(benchmark::State& state) {
  kvstore::KvStoreOptions options;
  auto server = std::move(kvstore::KvStoreServer::Start(options)).value();
  auto client = std::move(chunk::RemoteChunkStore::Connect(server->grpc_address())).value();
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(5);
  std::vector<chunk::ChunkKey> keys;
  for (uint64_t n = 0; n < kBatch; ++n) {
    const chunk::Chunk chunk = testing::TestChunk(n, kPayload);
    keys.push_back(chunk.header.key);
    if (!client->Put({&chunk, 1}, deadline).ok()) state.SkipWithError("put failed");
  }
  for (auto _ : state) {
    const auto got = client->GetLeading(keys, deadline, [](chunk::Chunk&&) { return true; });
    if (!got.ok() || *got != kBatch) state.SkipWithError("get failed");
  }
  SetBytes(state, kBatch);
}

BENCHMARK(Checksum)->UseRealTime();
BENCHMARK(RawDiskWrite)->UseRealTime();
BENCHMARK(DiskWrite)->UseRealTime();
BENCHMARK(RawDiskRead)->UseRealTime();
BENCHMARK(DiskRead)->UseRealTime();
BENCHMARK(RemoteGet)->UseRealTime();

}  // namespace

int main(int argc, char** argv) {
  spl::log::SetLevel(spl::log::Level::kError);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
