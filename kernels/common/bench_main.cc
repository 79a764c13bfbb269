// All kernel benchmarks in one program: the ceilings they are compared with are then those of the same run.
#include <benchmark/benchmark.h>

#include <string>

#include "kernels/common/bench_util.h"

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  const auto backend = spl::kernels::MakeCpuBackend();
  benchmark::AddCustomContext("backend", backend->description());
  benchmark::AddCustomContext("threads", std::to_string(spl::kernels::bench::Threads()));
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
