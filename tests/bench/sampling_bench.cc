// Time of choosing a token from rows of logits, on the host or, with --backend cuda, on a GPU, where the time is that
// of the whole operation: what is sent, the kernel, and what comes back.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <random>
#include <vector>

#include "kernels/backend/backend.h"
#include "kernels/backend/cuda/cuda_plugin.h"
#include "kernels/sampling/philox.h"
#include "tests/bench/median.h"

namespace spl {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  int64_t vocab = 128'256;
  std::vector<int> rows = {1, 8, 32, 128};
  int threads = 1, repeats = 41, per_repeat = 20;
  double spread = 3;
  std::string backend = "cpu";
};

struct Case {
  const char* name;
  kernels::SampleRow row;
};

std::vector<Case> Cases(std::span<const kernels::TokenEdit> edits) {
  return {{"greedy", {}},
          {"temperature 0.7", {.temperature = 0.7f}},
          {"temperature 0.7, top_p 0.9", {.temperature = 0.7f, .top_p = 0.9f}},
          {"temperature 2, top_p 0.9", {.temperature = 2, .top_p = 0.9f}},
          {"temperature 0.7, top_k 50", {.temperature = 0.7f, .top_k = 50}},
          {"temperature 0.7, top_k 50, top_p 0.9", {.temperature = 0.7f, .top_k = 50, .top_p = 0.9f}},
          {"temperature 0.7, min_p 0.05", {.temperature = 0.7f, .min_p = 0.05f}},
          {"temperature 0.7, penalties",
           {.temperature = 0.7f,
            .repetition_penalty = 1.1f,
            .presence_penalty = 0.5f,
            .frequency_penalty = 0.5f,
            .edits = edits}},
          {"greedy, logprobs 5", {.num_top = 5}},
          {"temperature 0.7, logprobs 20", {.temperature = 0.7f, .num_top = 20}}};
}

// Memory of the backend with the contents of `from`.
template <typename T>
std::unique_ptr<kernels::Buffer> Upload(const kernels::Backend& backend, const std::vector<T>& from) {
  auto buffer = backend.Allocate(from.size() * sizeof(T)).value();
  if (!backend.Copy(kernels::CopyKind::kUpload, buffer->data(), from.data(), from.size() * sizeof(T)).ok())
    std::abort();
  return buffer;
}

// Microseconds of one call of `operation`, results read back. Several calls on different rows one after the other keep
// the logits out of a device's cache.
template <typename Operation>
double Time(const Options& options, const Operation& operation) {
  std::vector<double> each;
  for (int repeat = 0; repeat < options.repeats; ++repeat) {
    const auto start = Clock::now();
    for (int n = 0; n < options.per_repeat; ++n) operation(n);
    each.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count() / options.per_repeat);
  }
  return Median(each);
}

void RunBatch(const Options& options, const kernels::Backend& backend, kernels::Session& session, int num_rows) {
  constexpr int kCopies = 2;  // of the batch's logits, read in turn
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, static_cast<float>(options.spread));
  std::vector<float> logits(static_cast<size_t>(kCopies * num_rows * options.vocab));
  for (float& x : logits) x = normal(random);
  const auto memory = Upload(backend, logits);
  const size_t rows = static_cast<size_t>(num_rows);
  const auto out = backend.Allocate(rows * (sizeof(kernels::SampledRow) + 20 * sizeof(kernels::TopToken))).value();
  const auto* const from = static_cast<const float*>(memory->data());
  const auto copy = [&](int n) { return from + n % kCopies * num_rows * options.vocab; };
  const auto check = [](const absl::Status& status) {
    if (!status.ok()) fmt::print("{}\n", std::string(status.message())), std::abort();
  };
  const double argmax = Time(options, [&](int n) {
    check(backend.Argmax(
        session.context(),
        {.logits = copy(n), .out = static_cast<int32_t*>(out->data()), .num_rows = num_rows, .width = options.vocab}));
    check(session.ReadBack(out->data(), rows * sizeof(int32_t)).status());
  });
  fmt::print("{:4} rows: {:<38} {:9.1f} us\n", num_rows, "argmax", argmax);
  std::vector<kernels::TokenEdit> edits;
  for (int32_t token = 0; token < std::min<int64_t>(options.vocab, 500 * 64); token += 64)
    edits.push_back({.token = token, .count = 1 + token % 3});
  for (const Case& c : Cases(edits)) {
    std::vector<kernels::SampleRow> all(rows, c.row);
    const auto stride = std::max(c.row.num_top, 0);
    uint64_t version = 0;
    const double us = Time(options, [&](int n) {
      ++version;
      for (size_t i = 0; i < rows; ++i) {
        all[i].logits_row = static_cast<int32_t>(i);
        all[i].random = kernels::SamplingRandom(i, 0, version);
        all[i].edits_id = i + 1;
        all[i].edits_version = version;
      }
      auto* const sampled = static_cast<kernels::SampledRow*>(out->data());
      check(backend.SampleTokens(session.context(), {.logits = copy(n),
                                                     .num_logit_rows = num_rows,
                                                     .width = options.vocab,
                                                     .rows = all,
                                                     .out = sampled,
                                                     .top = reinterpret_cast<kernels::TopToken*>(sampled + rows),
                                                     .top_stride = stride}));
      check(session
                .ReadBack(out->data(), rows * (sizeof(kernels::SampledRow) +
                                               static_cast<size_t>(stride) * sizeof(kernels::TopToken)))
                .status());
    });
    fmt::print("{:4} rows: {:<38} {:9.1f} us  {:+9.1f}\n", num_rows, c.name, us, us - argmax);
  }
}

int Main(int argc, char** argv) {
  CLI::App app("Microseconds of choosing tokens, beside those of an argmax.");
  Options options;
  app.add_option("--vocab", options.vocab, "logits of a row")->check(CLI::Range(1, 1 << 20));
  app.add_option("--rows", options.rows, "of a batch");
  app.add_option("--threads", options.threads, "that share the rows")->check(CLI::Range(1, 1024));
  app.add_option("--spread", options.spread, "standard deviation of the logits");
  app.add_option("--backend", options.backend, "cpu or cuda")->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--repeats", options.repeats, "of which the median is taken")->check(CLI::Range(1, 1000));
  CLI11_PARSE(app, argc, argv);
  std::unique_ptr<kernels::Backend> backend = kernels::MakeCpuBackend();
  if (options.backend == "cuda") {
    auto cuda = kernels::MakeCudaBackend();
    if (!cuda.ok()) return fmt::print("{}\n", std::string(cuda.status().message())), 1;
    backend = *std::move(cuda);
  } else {
    options.per_repeat = 2;
  }
  const auto session = backend
                           ->NewSession({.num_threads = options.threads,
                                         .max_rows = 128,
                                         .max_sequences = 128,
                                         .num_layers = 1,
                                         .num_kv_heads = 1})
                           .value();
  fmt::print("{}\n", backend->description());
  for (const int rows : options.rows) RunBatch(options, *backend, *session, rows);
  return 0;
}

}  // namespace
}  // namespace spl

int main(int argc, char** argv) { return spl::Main(argc, argv); }
