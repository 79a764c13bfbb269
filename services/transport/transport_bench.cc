// Rates of the transport, beside a bare memcpy of the same bytes in the same run.
//
//   splice_transport_bench                    (one process; the receiving transport has its own threads)
#include <benchmark/benchmark.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "services/base/log.h"
#include "services/transport/kv_transport.h"

namespace {

using namespace spl::transport;
using namespace std::chrono_literals;

constexpr size_t kBytes = 64 << 20;
constexpr size_t kPageBytes = 16 << 10;

struct Fixture {
  explicit Fixture(const std::string& carriers) {
    TransportOptions options;
    options.carriers = carriers;
    reader = std::move(KvTransport::Create(options)).value();
    writer = std::move(KvTransport::Create(options)).value();
    memory = std::move(reader->Allocate(2 * kBytes)).value();
    source = std::move(writer->Allocate(kBytes)).value();
    std::memset(source->data(), 1, kBytes);
    const RemoteMemory remote{reader->listen_address(), memory->packed_rkey(),
                              reinterpret_cast<uint64_t>(memory->data()), memory->size(), HostId()};
    channel = std::move(writer->Connect(remote, 10s)).value();
  }
  ~Fixture() {
    (void)channel->Close(10s);
    source.reset();
    writer->Stop();
    memory.reset();
    reader->Stop();
  }
  std::unique_ptr<KvTransport> reader, writer;
  std::unique_ptr<RegisteredMemory> memory, source;
  std::unique_ptr<KvChannel> channel;
};

void PutAndFlush(benchmark::State& state, Fixture& fixture, const std::vector<PutOp>& ops) {
  for (auto _ : state) {
    if (!fixture.channel->Put(ops, [](absl::Status) {}).ok() || !fixture.channel->FlushAndWait(10s).ok()) {
      state.SkipWithError("transfer failed");
      return;
    }
  }
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations()) * static_cast<int64_t>(kBytes));
}

void Memcpy(benchmark::State& state) {
  Fixture fixture("shm");  // the same kind of memory on both sides
  for (auto _ : state) {
    std::memcpy(fixture.memory->data(), fixture.source->data(), kBytes);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations()) * static_cast<int64_t>(kBytes));
}

void OneRange(benchmark::State& state, const char* carriers) {
  Fixture fixture(carriers);
  PutAndFlush(state, fixture, {{fixture.source->data(), 0, kBytes}});
}

// A sequence's pages: next to each other on both sides, or `gap` bytes apart at the receiver (nothing to join).
void Pages(benchmark::State& state, const char* carriers, size_t gap) {
  Fixture fixture(carriers);
  std::vector<PutOp> ops;
  for (size_t at = 0; at < kBytes; at += kPageBytes) {
    ops.push_back({fixture.source->data() + at, at / kPageBytes * (kPageBytes + gap), kPageBytes});
  }
  PutAndFlush(state, fixture, ops);
}

BENCHMARK(Memcpy)->UseRealTime();
BENCHMARK_CAPTURE(OneRange, shm, "shm")->UseRealTime();
BENCHMARK_CAPTURE(OneRange, tcp, "tcp")->UseRealTime();
BENCHMARK_CAPTURE(Pages, shm_adjacent, "shm", 0)->UseRealTime();
BENCHMARK_CAPTURE(Pages, shm_scattered, "shm", kPageBytes)->UseRealTime();
BENCHMARK_CAPTURE(Pages, tcp_adjacent, "tcp", 0)->UseRealTime();
BENCHMARK_CAPTURE(Pages, tcp_scattered, "tcp", kPageBytes)->UseRealTime();

}  // namespace

int main(int argc, char** argv) {
  spl::log::SetLevel(spl::log::Level::kError);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
