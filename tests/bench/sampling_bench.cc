// Time of drawing a token from a row of logits on the host: one row alone, and a batch of rows over some threads.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <random>
#include <vector>

#include "kernels/common/thread_pool.h"
#include "services/engine/runtime/sampler.h"
#include "tests/bench/median.h"

namespace spl {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRepeats = 21;

int Main(int argc, char** argv) {
  CLI::App app("Milliseconds of sampling.");
  int vocab = 131'072, rows = 32, threads = 1;
  double spread = 3;
  app.add_option("--vocab", vocab, "logits of a row")->check(CLI::Range(1, 10'000'000));
  app.add_option("--rows", rows, "of the batch")->check(CLI::Range(1, 1024));
  app.add_option("--threads", threads, "that share the rows")->check(CLI::Range(1, 1024));
  app.add_option("--spread", spread, "standard deviation of the logits");
  CLI11_PARSE(app, argc, argv);

  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, static_cast<float>(spread));
  std::vector<std::vector<float>> logits(static_cast<size_t>(rows), std::vector<float>(static_cast<size_t>(vocab)));
  for (std::vector<float>& row : logits) {
    for (float& x : row) x = normal(random);
  }
  kernels::ThreadPool pool(threads);
  struct Case {
    const char* name;
    float temperature, top_p;
    int32_t top_k;
  };
  for (const Case& c :
       {Case{"greedy", 0, 1, 0}, Case{"temperature 0.7", 0.7f, 1, 0}, Case{"temperature 0.7, top_p 0.9", 0.7f, 0.9f, 0},
        Case{"temperature 2, top_p 0.9", 2, 0.9f, 0}, Case{"temperature 0.7, top_k 50", 0.7f, 1, 50}}) {
    engine::SamplingParams params;
    params.temperature = c.temperature;
    params.top_p = c.top_p;
    params.top_k = c.top_k;
    std::vector<engine::Sampler> samplers;
    for (int i = 0; i < rows; ++i)
      samplers.emplace_back(params, std::vector<int32_t>(), i, std::span<const int32_t>(), std::span<const int32_t>(),
                            1, int64_t{1} << 40);
    std::vector<double> one, all;
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
      std::vector<std::vector<float>> now = logits;
      auto start = Clock::now();
      samplers[0].Sample(now[0]);
      one.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
      now = logits;
      start = Clock::now();
      pool.ParallelFor(rows,
                       [&](int64_t i, int) { samplers[static_cast<size_t>(i)].Sample(now[static_cast<size_t>(i)]); });
      all.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
    }
    fmt::print("{:<28} one row {:7.3f} ms, {} rows over {} threads {:8.3f} ms\n", c.name, Median(one), rows, threads,
               Median(all));
  }
  return 0;
}

}  // namespace
}  // namespace spl

int main(int argc, char** argv) { return spl::Main(argc, argv); }
