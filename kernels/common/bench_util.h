// Shared by the kernel benchmarks: the context, and this machine's own ceilings measured in the same run.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels/backend/backend.h"
#include "kernels/common/kernel_context.h"
#include "kernels/common/parallel.h"

namespace spl::kernels::bench {

// SPLICE_BENCH_THREADS, or one per core.
inline int Threads() {
  static const int threads = [] {
    const char* fixed = std::getenv("SPLICE_BENCH_THREADS");
    return fixed != nullptr ? std::atoi(fixed) : static_cast<int>(std::thread::hardware_concurrency());
  }();
  return threads;
}

inline const KernelContext& Context() {
  static ThreadPool pool(Threads());
  static const KernelContext ctx{.pool = &pool, .isa = DetectCpuIsa()};
  return ctx;
}

inline std::vector<float> Normals(size_t n) {
  std::mt19937_64 engine(1);
  std::normal_distribution<float> normal;
  std::vector<float> v(std::min<size_t>(n, 1 << 20));
  for (float& x : v) x = normal(engine);
  v.reserve(n);
  while (v.size() < n) v.insert(v.end(), v.begin(), v.begin() + static_cast<int64_t>(std::min(v.size(), n - v.size())));
  return v;
}

inline double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Best time of many short runs: the limit of the machine, without the noise of its neighbours.
template <typename F>
double BestSeconds(const F& run, double budget_s = 1.0) {
  run();
  double best = 1e30;
  for (const double end = Now() + budget_s; Now() < end;) {
    const double begin = Now();
    run();
    best = std::min(best, Now() - begin);
  }
  return best;
}

// Bytes copied per second by memcpy on all threads, between buffers far larger than the caches.
inline double CopyBytesPerSecond() {
  static const double rate = [] {
    constexpr size_t kBytes = size_t{256} << 20, kPart = size_t{1} << 20;
    const auto backend = MakeCpuBackend();
    const auto from = backend->Allocate(kBytes), to = backend->Allocate(kBytes);
    std::memset((*from)->data(), 1, kBytes);
    std::memset((*to)->data(), 2, kBytes);
    const double s = BestSeconds([&] {
      ParallelTasks(Context(), kBytes / kPart, [&](int64_t i) {
        std::memcpy(static_cast<char*>((*to)->data()) + i * kPart, static_cast<char*>((*from)->data()) + i * kPart,
                    kPart);
      });
    });
    return kBytes / s;
  }();
  return rate;
}

// Flops per second of cpu::Linear for 512 rows of splice-tiny's qkv projection.
inline double GemmFlopsPerSecond() {
  static const double rate = [] {
    constexpr int64_t kRows = 512, kIn = 384, kOut = 1024;
    const std::vector<float> w = Normals(kIn * kOut), x = Normals(kRows * kIn);
    std::vector<float> y(kRows * kOut);
    const auto packed = cpu::PackLinear({w.data(), DType::kF32, kOut, kIn}, GemmCompute::kF32);
    const LinearArgs args{x.data(), packed->get(), nullptr, y.data(), kRows};
    return 2.0 * kRows * kIn * kOut / BestSeconds([&] { (void)cpu::Linear(Context(), args); });
  }();
  return rate;
}

}  // namespace spl::kernels::bench
