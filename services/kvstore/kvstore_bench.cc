// The disk tier and the wire, beside a bare checksum of the same bytes. The directory is under TMPDIR.
#include <benchmark/benchmark.h>

#include <cstdlib>
#include <filesystem>

#include "kernels/kv_copy/crc32c.h"
#include "services/base/log.h"
#include "services/chunk/remote/remote_chunk_store.h"
#include "services/kvstore/disk_tier.h"
#include "services/kvstore/kvstore_server.h"
#include "tests/support/chunks.h"
#include "tests/support/temp_dir.h"

namespace {

using namespace spl;

constexpr size_t kPayload = 1 << 20;
constexpr uint64_t kBatch = 64;

std::vector<std::shared_ptr<const chunk::Chunk>> Batch(uint64_t from) {
  std::vector<std::shared_ptr<const chunk::Chunk>> batch;
  for (uint64_t n = from; n < from + kBatch; ++n) {
    batch.push_back(std::make_shared<const chunk::Chunk>(testing::TestChunk(n, kPayload)));
  }
  return batch;
}

void SetBytes(benchmark::State& state, uint64_t chunks) {
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(chunks * kPayload));
}

void Checksum(benchmark::State& state) {
  const chunk::Chunk chunk = testing::TestChunk(1, kPayload);
  for (auto _ : state) benchmark::DoNotOptimize(kernels::Crc32cExtend(0, chunk.payload.data(), kPayload));
  SetBytes(state, 1);
}

void DiskWrite(benchmark::State& state) {
  const testing::TempDir dir;
  auto tier = std::move(kvstore::DiskTier::Open({dir.path() + "/data", 1ull << 30})).value();
  uint64_t next = 0;
  for (auto _ : state) {
    state.PauseTiming();
    const auto batch = Batch(next += kBatch);
    state.ResumeTiming();
    if (!tier->Write(batch).status.ok()) state.SkipWithError("write failed");
  }
  SetBytes(state, kBatch);
}

void DiskRead(benchmark::State& state) {
  const testing::TempDir dir;
  auto tier = std::move(kvstore::DiskTier::Open({dir.path() + "/data", 1ull << 30})).value();
  if (!tier->Write(Batch(0)).status.ok()) state.SkipWithError("write failed");
  uint64_t next = 0;
  for (auto _ : state) {
    if (!tier->Read(testing::TestKey(next++ % kBatch)).ok()) state.SkipWithError("read failed");
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
BENCHMARK(DiskWrite)->UseRealTime();
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
