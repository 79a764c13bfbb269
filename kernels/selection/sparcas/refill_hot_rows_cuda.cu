// A block for each stream: it sorts the listed positions into hits and misses, finds the oldest slots by a count of
// their ages, and copies the missing rows over the link. A copy waits about two microseconds for its first byte, so
// that each thread asks for several pieces of 16 bytes before it stores one.
#include <algorithm>

#include "kernels/cuda/cuda_launch.h"
#include "kernels/selection/sparcas/hot_rows_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kUnroll = 8;  // pieces of a thread under way
constexpr int kAges = kHotAgeMax + 1;

struct Params {
  SelectionBatch selection;
  const int32_t* kv_len;
  const int32_t* tokens;
  const int32_t* counts;
  std::byte* pool;
  int64_t list_stride;
  int64_t first_stream;
  int64_t half_bytes;  // of a page
  int32_t capacity;    // most entries of a list
  int32_t num_kv_heads;
  int32_t row_bytes;     // of K or V, without a scale
  int32_t pieces_shift;  // log2 of the 16-byte pieces of a position: K, then V
  bool scales;           // a byte for each row of K and of V behind all rows of the half
};

struct Smem {
  uint32_t hits[kHotSlotsMax / 32];
  int32_t of_age[kAges];
  int32_t sums[kWarps];
  int32_t age;   // slots above it are all given away,
  int32_t ties;  // and so many of this age
};

// How many threads before this one have the flag; `total`: of the block. Called by all threads.
__device__ __forceinline__ int32_t RankOf(Smem& s, bool flag, int32_t& total) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const unsigned mask = __ballot_sync(0xffffffffu, flag);
  __syncthreads();  // the sums of the call before have been read
  if (lane == 0) s.sums[warp] = __popc(mask);
  __syncthreads();
  int32_t before = 0, all = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const int32_t n = s.sums[w];
    before += w < warp ? n : 0;
    all += n;
  }
  total = all;
  return before + __popc(mask & ((1u << lane) - 1));
}

__device__ __forceinline__ bool IsHit(const Smem& s, int32_t slot) { return s.hits[slot / 32] >> (slot % 32) & 1; }

// Sets age and ties for `wanted` slots. Called by all threads behind a barrier; returns behind one.
__device__ __forceinline__ void FindAge(Smem& s, int32_t wanted) {
  static_assert(kAges == 256 && kThreads >= kAges);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int age = kHotAgeMax - static_cast<int>(threadIdx.x);
  const int32_t own = age >= 0 ? s.of_age[age] : 0;
  int32_t sum = own;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int32_t other = __shfl_up_sync(0xffffffffu, sum, offset);
    if (lane >= offset) sum += other;
  }
  if (lane == 31) s.sums[warp] = sum;
  __syncthreads();
  for (int w = 0; w < warp; ++w) sum += s.sums[w];
  if (age >= 0 && sum >= wanted && sum - own < wanted) {
    s.age = age;
    s.ties = wanted - (sum - own);
  }
  __syncthreads();
}

// K and V of positions[i] to slots[i], for all i < count.
__device__ __forceinline__ void CopyRows(const Params& p, const HotStream& hot, const int32_t* positions,
                                         const uint16_t* slots, int32_t count) {
  const int32_t pieces = 1 << p.pieces_shift, of_row = pieces / 2, total = count << p.pieces_shift;
  const auto slot_page = [&](int32_t slot) { return p.pool + hot.slot_pages[slot / kPageTokens] * (2 * p.half_bytes); };
  for (int32_t base = threadIdx.x; base < total; base += kThreads * kUnroll) {
    uint4 held[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int32_t at = base + u * kThreads;
      if (at >= total) break;
      const int32_t position = positions[at >> p.pieces_shift], piece = at & (pieces - 1);
      const std::byte* const from = hot.host_pages[position / kPageTokens] + (piece >= of_row ? p.half_bytes : 0) +
                                    position % kPageTokens * p.row_bytes + (piece & (of_row - 1)) * 16;
      held[u] = __ldcs(reinterpret_cast<const uint4*>(from));
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int32_t at = base + u * kThreads;
      if (at >= total) break;
      const int32_t slot = slots[at >> p.pieces_shift], piece = at & (pieces - 1);
      std::byte* const to = slot_page(slot) + (piece >= of_row ? p.half_bytes : 0) + slot % kPageTokens * p.row_bytes +
                            (piece & (of_row - 1)) * 16;
      *reinterpret_cast<uint4*>(to) = held[u];
    }
  }
  if (!p.scales) return;
  for (int32_t i = threadIdx.x; i < 2 * count; i += kThreads) {
    const int32_t position = positions[i / 2], slot = slots[i / 2];
    const int64_t at = i % 2 * p.half_bytes + int64_t{kPageTokens} * p.row_bytes;
    slot_page(slot)[at + slot % kPageTokens] = hot.host_pages[position / kPageTokens][at + position % kPageTokens];
  }
}

__global__ void __launch_bounds__(kThreads) RefillKernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) int32_t misses[];  // [capacity]; then the slots that they get, 16 bits each
  __shared__ Smem s;
  auto* const slots = reinterpret_cast<uint16_t*>(misses + p.capacity);
  LetNextStart();
  WaitForPrevious();
  const int stream = blockIdx.x, sequence = stream / p.num_kv_heads, head = stream % p.num_kv_heads;
  const int t = static_cast<int>(threadIdx.x);
  if (!p.selection.Selects(sequence, head)) return;
  const HotRows rows = p.selection.sequences[sequence].hot;
  if (!rows.any()) return;
  const HotStream hot = rows.stream(p.first_stream + head);
  const int32_t kv_len = p.kv_len[sequence], count = min(p.counts[stream], p.capacity);
  const int32_t* const list = p.tokens + stream * p.list_stride;
  for (int32_t i = t; i < hot.num_slots / 32; i += kThreads) s.hits[i] = 0;
  for (int32_t i = t; i < kAges; i += kThreads) s.of_age[i] = 0;
  __syncthreads();

  int32_t num_misses = 0, num_on_host = 0;
  for (int32_t base = 0; base < count; base += kThreads) {
    const int32_t position = base + t < count ? list[base + t] : -1;
    const bool on_host = position >= 0 && hot.on_host(position);
    const int32_t slot = on_host ? hot.slot_of[position] - 1 : -1;
    if (slot >= 0) {
      atomicOr(&s.hits[slot / 32], 1u << (slot % 32));
      hot.listed_at[slot] = kv_len;
    }
    int32_t more = 0;
    const bool misses_slot = on_host && slot < 0;
    const int32_t rank = RankOf(s, misses_slot, more);
    if (misses_slot) misses[num_misses + rank] = position;
    num_misses += more;
    num_on_host += __syncthreads_count(on_host);
  }
  if (t == 0 && num_on_host > 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(rows.counts), static_cast<unsigned long long>(num_on_host));
    atomicAdd(reinterpret_cast<unsigned long long*>(rows.counts) + 1, static_cast<unsigned long long>(num_misses));
  }
  if (num_misses == 0) return;

  const auto age_of = [&](int32_t slot) { return min(kv_len - hot.listed_at[slot], kHotAgeMax); };
  for (int32_t slot = t; slot < hot.num_slots; slot += kThreads) {
    if (!IsHit(s, slot)) atomicAdd(&s.of_age[age_of(slot)], 1);
  }
  __syncthreads();
  FindAge(s, num_misses);
  const int32_t oldest = s.age, ties = s.ties;
  int32_t given = 0, tied = 0;
  for (int32_t base = 0; base < hot.num_slots && given < num_misses; base += kThreads) {
    const int32_t slot = base + t;
    const int32_t age = slot < hot.num_slots && !IsHit(s, slot) ? age_of(slot) : -1;
    int32_t more_tied = 0, more = 0;
    const int32_t tie = tied + RankOf(s, age == oldest, more_tied);
    const bool gives = age > oldest || (age == oldest && tie < ties);
    const int32_t rank = given + RankOf(s, gives, more);
    if (gives && rank < num_misses) slots[rank] = static_cast<uint16_t>(slot);
    tied += more_tied;
    given += more;
  }
  __syncthreads();
  num_misses = min(num_misses, given);
  for (int32_t i = t; i < num_misses; i += kThreads) {
    const int32_t slot = slots[i], position = misses[i], before = hot.position_of[slot];
    if (before != 0) hot.slot_of[before - 1] = 0;
    hot.position_of[slot] = position + 1;
    hot.slot_of[position] = static_cast<uint16_t>(slot + 1);
    hot.listed_at[slot] = kv_len;
  }
  CopyRows(p, hot, misses, slots, num_misses);
}

}  // namespace

cudaError_t RefillHotRows(const HotArgs& a, cudaStream_t stream) {
  if (a.batch.num_sequences == 0) return cudaSuccess;
  const bool codes = a.batch.pool.dtype == DType::kE4M3;
  if ((a.heads.head_dim != 64 && a.heads.head_dim != 128) || (!codes && a.batch.pool.dtype != DType::kBF16))
    return cudaErrorNotSupported;
  Params p{};
  p.selection = a.selection;
  p.kv_len = a.batch.kv_len;
  p.tokens = a.lists.tokens;
  p.counts = a.lists.counts;
  p.pool = a.batch.pool.base;
  p.list_stride = a.lists.stride;
  p.first_stream = a.first_stream;
  p.half_bytes = static_cast<int64_t>(a.batch.pool.half_bytes());
  p.capacity = static_cast<int32_t>(std::min<int64_t>(a.lists.stride, kHotBudgetMax));
  p.num_kv_heads = a.heads.num_kv_heads;
  p.row_bytes = a.heads.head_dim * (codes ? 1 : 2);
  p.pieces_shift = p.row_bytes == 256 ? 5 : p.row_bytes == 128 ? 4 : 3;
  p.scales = codes;
  const size_t smem_bytes = static_cast<size_t>((p.capacity + 1) / 2 * 2) * (sizeof(int32_t) + sizeof(uint16_t));
  const cudaError_t e =
      cudaFuncSetAttribute(RefillKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem_bytes));
  if (e != cudaSuccess) return e;
  const dim3 grid(static_cast<unsigned>(a.batch.num_sequences * p.num_kv_heads));
  return LaunchClusters(a.early, 1, RefillKernel, grid, dim3(kThreads), smem_bytes, stream, p);
}

}  // namespace spl::kernels::cuda
