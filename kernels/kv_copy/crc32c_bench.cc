// CRC32C of one thread, in cache and out of it.
#include <benchmark/benchmark.h>

#include "kernels/common/bench_util.h"
#include "kernels/kv_copy/crc32c.h"

namespace spl::kernels {
namespace {

void Crc32c(benchmark::State& state) {
  std::vector<unsigned char> data(static_cast<size_t>(state.range(0)), 0x5a);
  uint32_t crc = 0;
  for (auto _ : state) benchmark::DoNotOptimize(crc = Crc32cExtend(crc, data.data(), data.size()));
  state.SetBytesProcessed(state.iterations() * state.range(0));
}
BENCHMARK(Crc32c)->ArgName("bytes")->Arg(64)->Arg(1024)->Arg(16 << 10)->Arg(256 << 10)->Arg(64 << 20);

}  // namespace
}  // namespace spl::kernels
