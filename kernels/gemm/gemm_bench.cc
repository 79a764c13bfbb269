// cpu::Linear against a bare oneDNN matmul of the same shape with its own threads and its own packed weight.
#include <benchmark/benchmark.h>
#include <dlfcn.h>

#include <dnnl.hpp>
#include <unordered_map>

#include "kernels/common/bench_util.h"
#include "kernels/common/e4m3.h"
#include "kernels/gemm/gemm.h"

namespace spl::kernels {
namespace {

using dnnl::memory;

void SetOpenMpThreads(int n) {
  if (auto* set = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"))) set(n);
}

struct BareOneDnn {
  BareOneDnn(int64_t m, int64_t k, int64_t n, const std::vector<float>& w)
      : engine(dnnl::engine::kind::cpu, 0), stream(engine) {
    using Type = memory::data_type;
    const memory::desc x({m, k}, Type::f32, memory::format_tag::ab), y({m, n}, Type::f32, memory::format_tag::ab);
    const dnnl::matmul::primitive_desc desc(
        dnnl::matmul::desc(x, memory::desc({k, n}, Type::f32, memory::format_tag::any), y), engine);
    memory plain({{k, n}, Type::f32, memory::format_tag::ba}, engine, const_cast<float*>(w.data()));
    weight = memory(desc.weights_desc(), engine);
    dnnl::reorder(plain, weight).execute(stream, plain, weight);
    stream.wait();
    product = dnnl::matmul(desc);
  }

  void Run(const float* x, float* y, int64_t m, int64_t k, int64_t n) {
    memory::desc xd({m, k}, memory::data_type::f32, memory::format_tag::ab),
        yd({m, n}, memory::data_type::f32, memory::format_tag::ab);
    product.execute(stream, {{DNNL_ARG_SRC, memory(xd, engine, const_cast<float*>(x))},
                             {DNNL_ARG_WEIGHTS, weight},
                             {DNNL_ARG_DST, memory(yd, engine, y)}});
    stream.wait();
  }

  dnnl::engine engine;
  dnnl::stream stream;
  memory weight;
  dnnl::matmul product;
};

// rows, in_features, out_features
void Linear(benchmark::State& state) {
  const int64_t m = state.range(0), k = state.range(1), n = state.range(2);
  const std::vector<float> w = bench::Normals(k * n), x = bench::Normals(m * k);
  std::vector<float> y(m * n);
  const auto packed = cpu::PackLinear({w.data(), DType::kF32, n, k}, GemmCompute::kF32);
  const LinearArgs args{x.data(), packed->get(), nullptr, y.data(), m};
  const double flops = 2.0 * static_cast<double>(m * k * n);

  // Alternating, so that a noisy neighbour hits both. Each side gets its own thread setting.
  double ours = 1e30, bare = 1e30;
  SetOpenMpThreads(bench::Threads());
  BareOneDnn one_dnn(m, k, n, w);
  for (int round = 0; round < 5; ++round) {
    SetOpenMpThreads(bench::Threads());
    bare = std::min(bare, bench::BestSeconds([&] { one_dnn.Run(x.data(), y.data(), m, k, n); }, 0.05));
    SetOpenMpThreads(1);
    std::this_thread::sleep_for(std::chrono::milliseconds(30));  // OpenMP's threads spin on for a while
    ours = std::min(ours, bench::BestSeconds([&] { (void)cpu::Linear(bench::Context(), args); }, 0.05));
  }
  for (auto _ : state) {
    if (absl::Status s = cpu::Linear(bench::Context(), args); !s.ok()) state.SkipWithError(s.ToString().c_str());
  }
  state.counters["GFLOPS"] = flops / ours * 1e-9;
  state.counters["oneDNN_GFLOPS"] = flops / bare * 1e-9;
  state.counters["of_oneDNN"] = bare / ours;
  state.counters["weight_GBps"] = static_cast<double>(k * n) * 4 / ours * 1e-9;
}

void Shapes(benchmark::internal::Benchmark* b) {
  const std::pair<int64_t, int64_t> tiny[] = {{384, 1024}, {512, 384}, {384, 2048}, {1024, 384}, {384, 4096}};
  for (int64_t m : {1, 4, 16, 64, 512, 2048}) {
    for (const auto& [k, n] : tiny) b->Args({m, k, n});
  }
  for (int64_t m : {1, 16, 512}) b->Args({m, 4096, 4096});
  b->ArgNames({"rows", "in", "out"})->UseRealTime()->MinTime(0.1);
}
BENCHMARK(Linear)->Apply(Shapes);

// An FP8 weight with a scale a row, and with one for 128 columns, and an int4 weight with the latter, against the bf16
// weight of the same shape: milliseconds, and bytes of weight a second. rows, in_features, out_features
void LinearQuantized(benchmark::State& state) {
  const int64_t m = state.range(0), k = state.range(1), n = state.range(2), groups = (k + 127) / 128;
  const std::vector<float> x = bench::Normals(m * k);
  std::vector<float> y(m * n);
  std::vector<uint8_t> codes(n * k);
  std::vector<bf16> values(n * k);
  for (int64_t i = 0; i < n * k; ++i) {
    codes[i] = static_cast<uint8_t>(i * 37 % 127 + i % 2 * 128);
    values[i] = ToBf16(kE4M3Values[codes[i]]);
  }
  const std::vector<float> scales(n * groups, 0.01f);
  const auto compute = GemmCompute::kAuto;
  const auto by_row = cpu::PackLinear({codes.data(), DType::kE4M3, n, k, scales.data(), 0}, compute);
  const auto by_block = cpu::PackLinear({codes.data(), DType::kE4M3, n, k, scales.data(), 128}, compute);
  const auto int4 = cpu::PackLinear({.data = codes.data(),
                                     .dtype = DType::kInt4,
                                     .out_features = n,
                                     .in_features = k,
                                     .scales = scales.data(),
                                     .scale_group = 128},
                                    compute);
  const auto bf16_weight = cpu::PackLinear({values.data(), DType::kBF16, n, k}, compute);
  double row = 1e30, block = 1e30, half = 1e30, plain = 1e30;
  const auto seconds = [&](const LinearWeight& w) {
    const LinearArgs args{x.data(), &w, nullptr, y.data(), m};
    return bench::BestSeconds([&] { (void)cpu::Linear(bench::Context(), args); }, 0.1);
  };
  for (int round = 0; round < 5; ++round) {
    row = std::min(row, seconds(**by_row));
    block = std::min(block, seconds(**by_block));
    half = std::min(half, seconds(**int4));
    plain = std::min(plain, seconds(**bf16_weight));
  }
  for (auto _ : state) (void)cpu::Linear(bench::Context(), {x.data(), by_row->get(), nullptr, y.data(), m});
  state.counters["row_ms"] = row * 1e3;
  state.counters["block_ms"] = block * 1e3;
  state.counters["int4_ms"] = half * 1e3;
  state.counters["bf16_ms"] = plain * 1e3;
  state.counters["fp8_GBps"] = static_cast<double>(k * n) / row * 1e-9;
  state.counters["int4_GBps"] = static_cast<double>(k * n) / 2 / half * 1e-9;
  state.counters["bf16_GBps"] = static_cast<double>(k * n) * 2 / plain * 1e-9;
}
BENCHMARK(LinearQuantized)
    ->ArgsProduct({{1, 4, 16, 64, 512}, {4096}, {14336}})
    ->ArgNames({"rows", "in", "out"})
    ->UseRealTime()
    ->MinTime(0.05);

}  // namespace
}  // namespace spl::kernels
