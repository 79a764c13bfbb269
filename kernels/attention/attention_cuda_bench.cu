// attention_cuda_bench [all|prefill|decode [part of a case name]]
//
// Times the CUDA attention launchers on one device: median of event-timed launches with the L2 cache flushed before
// each, random data, pages shuffled. Prints one line per case; tests/bench/peers/sdpa_peers.py times the same shapes.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/attention/attention_cuda.h"

namespace spl::kernels::cuda {
namespace {

#define CHECK_CUDA(expr)                                                                                    \
  do {                                                                                                      \
    const cudaError_t check_cuda_e = (expr);                                                                \
    if (check_cuda_e != cudaSuccess) {                                                                      \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #expr, cudaGetErrorString(check_cuda_e)); \
      std::exit(1);                                                                                         \
    }                                                                                                       \
  } while (false)

__global__ void FillNormal(__nv_bfloat16* p, int64_t n, uint32_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x) {
    uint64_t x = (i + 1) * 0x9e3779b97f4a7c15ull + seed;
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93ull;
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93ull;
    x ^= x >> 32;
    const float u = ((x & 0xffffff) + 1) * (1.0f / 16777217), v = (x >> 40) * (1.0f / 16777216);
    p[i] = __float2bfloat16(sqrtf(-2 * logf(u)) * cospif(2 * v));
  }
}

__global__ void ReadAll(const uint4* p, int64_t n, uint32_t* sink) {
  uint32_t x = 0;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  for (; i + 7 * step < n; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = p[i + k * step];
#pragma unroll
    for (int k = 0; k < 8; ++k) x ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  if (x == 0x12345678) *sink = x;
}

template <typename T>
T* Alloc(size_t n) {
  void* p = nullptr;
  CHECK_CUDA(cudaMalloc(&p, std::max<size_t>(n, 1) * sizeof(T)));
  return static_cast<T*>(p);
}
template <typename T>
T* Upload(const std::vector<T>& v) {
  T* p = Alloc<T>(v.size());
  CHECK_CUDA(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
  return p;
}

// Read, not written, between launches: lines left dirty would be written back at the next launch's expense.
constexpr size_t kFlushBytes = 256 << 20;
uint4* flush_buffer = nullptr;
uint32_t* sink = nullptr;
std::string filter;  // of case names

template <typename F>
double MedianMs(int reps, F launch) {
  for (int i = 0; i < 3; ++i) launch();
  std::vector<cudaEvent_t> events(2 * reps);
  for (cudaEvent_t& e : events) CHECK_CUDA(cudaEventCreate(&e));
  for (int i = 0; i < reps; ++i) {
    ReadAll<<<528, 256>>>(flush_buffer, kFlushBytes / 16, sink);
    CHECK_CUDA(cudaEventRecord(events[2 * i]));
    launch();
    CHECK_CUDA(cudaEventRecord(events[2 * i + 1]));
  }
  CHECK_CUDA(cudaDeviceSynchronize());
  std::vector<float> ms(reps);
  for (int i = 0; i < reps; ++i) CHECK_CUDA(cudaEventElapsedTime(&ms[i], events[2 * i], events[2 * i + 1]));
  for (cudaEvent_t& e : events) cudaEventDestroy(e);
  std::nth_element(ms.begin(), ms.begin() + reps / 2, ms.end());
  return ms[reps / 2];
}

struct Case {
  int qo_heads = 32, kv_heads = 8, head_dim = 128, batch = 1;
  int32_t kv_len = 0, rows = 0;  // rows: the last ones; 0 is decode
  bool shuffled = true;          // physical pages
  int band_heads = 0;            // of the KV heads; window 256, 64 sinks
};

HeadRules Rules(const Case& c) {
  HeadRules r;
  for (int h = c.kv_heads - c.band_heads; h < c.kv_heads; ++h) r.head[h] = {VisibilityRule::kBand, 64, 256};
  return r;
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
    const int64_t elements = int64_t{num_pages} * 2 * kPageTokens * c.head_dim;
    auto* pool = Keep(Alloc<__nv_bfloat16>(elements));
    FillNormal<<<2048, 256>>>(pool, elements, 1);
    batch.pool = {reinterpret_cast<std::byte*>(pool), DType::kBF16, c.head_dim, num_pages};
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
      for (int r = 0; r < c.rows; ++r) position.push_back(c.kv_len - c.rows + r);
    }
    row_begin = Keep(Upload(row_begins));
    positions = Keep(Upload(position));
    const size_t bytes = std::max(PrefillWorkspaceBytes(), DecodeWorkspaceBytes(heads, c.batch, c.kv_len));
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

void Prefill(const char* name, const Case& c, Variant variant, const char* variant_name, int reps) {
  if (std::strstr(name, filter.c_str()) == nullptr) return;
  Setup s(c);
  PrefillArgs a{s.heads,      Rules(c), s.batch,    s.row_begin, s.positions, c.rows * c.batch, c.kv_len,
                DType::kBF16, s.q,      s.q_stride, s.out,       nullptr,     s.workspace};
  const double ms = MedianMs(reps, [&] { CHECK_CUDA(PrefillAttention(a, nullptr, variant)); });
  double pairs = 0;  // (row, key)
  for (int64_t p = c.kv_len - c.rows; p < c.kv_len; ++p) {
    pairs += static_cast<double>(p + 1) * (c.kv_heads - c.band_heads) +
             static_cast<double>(std::min<int64_t>(p + 1, 320)) * c.band_heads;
  }
  const double flops = 4.0 * c.head_dim * pairs * (c.qo_heads / c.kv_heads) * c.batch;
  std::printf("%-34s %-8s %9.4f ms  %6.1f TF/s\n", name, variant_name, ms, flops / ms * 1e-9);
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
  std::printf("%-34s %-8s %9.2f us  %6.2f TB/s\n", name, "mma", ms * 1e3,
              4.0 * c.head_dim * tokens * c.batch / ms * 1e-9);
  std::fflush(stdout);
}

int Main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "all";
  if (argc > 2) filter = argv[2];
  flush_buffer = Alloc<uint4>(kFlushBytes / 16);
  CHECK_CUDA(cudaMemset(flush_buffer, 1, kFlushBytes));
  sink = Alloc<uint32_t>(1);
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
    sm90("prefill causal 8 x 2K", {.batch = 8, .kv_len = 2048, .rows = 2048}, 30);
    sm90("prefill causal 8K D64", {.head_dim = 64, .kv_len = 8192, .rows = 8192}, 20);
    Prefill("prefill causal 8K", {.kv_len = 8192, .rows = 8192}, Variant::kMma, "mma", 10);
    Prefill("prefill causal 2K", {.kv_len = 2048, .rows = 2048}, Variant::kMma, "mma", 20);
  }
  if (all || what == "decode") {
    if (filter.empty()) {
      const int64_t n = int64_t{4} << 30;
      auto* p = Alloc<uint4>(n / 16);
      FillNormal<<<2048, 256>>>(reinterpret_cast<__nv_bfloat16*>(p), n / 2, 3);
      double best = 1e9;
      for (const int blocks : {132 * 4, 132 * 8, 132 * 16}) {
        best = std::min(best, MedianMs(10, [&] { ReadAll<<<blocks, 256>>>(p, n / 16, sink); }));
      }
      std::printf("%-34s %-8s %9.2f us  %6.2f TB/s\n", "read 4 GiB", "", best * 1e3, n / best * 1e-9);
      cudaFree(p);
    }
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
