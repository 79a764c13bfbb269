// The streaming operations between the products, in bytes touched per second.
#include <benchmark/benchmark.h>

#include "kernels/activation/activation.h"
#include "kernels/common/bench_util.h"
#include "kernels/norm/norm.h"

namespace spl::kernels {
namespace {

void SetRate(benchmark::State& state, double bytes, double best) {
  state.counters["GBps"] = bytes / best * 1e-9;
  state.counters["copy_GBps"] = bench::CopyBytesPerSecond() * 1e-9;
}

// rows, width
void RmsNorm(benchmark::State& state) {
  const int64_t rows = state.range(0), width = state.range(1);
  std::vector<float> residual = bench::Normals(rows * width), out(rows * width);
  const std::vector<float> delta(rows * width, 1e-3f), weight(width, 1.0f);
  const RmsNormArgs args{residual.data(), delta.data(), weight.data(), out.data(), rows, width, 1e-5f};
  const double best = bench::BestSeconds([&] { (void)cpu::RmsNorm(bench::Context(), args); }, 0.3);
  for (auto _ : state) (void)cpu::RmsNorm(bench::Context(), args);
  SetRate(state, 16.0 * static_cast<double>(rows * width), best);
}
BENCHMARK(RmsNorm)->ArgNames({"rows", "width"})->Args({1, 384})->Args({512, 384})->Args({16384, 4096})->UseRealTime();

// rows, width
void SiluMul(benchmark::State& state) {
  const int64_t rows = state.range(0), width = state.range(1);
  const std::vector<float> gate_up = bench::Normals(rows * 2 * width);
  std::vector<float> out(rows * width);
  const SiluMulArgs args{gate_up.data(), out.data(), rows, width};
  const double best = bench::BestSeconds([&] { (void)cpu::SiluMul(bench::Context(), args); }, 0.3);
  for (auto _ : state) (void)cpu::SiluMul(bench::Context(), args);
  SetRate(state, 12.0 * static_cast<double>(rows * width), best);
}
BENCHMARK(SiluMul)->ArgNames({"rows", "width"})->Args({1, 1024})->Args({512, 1024})->Args({2048, 14336})->UseRealTime();

}  // namespace
}  // namespace spl::kernels
