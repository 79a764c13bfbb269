// attention_cuda_bench [all|prefill|decode|fp8|heads|read [part of a case name]]
//
// Times the CUDA attention launchers on one device: median of event-timed launches with the L2 cache flushed before
// each, random data, pages shuffled. Prints one line per case; tests/bench/peers/sdpa_peers.py times the same shapes,
// and head_class_peers.py those of `heads`: half of the heads local, against all of them global.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels/attention/attention_cuda.h"
#include "kernels/cuda/cuda_bench_util.h"

namespace spl::kernels::cuda {
namespace {

std::string filter;  // part of case names

struct Case {
  int qo_heads = 32, kv_heads = 8, head_dim = 128, batch = 1;
  int32_t kv_len = 0, rows = 0;  // rows: the last ones; 0 is decode
  bool shuffled = true;          // physical pages
  int band_heads = 0;            // KV heads with window 256 and 64 sinks
  bool sparse = false;           // rows at random positions, the last one at the end
  bool codes = false;            // pages of e4m3
};

HeadRules Rules(const Case& c) {
  HeadRules r;
  for (int h = c.kv_heads - c.band_heads; h < c.kv_heads; ++h) r.head[h] = {VisibilityRule::kBand, 64, 256};
  return r;
}

// Positions of the rows of one sequence, ascending.
std::vector<int32_t> Positions(const Case& c) {
  std::vector<int32_t> positions(c.rows);
  if (!c.sparse) {
    std::iota(positions.begin(), positions.end(), c.kv_len - c.rows);
    return positions;
  }
  std::vector<int32_t> all(c.kv_len - 1);
  std::iota(all.begin(), all.end(), 0);
  std::shuffle(all.begin(), all.end(), std::mt19937(7));
  std::copy_n(all.begin(), c.rows - 1, positions.begin());
  positions.back() = c.kv_len - 1;
  std::sort(positions.begin(), positions.end());
  return positions;
}

// Everything a launch needs, allocated once per case and freed with the process's allocations of that case.
class Setup {
 public:
  explicit Setup(const Case& c) {
    const int pages = (c.kv_len + kPageTokens - 1) / kPageTokens;
    const int num_pages = pages * c.kv_heads * c.batch;
    std::vector<int32_t> tables(num_pages);
    std::iota(tables.begin(), tables.end(), 0);
    if (c.shuffled) std::shuffle(tables.begin(), tables.end(), std::mt19937(1));
    std::vector<int64_t> offsets(c.batch);
    for (int i = 0; i < c.batch; ++i) offsets[i] = int64_t{i} * pages * c.kv_heads;
    batch.page_tables = Keep(Upload(tables));
    batch.table_offset = Keep(Upload(offsets));
    batch.head_stride = pages;
    batch.kv_len = Keep(Upload(std::vector<int32_t>(c.batch, c.kv_len)));
    const DType pages_type = c.codes ? DType::kE4M3 : DType::kBF16;
    const auto bytes_of_pool = static_cast<int64_t>(KvPageBytes(pages_type, c.head_dim)) * num_pages;
    auto* pool = Keep(Alloc<std::byte>(bytes_of_pool));
    if (c.codes) {
      constexpr int kCode = 0x71;  // also a scale, of 2^-14
      CHECK_CUDA(cudaMemset(pool, kCode, bytes_of_pool));
    } else {
      FillNormal<<<2048, 256>>>(reinterpret_cast<__nv_bfloat16*>(pool), bytes_of_pool / 2, 1);
    }
    batch.pool = {pool, pages_type, c.head_dim, num_pages};
    batch.num_sequences = c.batch;
    const int rows = std::max(c.rows, 1) * c.batch;
    q_stride = int64_t{c.qo_heads + 2 * c.kv_heads} * c.head_dim;
    q = Keep(Alloc<__nv_bfloat16>(rows * q_stride));
    FillNormal<<<2048, 256>>>(q, rows * q_stride, 2);
    out = Keep(Alloc<__nv_bfloat16>(int64_t{rows} * c.qo_heads * c.head_dim));
    heads = {c.qo_heads, c.kv_heads, c.head_dim, 1.0f / std::sqrt(static_cast<float>(c.head_dim))};
    std::vector<int32_t> row_begins(c.batch + 1), position;
    for (int i = 0; i < c.batch; ++i) {
      row_begins[i + 1] = row_begins[i] + c.rows;
      for (const int32_t p : Positions(c)) position.push_back(p);
    }
    row_begin = Keep(Upload(row_begins));
    positions = Keep(Upload(position));
    const size_t bytes =
        std::max(PrefillWorkspaceBytes(), DecodeWorkspaceBytes(heads, c.batch, c.kv_len, 0, pages_type));
    workspace = Keep(Alloc<std::byte>(bytes));
    CHECK_CUDA(cudaMemset(workspace, 0, bytes));
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  ~Setup() {
    for (void* p : kept_) cudaFree(p);
  }
  AttentionHeads heads;
  PagedBatch batch;
  int32_t *row_begin, *positions;
  __nv_bfloat16 *q, *out;
  int64_t q_stride;
  std::byte* workspace;

 private:
  template <typename T>
  T* Keep(T* p) {
    kept_.push_back(p);
    return p;
  }
  std::vector<void*> kept_;
};

// Lets the device cool down: a case runs at its own clock then, and not at the one that the case before it left.
void Rest() {
  CHECK_CUDA(cudaDeviceSynchronize());
  std::this_thread::sleep_for(std::chrono::milliseconds(150));
}

void Prefill(const char* name, const Case& c, Variant variant, const char* variant_name, int reps) {
  if (std::strstr(name, filter.c_str()) == nullptr) return;
  Setup s(c);
  PrefillArgs a{s.heads,      Rules(c), s.batch,    s.row_begin, s.positions, c.rows * c.batch, c.kv_len,
                DType::kBF16, s.q,      s.q_stride, s.out,       nullptr,     s.workspace};
  a.early = true;
  Rest();
  const double ms = MedianMs(reps, [&] { CHECK_CUDA(PrefillAttention(a, nullptr, variant)); });
  double pairs = 0;  // (row, key)
  for (const int32_t p : Positions(c)) {
    pairs += (p + 1.0) * (c.kv_heads - c.band_heads) + static_cast<double>(std::min(p + 1, 320)) * c.band_heads;
  }
  const double flops = 4.0 * c.head_dim * pairs * (c.qo_heads / c.kv_heads) * c.batch;
  Rest();
  const double warm_ms = MeanOfRowMs(reps, [&] { CHECK_CUDA(PrefillAttention(a, nullptr, variant)); });
  std::printf("%-34s %-8s %9.4f ms  %6.1f TF/s; one behind the other %9.4f ms  %6.1f TF/s\n", name, variant_name, ms,
              flops / ms * 1e-9, warm_ms, flops / warm_ms * 1e-9);
  std::fflush(stdout);
}

void Decode(const char* name, const Case& c, int reps, int32_t bucket = 0) {
  if (std::strstr(name, filter.c_str()) == nullptr) return;
  Setup s(c);
  DecodeArgs a{s.heads, Rules(c), s.batch,    std::max(bucket, c.kv_len), DType::kBF16, s.q, s.q_stride,
               s.out,   nullptr,  s.workspace};
  const double ms = MedianMs(reps, [&] { CHECK_CUDA(DecodeAttention(a, nullptr)); });
  const double tokens =
      static_cast<double>(c.kv_len) * (c.kv_heads - c.band_heads) + std::min<double>(c.kv_len, 320) * c.band_heads;
  const double bytes = c.codes ? 2.0 * (c.head_dim + 1) : 4.0 * c.head_dim;  // of a token
  std::printf("%-34s %-8s %9.2f us  %6.2f TB/s\n", name, c.codes ? "mma fp8" : "mma", ms * 1e3,
              bytes * tokens * c.batch / ms * 1e-9);
  std::fflush(stdout);
}

constexpr int32_t kWindow = 256, kSinks = 64;  // local heads

// 1 / the share of dense work that is left with half of the heads local.
double IdealFactor(int32_t kv_len) { return 1 / (0.5 + 0.5 * (kWindow + kSinks) / kv_len); }

void HeadClassPrefill(int32_t kv_len) {
  double ms[2];
  for (const int local : {0, 1}) {
    const Case c{.kv_len = kv_len, .rows = kv_len, .band_heads = 4 * local};
    Setup s(c);
    PrefillArgs a{s.heads,      Rules(c), s.batch,    s.row_begin, s.positions, c.rows,     c.kv_len,
                  DType::kBF16, s.q,      s.q_stride, s.out,       nullptr,     s.workspace};
    ms[local] = MedianMs(10, [&] { CHECK_CUDA(PrefillAttention(a, nullptr)); });
  }
  // A window has a larger share of the causal pairs than of all pairs.
  const double n = kv_len, seen = kWindow + kSinks, kept = (seen * n - seen * seen / 2) / (n * n / 2);
  const double ideal = 1 / (0.5 + 0.5 * kept);
  std::printf("heads prefill %3dK  dense %9.4f ms, half local %9.4f ms: %.2fx of at most %.2fx, %.1f %%\n",
              kv_len >> 10, ms[0], ms[1], ms[0] / ms[1], ideal, 100 * ms[0] / ms[1] / ideal);
  std::fflush(stdout);
}

// SegPaged: the pages that local heads do not see are not resident. Visibility is part of the launch (`rules`, as for a
// batch of equal plans) or read on the device (`plans`, as for a mixed one).
void HeadClassDecode(int batch, int32_t kv_len) {
  const Case dense{.batch = batch, .kv_len = kv_len}, local{.batch = batch, .kv_len = kv_len, .band_heads = 4};
  double ms[3];
  for (const int which : {0, 1, 2}) {
    const Case& c = which == 0 ? dense : local;
    Setup s(c);
    DecodeArgs a{s.heads, Rules(c), s.batch, kv_len, DType::kBF16, s.q, s.q_stride, s.out, nullptr, s.workspace};
    std::vector<void*> owned;
    if (which > 0) {
      const int pages = (kv_len + kPageTokens - 1) / kPageTokens;
      std::vector<int32_t> table(int64_t{pages} * c.kv_heads * batch);
      CHECK_CUDA(cudaMemcpy(table.data(), s.batch.page_tables, table.size() * sizeof(int32_t), cudaMemcpyDeviceToHost));
      for (size_t i = 0; i < table.size(); ++i) {
        const int head = static_cast<int>(i / pages) % c.kv_heads, begin = static_cast<int>(i % pages) * kPageTokens;
        if (head >= c.kv_heads - c.band_heads && begin >= kSinks && begin + kPageTokens <= kv_len - kWindow) {
          table[i] = kNoPage;
        }
      }
      a.batch.page_tables = Upload(table);
      owned.push_back(const_cast<int32_t*>(a.batch.page_tables));
    }
    if (which == 2) {
      std::vector<Band> plans(static_cast<size_t>(batch) * c.kv_heads, Band{0, kFullWindow});
      std::vector<int64_t> offsets(batch);
      for (int b = 0; b < batch; ++b) {
        offsets[b] = int64_t{b} * c.kv_heads;
        for (int h = c.kv_heads - c.band_heads; h < c.kv_heads; ++h) plans[offsets[b] + h] = {kSinks, kWindow};
      }
      a.rules = {};
      a.plans = Upload(plans);
      a.plan_offset = Upload(offsets);
      owned.push_back(const_cast<Band*>(a.plans));
      owned.push_back(const_cast<int64_t*>(a.plan_offset));
    }
    ms[which] = MedianMs(50, [&] { CHECK_CUDA(DecodeAttention(a, nullptr)); });
    for (void* p : owned) CHECK_CUDA(cudaFree(p));
  }
  const double ideal = IdealFactor(kv_len);
  std::printf(
      "heads decode B%-2d %2dK  dense %7.2f us (%.2f TB/s), half local %7.2f us: %.2fx of at most %.2fx, %.1f %%; "
      "plans on the device %7.2f us: %.2fx, %.1f %%\n",
      batch, kv_len >> 10, ms[0] * 1e3, 4.0 * 128 * kv_len * 8 * batch / ms[0] * 1e-9, ms[1] * 1e3, ms[0] / ms[1],
      ideal, 100 * ms[0] / ms[1] / ideal, ms[2] * 1e3, ms[0] / ms[2], 100 * ms[0] / ms[2] / ideal);
  std::fflush(stdout);
}

int Main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "all";
  if (argc > 2) filter = argv[2];
  AllocateFlushBuffer();
  const bool all = what == "all";
  if (all || what == "prefill") {
    const auto sm90 = [](const char* n, const Case& c, int reps) { Prefill(n, c, Variant::kSm90, "sm90", reps); };
    sm90("prefill causal 2K", {.kv_len = 2048, .rows = 2048}, 50);
    sm90("prefill causal 4K", {.kv_len = 4096, .rows = 4096}, 30);
    sm90("prefill causal 8K", {.kv_len = 8192, .rows = 8192}, 30);
    sm90("prefill causal 16K", {.kv_len = 16384, .rows = 16384}, 15);
    sm90("prefill causal 32K", {.kv_len = 32768, .rows = 32768}, 12);
    sm90("prefill 32K half BAND 256+64", {.kv_len = 32768, .rows = 32768, .band_heads = 4}, 12);
    sm90("prefill 32K all BAND 256+64", {.kv_len = 32768, .rows = 32768, .band_heads = 8}, 12);
    sm90("prefill last 2048 rows of 32K", {.kv_len = 32768, .rows = 2048}, 20);
    sm90("prefill last 512 rows of 32K", {.kv_len = 32768, .rows = 512}, 20);
    sm90("prefill last 512 rows of 8K", {.kv_len = 8192, .rows = 512}, 30);
    sm90("prefill last 512 rows of 2K", {.kv_len = 2048, .rows = 512}, 50);
    sm90("prefill last 512 rows of 1K", {.kv_len = 1024, .rows = 512}, 50);
    sm90("prefill causal 512", {.kv_len = 512, .rows = 512}, 50);
    sm90("prefill last 2048 rows of 8K", {.kv_len = 8192, .rows = 2048}, 30);
    sm90("prefill causal 16 x 128", {.batch = 16, .kv_len = 128, .rows = 128}, 50);
    sm90("prefill causal 8 x 227", {.batch = 8, .kv_len = 227, .rows = 227}, 50);
    // Recovery: the rows of 32K that are computed again.
    sm90("prefill 3277 random rows of 32K", {.kv_len = 32768, .rows = 3277, .sparse = true}, 20);
    sm90("prefill 1024 random rows of 32K", {.kv_len = 32768, .rows = 1024, .sparse = true}, 20);
    sm90("prefill 3277 random rows of 8K", {.kv_len = 8192, .rows = 3277, .sparse = true}, 20);
    sm90("prefill last 3277 rows of 32K", {.kv_len = 32768, .rows = 3277}, 20);
    sm90("prefill causal 8 x 2K", {.batch = 8, .kv_len = 2048, .rows = 2048}, 30);
    sm90("prefill causal 8K D64", {.head_dim = 64, .kv_len = 8192, .rows = 8192}, 20);
    Prefill("prefill causal 8K", {.kv_len = 8192, .rows = 8192}, Variant::kMma, "mma", 10);
    Prefill("prefill causal 2K", {.kv_len = 2048, .rows = 2048}, Variant::kMma, "mma", 20);
  }
  if (all || what == "read" || (what == "decode" && filter.empty())) {
    for (const int64_t bytes : {int64_t{4} << 30, int64_t{256} << 20}) {
      const double rate = ReadRate(bytes);
      std::printf("read %-29s %-8s %9.2f us  %6.2f TB/s\n", bytes >> 30 > 0 ? "4 GiB" : "256 MiB", "",
                  static_cast<double>(bytes) / rate * 1e6, rate * 1e-12);
    }
  }
  if (all || what == "heads") {
    for (const int32_t kv_len : {8192, 32768}) HeadClassPrefill(kv_len);
    for (const int batch : {8, 32}) {
      for (const int32_t kv_len : {8192, 32768}) HeadClassDecode(batch, kv_len);
    }
  }
  if (all || what == "fp8") {
    for (const auto& [batch, kv_len] : {std::pair{1, 2048},
                                        {1, 8192},
                                        {1, 32768},
                                        {1, 131072},
                                        {8, 8192},
                                        {8, 32768},
                                        {32, 2048},
                                        {32, 8192},
                                        {32, 32768}}) {
      const std::string name = "fp8 decode B" + std::to_string(batch) + " " + std::to_string(kv_len >> 10) + "K";
      for (const bool codes : {false, true})
        Decode(name.c_str(), {.batch = batch, .kv_len = kv_len, .codes = codes}, 50);
    }
    for (const bool codes : {false, true})
      Decode("fp8 decode B32 32K D64", {.head_dim = 64, .batch = 32, .kv_len = 32768, .codes = codes}, 20);
  }
  if (all || what == "decode") {
    Decode("decode B1 2K", {.kv_len = 2048}, 100);
    Decode("decode B1 8K", {.kv_len = 8192}, 100);
    Decode("decode B1 8K, bucket 32K", {.kv_len = 8192}, 100, 32768);
    Decode("decode B1 32K", {.kv_len = 32768}, 100);
    Decode("decode B1 128K", {.kv_len = 131072}, 50);
    Decode("decode B8 8K", {.batch = 8, .kv_len = 8192}, 50);
    Decode("decode B8 32K", {.batch = 8, .kv_len = 32768}, 50);
    Decode("decode B32 8K", {.batch = 32, .kv_len = 8192}, 50);
    Decode("decode B32 32K", {.batch = 32, .kv_len = 32768}, 20);
    Decode("decode B32 32K, pages in order", {.batch = 32, .kv_len = 32768, .shuffled = false}, 20);
    Decode("decode B1 16K", {.kv_len = 16384}, 100);
    Decode("decode B32 32K Hq64", {.qo_heads = 64, .batch = 32, .kv_len = 32768}, 20);
    Decode("decode B8 32K Hq128 (G16)", {.qo_heads = 128, .batch = 8, .kv_len = 32768}, 20);
    Decode("decode B8 32K half BAND 256+64", {.batch = 8, .kv_len = 32768, .band_heads = 4}, 50);
    Decode("decode B32 32K half BAND 256+64", {.batch = 32, .kv_len = 32768, .band_heads = 4}, 50);
    Decode("decode B32 2K D64", {.head_dim = 64, .batch = 32, .kv_len = 2048}, 50);
    Decode("decode B32 32K D64", {.head_dim = 64, .batch = 32, .kv_len = 32768}, 20);
  }
  return 0;
}

}  // namespace
}  // namespace spl::kernels::cuda

int main(int argc, char** argv) { return spl::kernels::cuda::Main(argc, argv); }
