#include "kernels/kv_copy/crc32c.h"
#include "kernels/kv_copy/crc32c_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kThreads = 256;

// One block per page, one slice of the page per thread; the slices are equal, and the first ones may begin before the
// page, where zeros are thought of. A CRC without its initial and final inversion is linear: each
// slice's CRC is moved over the bytes after its slice, and the results add up (by exclusive or) to the page's; leading
// zeros do not change it.
__global__ void __launch_bounds__(kThreads)
    PageCrcKernel(const std::byte* pool, int64_t page_bytes, const int32_t* pages, uint32_t* out, uint32_t slice_shift,
                  uint32_t initial) {
  __shared__ uint32_t table[4][256];  // table[k][b]: byte b followed by k zero bytes
  __shared__ uint32_t sums[kThreads / 32];
  {
    uint32_t crc = threadIdx.x;
    for (int k = 0; k < 4; ++k) {
      for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? crc >> 1 ^ 0x82f63b78u : crc >> 1;
      table[k][threadIdx.x] = crc;
    }
  }
  __syncthreads();
  const int page_words = static_cast<int>(page_bytes / 16), slice_words = (page_words + kThreads - 1) / kThreads;
  const int end = page_words - (kThreads - 1 - static_cast<int>(threadIdx.x)) * slice_words;
  const uint4* words = reinterpret_cast<const uint4*>(pool + static_cast<int64_t>(pages[blockIdx.x]) * page_bytes);
  uint32_t crc = 0;
  const auto take = [&](uint32_t word) {
    crc ^= word;
    crc = table[3][crc & 0xff] ^ table[2][crc >> 8 & 0xff] ^ table[1][crc >> 16 & 0xff] ^ table[0][crc >> 24];
  };
  for (int i = max(end - slice_words, 0); i < end; ++i) {
    const uint4 v = words[i];
    take(v.x);
    take(v.y);
    take(v.z);
    take(v.w);
  }
  // Moves it over the later slices: multiplies by slice_shift to the power of their number.
  uint32_t power = 1u << 31, square = slice_shift;
  for (unsigned n = kThreads - 1 - threadIdx.x; n != 0; n >>= 1) {
    if (n & 1) power = Crc32cMultiply(power, square);
    square = Crc32cMultiply(square, square);
  }
  crc = Crc32cMultiply(power, crc);
  crc = __reduce_xor_sync(0xffffffffu, crc);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = crc;
  __syncthreads();
  if (threadIdx.x == 0) {
    crc = initial;
    for (int i = 0; i < kThreads / 32; ++i) crc ^= sums[i];
    out[blockIdx.x] = ~crc;
  }
}

}  // namespace

cudaError_t PageChecksums(const KvPoolView& pool, const int32_t* pages, int64_t num_pages, uint32_t* out,
                          cudaStream_t stream) {
  if (num_pages == 0) return cudaSuccess;
  if (pool.page_bytes() % 16 != 0) return cudaErrorNotSupported;
  const size_t slice = (pool.page_bytes() / 16 + kThreads - 1) / kThreads * 16;
  const uint32_t initial = Crc32cMultiply(Crc32cShift(pool.page_bytes()), 0xffffffffu);
  PageCrcKernel<<<static_cast<unsigned>(num_pages), kThreads, 0, stream>>>(
      pool.base, static_cast<int64_t>(pool.page_bytes()), pages, out, Crc32cShift(slice), initial);
  return cudaGetLastError();
}

}  // namespace spl::kernels::cuda
