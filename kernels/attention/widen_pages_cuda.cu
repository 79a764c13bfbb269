#include "kernels/attention/attention_cuda_common.h"
#include "kernels/attention/widen_pages_cuda.h"
#include "kernels/cuda/e4m3_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kThreads = 256;

// The place of a page among those that are widened.
struct Place {
  int sequence, head, page;
};
__device__ __forceinline__ Place PlaceOf(const WidenArgs& a, int64_t index) {
  int low = 0, high = a.batch.num_sequences;
  while (high - low > 1) {
    const int mid = (low + high) / 2;
    if (a.sequences[mid].first_page <= index) {
      low = mid;
    } else {
      high = mid;
    }
  }
  // Sequences without pages share their first page with the next one, which the search finds.
  const WidenSequence& s = a.sequences[low];
  const auto of_sequence = static_cast<int>(index - s.first_page);
  return {low, of_sequence / s.num_pages, of_sequence % s.num_pages};
}

// One block a page.
__global__ void __launch_bounds__(kThreads) WidenKernel(const __grid_constant__ WidenArgs a) {
  const int64_t index = blockIdx.x;
  const Place at = PlaceOf(a, index);
  if (at.head == 0 && at.page == 0 && threadIdx.x == 0)
    a.table_offset[at.sequence] = int64_t{at.sequence} * a.num_kv_heads * a.table_stride;
  const int64_t page = a.batch.page_tables[a.batch.table_offset[at.sequence] + at.head * a.batch.head_stride + at.page];
  const Band band = BandOf(a.rules.head[at.head]);
  const bool visible =
      page >= 0 && (at.page * kPageTokens < band.sinks ||
                    (at.page + 1) * kPageTokens > a.sequences[at.sequence].first_position - band.window + 1);
  if (threadIdx.x == 0) {
    a.tables[(int64_t{at.sequence} * a.num_kv_heads + at.head) * a.table_stride + at.page] =
        visible ? static_cast<int32_t>(index) : kNoPage;
  }
  if (!visible) return;
  const int dim = a.batch.pool.head_dim, chunks = dim / 16;  // 16 codes
  const int64_t half_bytes = int64_t{kPageTokens} * (dim + 1);
  const auto* from = reinterpret_cast<const uint8_t*>(a.batch.pool.base) + 2 * page * half_bytes;
  auto* to = static_cast<uint4*>(a.pages) + index * (2 * kPageTokens * chunks * 2);
  for (int i = static_cast<int>(threadIdx.x); i < 2 * kPageTokens * chunks; i += kThreads) {
    const int half = i >= kPageTokens * chunks ? 1 : 0, chunk = i - half * kPageTokens * chunks;
    const uint8_t* codes = from + half * half_bytes;
    const uint4 x = __ldg(reinterpret_cast<const uint4*>(codes) + chunk);
    const __nv_bfloat162 factor = RowFactor(codes[kPageTokens * dim + chunk / chunks]);
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
    uint32_t wide[8];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint2 small = SmallBf16Quad(words[w]);
      wide[2 * w] = TimesRowFactor(small.x, factor);
      wide[2 * w + 1] = TimesRowFactor(small.y, factor);
    }
    to[2 * i] = {wide[0], wide[1], wide[2], wide[3]};
    to[2 * i + 1] = {wide[4], wide[5], wide[6], wide[7]};
  }
}

}  // namespace

cudaError_t WidenPages(const WidenArgs& a, cudaStream_t stream) {
  const KvPoolView& pool = a.batch.pool;
  if (a.num_kv_heads < 1 || a.num_kv_heads > kMaxKvHeads || a.total_pages < 0 || a.batch.num_sequences < 0)
    return cudaErrorInvalidValue;
  if (pool.dtype != DType::kE4M3 || pool.head_dim % 16 != 0 || a.total_pages > (int64_t{1} << 30))
    return cudaErrorNotSupported;
  if (a.total_pages == 0) return cudaSuccess;
  if (a.sequences == nullptr || a.pages == nullptr || a.tables == nullptr || a.table_offset == nullptr)
    return cudaErrorInvalidValue;
  WidenKernel<<<static_cast<unsigned>(a.total_pages), kThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace spl::kernels::cuda
