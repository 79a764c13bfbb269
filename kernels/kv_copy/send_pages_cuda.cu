#include <algorithm>

#include "kernels/kv_copy/crc32c.h"
#include "kernels/kv_copy/send_pages_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kUnroll = 8;  // loads of a thread under way
// On one device: as fast as its memory allows, because what runs beside them waits for the whole of its SMs, so that
// each microsecond counts once. To another device: a block sends 14 GB/s, and these are as fast as NVLink's 450.
constexpr int64_t kBlocksWithin = 264;
constexpr int64_t kBlocksAcross = 32;

__device__ __forceinline__ uint64_t Now() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// The products of a polynomial (crc32c.h) and each value of each five bits of another: [i][v] is by * (v << 5 i).
struct Products {
  uint32_t of[7][32];
};
constexpr Products ProductsOf(uint32_t by) {
  Products products{};
  for (int i = 0; i < 7; ++i) {
    for (uint32_t value = 0; value < 32; ++value) products.of[i][value] = Crc32cMultiply(by, value << (5 * i));
  }
  return products;
}
struct Powers {
  uint32_t over_later_lanes[32];
};
constexpr Powers MakePowers() {
  Powers powers{};
  for (size_t lane = 0; lane < 32; ++lane) powers.over_later_lanes[lane] = Crc32cShift(sizeof(uint4) * (31 - lane));
  return powers;
}

constexpr size_t kRowBytes = 32 * sizeof(uint4);  // that a warp reads at once
__device__ const Products kOverARow = ProductsOf(Crc32cShift(kRowBytes));
__device__ const Products kOverAWord = ProductsOf(Crc32cShift(sizeof(uint32_t)));
__device__ const Powers kPowers = MakePowers();

// Multiplies by a constant. The product is linear in the bits of the other factor, five of which choose one of 32
// entries; the lanes of a warp keep an entry each, and a shuffle looks it up: no shared memory, and no bank conflicts.
class WarpMultiplier {
 public:
  __device__ __forceinline__ explicit WarpMultiplier(const Products& products) {
#pragma unroll
    for (int i = 0; i < 7; ++i) entries_[i] = products.of[i][threadIdx.x % 32];
  }
  // All lanes take part.
  __device__ __forceinline__ uint32_t operator()(uint32_t x) const {
    uint32_t product = 0;
#pragma unroll
    for (int i = 0; i < 7; ++i) product ^= __shfl_sync(0xffffffffu, entries_[i], static_cast<int>(x >> (5 * i)));
    return product;
  }

 private:
  uint32_t entries_[7];
};

struct SendParams {
  const PageSend* pages;
  int64_t count;
  int units;  // of 16 bytes, in a page
  uint32_t* crcs;
  uint32_t* late;
  uint64_t deadline;
  uint32_t initial;  // what the CRC's initial value adds to that of a page
};

// One warp for a page. A lane has the words of its column of rows of 512 bytes, and four sums of them, one for each
// word of 16 bytes: sum = sum * x^(8 * 512) + word. The first row may begin before the page, where zeros are thought
// of: leading zeros do not change a CRC.
__global__ void __launch_bounds__(kThreads) SendPagesKernel(SendParams p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const WarpMultiplier over_a_row(kOverARow), over_a_word(kOverAWord);
  const uint32_t over_later_lanes = kPowers.over_later_lanes[lane];
  const int rows = (p.units + 31) / 32, before = 32 * rows - p.units;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  int64_t i = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  PageSend next = i < p.count ? p.pages[i] : PageSend{};  // read ahead: the list may be in host memory
  for (; i < p.count; i += step) {
    const PageSend page = next;
    if (i + step < p.count) next = p.pages[i + step];
    if (__shfl_sync(0xffffffffu, static_cast<int>(Now() >= p.deadline), 0) != 0) {
      if (lane == 0) *p.late = 1;
      continue;
    }
    const uint4* const from = static_cast<const uint4*>(page.from) - before + lane;
    uint4* const to = static_cast<uint4*>(page.to) - before + lane;
    uint32_t sums[4] = {};
    for (int row = 0; row < rows; row += kUnroll) {
      uint4 held[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int unit = 32 * (row + u) + lane;
        held[u] = make_uint4(0, 0, 0, 0);
        if (row + u < rows && unit >= before) held[u] = __ldcs(from + 32 * (row + u));
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int unit = 32 * (row + u) + lane;
        if (row + u < rows && unit >= before) __stcs(to + 32 * (row + u), held[u]);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (row + u >= rows) break;
        sums[0] = over_a_row(sums[0]) ^ held[u].x;
        sums[1] = over_a_row(sums[1]) ^ held[u].y;
        sums[2] = over_a_row(sums[2]) ^ held[u].z;
        sums[3] = over_a_row(sums[3]) ^ held[u].w;
      }
    }
    uint32_t crc = 0;
#pragma unroll
    for (int word = 0; word < 4; ++word) crc = over_a_word(crc ^ sums[word]);
    crc = __reduce_xor_sync(0xffffffffu, Crc32cMultiply(over_later_lanes, crc));
    if (lane == 0) p.crcs[i] = ~(crc ^ p.initial);
  }
}

__global__ void ReadClockKernel(uint64_t* now) { *now = Now(); }

}  // namespace

cudaError_t SendPages(const PageSend* pages, int64_t count, size_t page_bytes, bool within_device, uint32_t* crcs,
                      uint32_t* late, uint64_t deadline, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  if (page_bytes % sizeof(uint4) != 0) return cudaErrorNotSupported;
  const int64_t blocks = std::min((count + kWarps - 1) / kWarps, within_device ? kBlocksWithin : kBlocksAcross);
  SendPagesKernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      {.pages = pages,
       .count = count,
       .units = static_cast<int>(page_bytes / sizeof(uint4)),
       .crcs = crcs,
       .late = late,
       .deadline = deadline,
       .initial = Crc32cMultiply(Crc32cShift(page_bytes), 0xffffffffu)});
  return cudaGetLastError();
}

cudaError_t ReadClock(uint64_t* now, cudaStream_t stream) {
  ReadClockKernel<<<1, 1, 0, stream>>>(now);
  return cudaGetLastError();
}

}  // namespace spl::kernels::cuda
