// The greedy of line_select.h and the tiles of line_tiles.h, KV head by KV head, without the host.
//
// A round is three kernels. Sums: one thread per line, over the samples in ascending order, leaving out cells of lines
// that were taken before. Sort: one block per head and kind of line: a radix select of the heaviest kLinesPerRound,
// then a bitonic sort in shared memory. Greedy: one block per head brings both lists into shared memory, and one of its
// threads walks them (its decisions depend on one another; a step is some 20 ns). All rounds are launched; those of a
// finished head return at once. Sums of blocks are always joined in ascending order, so that no sum depends on timing.
#include <cmath>

#include "kernels/attention/attention_cuda_common.h"
#include "kernels/cuda/cuda_cluster.h"
#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/cuda_types.h"
#include "kernels/selection/loopserve/select_lines_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kSumThreads = kLinesPerSumBlock;
constexpr int kSortThreads = 1024;
constexpr int kGreedyThreads = 512;
constexpr int kListThreads = 1024;
constexpr int kTileThreads = 128;

enum LineDone : int32_t { kOpen = 0, kCovered = 1, kDense = 2 };
enum LineKind : int { kColumn = 0, kOffset = 1 };

struct Params {
  LineJob job;
  bool first_round;
};

struct Head {
  const Params& p;
  int id;

  __device__ int keys() const { return p.job.plan.sizes.num_keys(); }
  __device__ int64_t line(int kind) const { return (int64_t{id} * 2 + kind) * keys(); }
  __device__ uint32_t* chosen(int kind) const {
    return p.job.scratch.chosen + (int64_t{id} * 2 + kind) * p.job.scratch.chosen_words;
  }
  __device__ int64_t sorted(int kind) const { return (int64_t{id} * 2 + kind) * kMaxLines; }
  __device__ LineResult& result() const { return p.job.plan.results[id]; }
  __device__ int32_t& done() const { return p.job.scratch.done[id]; }
  __device__ bool top() const { return p.job.options.top_columns > 0; }
  __device__ float target(float total) const { return static_cast<float>((1.0 - p.job.options.alpha) * total); }
};

// All threads of a block of at least 32. Fixed order: lanes take every 32nd, then a tree.
__device__ float SumOfBlocks(const float* sums, int count) {
  float sum = 0;
  for (int i = threadIdx.x % 32; i < count; i += 32) sum += sums[i];
  return WarpSum(sum);
}

// ---- before the first round -----------------------------------------------------------------------------------------
__global__ void __launch_bounds__(256) StartKernel(const __grid_constant__ Params p) {
  LetNextStart();
  WaitForPrevious();
  const Head head{p, p.job.head[blockIdx.x]};
  const int n = head.keys();
  for (int kind = 0; kind < 2; ++kind) {
    const int forced = min(kind == kColumn ? p.job.options.forced_columns : p.job.options.forced_offsets, n);
    for (int word = threadIdx.x; word < p.job.scratch.chosen_words; word += blockDim.x) {
      const int bits = min(max(forced - 32 * word, 0), 32);
      head.chosen(kind)[word] = bits == 32 ? ~0u : (1u << bits) - 1;
    }
    if (threadIdx.x == 0) (kind == kColumn ? head.result().num_columns : head.result().num_offsets) = forced;
  }
  if (threadIdx.x == 0) {
    head.done() = kOpen;
    head.result().rounds = 0;
    head.result().dense = 0;
  }
}

// ---- sums -----------------------------------------------------------------------------------------------------------
struct LineSum {
  float left = 0, largest = 0, all = 0;
};

// All 32 lanes; `line` may be past the last one (then the result is of no use).
template <int kKind>
__device__ LineSum SumLine(const Head& head, int line) {
  const LineSizes& sizes = head.p.job.plan.sizes;
  const int lane = threadIdx.x % 32;
  const uint32_t* others = head.chosen(1 - kKind);
  const bool exists = line < head.keys();
  const bool taken = !exists || (head.chosen(kKind)[line / 32] >> (line % 32) & 1) != 0;
  const float* weights = head.p.job.plan.weights + int64_t{head.id} * sizes.num_samples * sizes.weight_stride();
  // Samples before the warp's first line have no cell in any of its lines.
  int first = 0;
  for (int base = 0; base < sizes.num_samples; base += 32) {
    const bool before =
        base + lane < sizes.num_samples && sizes.first_position + head.p.job.sample[base + lane] < line - lane;
    first += __popc(__ballot_sync(0xffffffffu, before));
  }
  LineSum sum;
#pragma unroll 8
  for (int r = first; r < sizes.num_samples; ++r) {
    const int other = sizes.first_position + head.p.job.sample[r] - line;  // the line of the other kind in this cell
    const bool cell = exists && other >= 0;
    const float a = cell ? weights[r * sizes.weight_stride() + (kKind == kColumn ? line : other)] : 0.0f;
    const uint32_t word = cell ? others[other / 32] : 0;
    const float left = taken || (word >> (other & 31) & 1) != 0 ? 0.0f : a;
    sum.all += a;
    sum.left += left;
    sum.largest = fmaxf(sum.largest, left);
  }
  return sum;
}

__global__ void __launch_bounds__(kSumThreads) SumsKernel(const __grid_constant__ Params p) {
  LetNextStart();
  __shared__ float scratch[2][32];
  const Head head{p, p.job.head[blockIdx.z]};
  const int kind = blockIdx.y, line = blockIdx.x * kSumThreads + threadIdx.x;
  WaitForPrevious();
  if (head.done() != kOpen) return;
  const LineSum sum = kind == kColumn ? SumLine<kColumn>(head, line) : SumLine<kOffset>(head, line);
  if (line < head.keys()) {
    p.job.scratch.line[head.line(kind) + line] = sum.left;
    p.job.scratch.line_max[head.line(kind) + line] = sum.largest;
  }
  if (kind != kColumn) return;
  const float block_sum = BlockSum(sum.left, scratch[0]);
  const float block_total = BlockSum(sum.all, scratch[1]);
  if (threadIdx.x == 0) {
    const int64_t at = int64_t{head.id} * p.job.scratch.sum_blocks + blockIdx.x;
    p.job.scratch.block_sums[at] = block_sum;
    if (p.first_round) p.job.scratch.block_totals[at] = block_total;
  }
}

// ---- sort -----------------------------------------------------------------------------------------------------------
// The weights of a kind, seen by a block: those that a thread can hold in registers are read once.
constexpr int kHeld = 32;

struct Weights {
  const float* from;
  int n;
  uint32_t held[kHeld];  // bits of this thread's values; 0: none

  __device__ Weights(const float* weights, int count) : from(weights), n(count) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int at = i * kSortThreads + static_cast<int>(threadIdx.x);
      held[i] = at < n ? __float_as_uint(from[at]) : 0;
    }
  }
  // f(bits, line) of all that are positive.
  template <typename F>
  __device__ void ForEach(const F& f) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (held[i] != 0) f(held[i], i * kSortThreads + static_cast<int>(threadIdx.x));
    }
    for (int at = kHeld * kSortThreads + static_cast<int>(threadIdx.x); at < n; at += kSortThreads) {
      const uint32_t bits = __float_as_uint(from[at]);
      if (bits != 0) f(bits, at);
    }
  }
};

// Weights are not negative: their bits order as they do.
constexpr int kDigitBits = 11;
constexpr int kDigits = 1 << kDigitBits;
constexpr int kCopies = 4;  // copies of the histogram: weights crowd in few digits

struct SortMemory {
  uint64_t key[kMaxLines];
  int32_t count[kCopies][kDigits];
  int32_t warp_count[32];
  int32_t threshold_digit, above, num_ties, num_keys;
};

// Heaviest first, ties to the lower line.
__device__ __forceinline__ uint64_t SortKey(uint32_t bits, int line) {
  return static_cast<uint64_t>(~bits) << 32 | static_cast<uint32_t>(line);
}

// The bits of the k-th largest positive weight, of more than k; m.above: how many are larger, m.num_ties: how many are
// equal.
__device__ uint32_t Threshold(const Weights& weights, int k, SortMemory& m) {
  uint32_t prefix = 0;
  int wanted = k;
  for (int shift = 31 - kDigitBits;; shift -= kDigitBits) {  // the sign bit is 0
    const int low = max(shift, 0), bits = kDigitBits + min(shift, 0);
    for (int i = threadIdx.x; i < kCopies * kDigits; i += kSortThreads) m.count[0][i] = 0;
    __syncthreads();
    int32_t* count = m.count[threadIdx.x / 32 % kCopies];
    const uint32_t mask = (1u << bits) - 1;
    weights.ForEach([&](uint32_t x, int) {
      if (static_cast<uint64_t>(x) >> (low + bits) == prefix) atomicAdd(&count[x >> low & mask], 1);
    });
    __syncthreads();
    // From the largest digit down: two digits a thread.
    const int high = kDigits - 1 - 2 * static_cast<int>(threadIdx.x);
    int a = 0, b = 0;
#pragma unroll
    for (int copy = 0; copy < kCopies; ++copy) {
      a += m.count[copy][high];
      b += m.count[copy][high - 1];
    }
    const int before = ExclusiveSum<kSortThreads>(a + b, m.warp_count);
    if (before < wanted && before + a + b >= wanted) {
      const bool first = before + a >= wanted;
      m.threshold_digit = first ? high : high - 1;
      m.above = before + (first ? 0 : a);
      m.num_ties = first ? a : b;
    }
    __syncthreads();
    prefix = prefix << bits | static_cast<uint32_t>(m.threshold_digit);
    wanted -= m.above;
    __syncthreads();
    if (shift <= 0) break;
  }
  if (threadIdx.x == 0) m.above = k - wanted;
  __syncthreads();
  return prefix;
}

// Ascending; count is a power of two, kSortMin to kSortMax. A thread holds kPerThread neighbours: steps between those
// are in registers, between lanes by shuffles, only the wide ones go through shared memory.
constexpr int kPerThread = kLinesPerRound / kSortThreads;
constexpr int kSortMin = 32 * kPerThread;
static_assert(kPerThread == 4 && kLinesPerRound % kSortThreads == 0);

__device__ __forceinline__ uint64_t Pick(uint64_t a, uint64_t b, bool smaller) { return (a < b) == smaller ? a : b; }

__device__ void BitonicSort(uint64_t* key, int count) {
  const int first = static_cast<int>(threadIdx.x) * kPerThread;
  const bool active = first < count;  // whole warps
  uint64_t x[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) x[i] = active ? key[first + i] : 0;
  for (int size = 2; size <= count; size *= 2) {
    int stride = size / 2;
    if (stride >= kSortMin) {
      __syncthreads();
      if (active) {
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) key[first + i] = x[i];
      }
      __syncthreads();
      for (; stride >= kSortMin; stride /= 2) {
        for (int i = threadIdx.x; i < count / 2; i += kSortThreads) {
          const int low = i / stride * 2 * stride + i % stride, high = low + stride;
          const uint64_t a = key[low], b = key[high];
          if ((a > b) == ((low & size) == 0)) {
            key[low] = b;
            key[high] = a;
          }
        }
        __syncthreads();
      }
      if (active) {
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) x[i] = key[first + i];
      }
    }
    if (!active) continue;
    for (; stride >= kPerThread; stride /= 2) {
      const bool smaller = ((first & size) == 0) == ((first & stride) == 0);
#pragma unroll
      for (int i = 0; i < kPerThread; ++i)
        x[i] = Pick(x[i], __shfl_xor_sync(0xffffffffu, x[i], stride / kPerThread), smaller);
    }
#pragma unroll
    for (int near = kPerThread / 2; near > 0; near /= 2) {
      if (near >= size) continue;
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        if (i & near) continue;
        const uint64_t a = x[i], b = x[i + near];
        const bool ascending = ((first + i) & size) == 0;
        x[i] = Pick(a, b, ascending);
        x[i + near] = Pick(a, b, !ascending);
      }
    }
  }
  __syncthreads();
  if (active) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) key[first + i] = x[i];
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kSortThreads) SortKernel(const __grid_constant__ Params p) {
  LetNextStart();
  extern __shared__ __align__(16) uint8_t raw[];
  auto& m = *reinterpret_cast<SortMemory*>(raw);
  const Head head{p, p.job.head[blockIdx.y]};
  const int kind = blockIdx.x, n = head.keys();
  WaitForPrevious();
  if (head.done() != kOpen) return;
  if (!head.top()) {
    // Covered already: the greedy will see it too.
    const int64_t at = int64_t{head.id} * p.job.scratch.sum_blocks;
    const float left = SumOfBlocks(p.job.scratch.block_sums + at, p.job.scratch.sum_blocks);
    const float total = SumOfBlocks(p.job.scratch.block_totals + at, p.job.scratch.sum_blocks);
    if (left <= head.target(total)) return;
  }
  const LineOptions& o = p.job.options;
  const int taken = kind == kColumn ? head.result().num_columns : head.result().num_offsets;
  const int most = head.top() ? (kind == kColumn ? o.top_columns : o.top_offsets)
                              : (kind == kColumn ? o.max_columns : o.max_offsets);
  const int room = max(0, head.top() ? most - taken : min(most - taken, kLinesPerRound));
  const Weights weights(p.job.scratch.line + head.line(kind), n);

  int positive = 0;
  weights.ForEach([&](uint32_t, int) { ++positive; });
  int total = 0;
  ExclusiveSum<kSortThreads>(positive, m.warp_count, &total);
  const bool more = total > room;
  const int count = min(total, room);
  __syncthreads();
  uint32_t threshold = 0;  // all that are positive
  if (more && count > 0) threshold = Threshold(weights, count, m);
  if (threadIdx.x == 0) m.num_keys = 0;
  __syncthreads();
  // At the threshold the first ones are taken; in any order if all of them are wanted.
  const bool all_ties = more && count > 0 && m.above + m.num_ties == count;
  if (count > 0) {
    weights.ForEach([&](uint32_t x, int line) {
      if (x > threshold || (all_ties && x == threshold)) m.key[atomicAdd(&m.num_keys, 1)] = SortKey(x, line);
    });
  }
  __syncthreads();
  if (more && count > 0 && !all_ties) {
    const int each = (n + kSortThreads - 1) / kSortThreads;
    const int begin = min(n, static_cast<int>(threadIdx.x) * each), end = min(n, begin + each);
    int ties = 0;
    for (int i = begin; i < end; ++i) ties += __float_as_uint(weights.from[i]) == threshold;
    int at = m.above + ExclusiveSum<kSortThreads>(ties, m.warp_count);
    for (int i = begin; i < end && at < count; ++i) {
      if (__float_as_uint(weights.from[i]) == threshold) m.key[at++] = SortKey(threshold, i);
    }
  }
  int padded = kSortMin;
  while (padded < count) padded *= 2;
  for (int i = count + threadIdx.x; i < padded; i += kSortThreads) m.key[i] = ~uint64_t{0};
  __syncthreads();
  if (!head.top()) BitonicSort(m.key, padded);
  const LineSizes& sizes = p.job.plan.sizes;
  LineEntry* out = p.job.scratch.sorted + head.sorted(kind);
  for (int i = threadIdx.x; i < count; i += kSortThreads) {
    const auto line = static_cast<int32_t>(m.key[i] & 0xffffffff);
    out[i] = {__uint_as_float(~static_cast<uint32_t>(m.key[i] >> 32)), p.job.scratch.line_max[head.line(kind) + line],
              kind == kColumn ? sizes.num_rows - max(0, line - sizes.first_position) : min(sizes.num_rows, n - line),
              line};
  }
  if (threadIdx.x == 0) p.job.scratch.num_sorted[head.id * 2 + kind] = more ? -1 - count : count;
}

// ---- greedy ---------------------------------------------------------------------------------------------------------
struct GreedyMemory {
  LineEntry entry[2][kLinesPerRound];
  int32_t taken[2];
};

// One kind of line as the walk sees it.
struct Side {
  const LineEntry* entry;
  int count;      // lines in the list
  bool more;      // lines than the list has
  bool full;      // the list is all there is room for
  int taken = 0;  // lines taken from the list
  int lines = 0;  // lines of this kind taken so far, including earlier rounds
  float overlap = 0;

  __device__ LineEntry At(int i) const { return i < count ? entry[i] : LineEntry{0, 0, 1, 0}; }
  __device__ bool used_up() const { return taken == count && more; }
};

__device__ __forceinline__ float Cells(int cells, int crossed) { return static_cast<float>(max(1, cells - crossed)); }

// How many lines of `mine` the greedy takes in a row; `left` afterwards. All lanes. A slash is taken when it is worth
// at least as much as the column, a column when it is worth more.
__device__ int TakeRun(Side& mine, const Side& other, bool slash, bool last_round, float target, float* left) {
  const int lane = threadIdx.x % 32;
  const LineEntry e = mine.At(mine.taken + lane), o = other.At(other.taken);
  const float gain = fmaxf(0.0f, e.weight - other.overlap);
  float gains = gain, overlaps = e.largest;  // sums over this lane and those below
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const float g = __shfl_up_sync(0xffffffffu, gains, d), m = __shfl_up_sync(0xffffffffu, overlaps, d);
    if (lane >= d) {
      gains += g;
      overlaps += m;
    }
  }
  const float gains_before = __shfl_up_sync(0xffffffffu, gains, 1),
              overlaps_before = __shfl_up_sync(0xffffffffu, overlaps, 1);
  const float overlap = mine.overlap + (lane > 0 ? overlaps_before : 0);
  const float left_now = *left - (lane > 0 ? gains_before : 0);
  const float other_gain = fmaxf(0.0f, o.weight - overlap);
  const float my_cells = Cells(e.cells, other.lines), other_cells = Cells(o.cells, mine.lines + lane);
  const float value = __fmul_rn(gain, other_cells), other_value = __fmul_rn(other_gain, my_cells);
  bool take = mine.taken + lane < mine.count && left_now > target && gain > 0;
  take = take && (slash ? value >= other_value : value > other_value);
  take = take && (last_round || 2 * value >= __fmul_rn(o.weight, my_cells));
  const unsigned not_taken = ~__ballot_sync(0xffffffffu, take);
  const int run = not_taken == 0 ? 32 : __ffs(not_taken) - 1;
  if (run > 0) {
    *left -= __shfl_sync(0xffffffffu, gains, run - 1);
    mine.overlap += __shfl_sync(0xffffffffu, overlaps, run - 1);
    mine.taken += run;
    mine.lines += run;
  }
  return run;
}

// One warp; decides as line_select.cc does (sums of a run are added up in another order).
__device__ void Walk(const Head& head, GreedyMemory& m, Side (&side)[2], float left, float target) {
  LineResult& result = head.result();
  const bool last_round = result.rounds + 1 == head.p.job.options.max_rounds;
  int32_t done = kOpen;
  bool slash = true;  // the kind of the last run: the first to be asked again
  while (left > target) {
    if (side[kColumn].used_up() || side[kOffset].used_up()) {
      if ((side[kColumn].used_up() && side[kColumn].full) || (side[kOffset].used_up() && side[kOffset].full))
        done = kDense;
      break;
    }
    const auto run = [&](bool slashes) {
      return slashes ? TakeRun(side[kOffset], side[kColumn], true, last_round, target, &left)
                     : TakeRun(side[kColumn], side[kOffset], false, last_round, target, &left);
    };
    if (run(slash) > 0) continue;
    slash = !slash;
    if (run(slash) == 0) break;
  }
  if (left <= target) done = kCovered;
  __syncwarp();
  if (threadIdx.x % 32 != 0) return;
  for (int kind = 0; kind < 2; ++kind) m.taken[kind] = side[kind].taken;
  result.num_columns = side[kColumn].lines;
  result.num_offsets = side[kOffset].lines;
  result.uncovered = fmaxf(0.0f, left);
  ++result.rounds;
  head.done() = done;
}

__global__ void __launch_bounds__(kGreedyThreads) GreedyKernel(const __grid_constant__ Params p) {
  LetNextStart();
  extern __shared__ __align__(16) uint8_t raw[];
  auto& m = *reinterpret_cast<GreedyMemory*>(raw);
  const Head head{p, p.job.head[blockIdx.x]};
  const int n = head.keys();
  WaitForPrevious();
  if (head.done() != kOpen) return;
  const int64_t at = int64_t{head.id} * p.job.scratch.sum_blocks;
  const float left = SumOfBlocks(p.job.scratch.block_sums + at, p.job.scratch.sum_blocks);
  const float total = SumOfBlocks(p.job.scratch.block_totals + at, p.job.scratch.sum_blocks);
  const float target = head.target(total);
  __syncthreads();  // all have read what the first thread changes below
  if (threadIdx.x == 0) head.result().total = total;
  if (!head.top() && left <= target) {
    if (threadIdx.x == 0) {
      head.result().uncovered = left;
      head.done() = kCovered;
    }
    return;
  }
  Side side[2];
  for (int kind = 0; kind < 2; ++kind) {
    const LineEntry* sorted = p.job.scratch.sorted + head.sorted(kind);
    const int c = p.job.scratch.num_sorted[head.id * 2 + kind];
    const int lines = kind == kColumn ? head.result().num_columns : head.result().num_offsets;
    const int most = kind == kColumn ? p.job.options.max_columns : p.job.options.max_offsets;
    const int count = c < 0 ? -1 - c : c;
    side[kind] =
        Side{.entry = m.entry[kind], .count = count, .more = c < 0, .full = count == most - lines, .lines = lines};
    if (head.top()) continue;
    for (int i = threadIdx.x; i < count; i += kGreedyThreads) m.entry[kind][i] = sorted[i];
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    if (!head.top()) {
      Walk(head, m, side, left, target);
    } else if (threadIdx.x == 0) {
      for (int kind = 0; kind < 2; ++kind) m.taken[kind] = side[kind].count;
      head.result().num_columns += side[kColumn].count;
      head.result().num_offsets += side[kOffset].count;
      head.result().rounds = 1;
    }
  }
  __syncthreads();
  for (int kind = 0; kind < 2; ++kind) {
    uint32_t* chosen = head.chosen(kind);
    const LineEntry* sorted = p.job.scratch.sorted + head.sorted(kind);
    for (int i = threadIdx.x; i < m.taken[kind]; i += kGreedyThreads) {
      const int line = sorted[i].line;
      atomicOr(&chosen[line / 32], 1u << (line % 32));
    }
  }
}

// ---- lists ----------------------------------------------------------------------------------------------------------
// Decides the heads that are still open, and writes the lines down in ascending order.
__global__ void __launch_bounds__(kListThreads) ListKernel(const __grid_constant__ Params p) {
  LetNextStart();
  __shared__ int32_t warp_count[32];
  const Head head{p, p.job.head[blockIdx.x]};
  const LineSizes& sizes = p.job.plan.sizes;
  WaitForPrevious();
  int32_t done = head.done();
  __syncthreads();
  if (done == kOpen) {
    const float left =
        SumOfBlocks(p.job.scratch.block_sums + int64_t{head.id} * p.job.scratch.sum_blocks, p.job.scratch.sum_blocks);
    done = head.top() || left <= head.target(head.result().total) ? kCovered : kDense;
    if (threadIdx.x == 0) {
      head.result().uncovered = left;
      head.done() = done;
    }
  }
  if (threadIdx.x == 0 && done == kDense) {
    head.result().dense = 1;
    head.result().num_columns = head.result().num_offsets = 0;
  }
  for (int kind = 0; kind < 2; ++kind) {
    const int capacity = kind == kColumn ? 64 * sizes.column_words() : sizes.max_offsets;
    int32_t* out = kind == kColumn ? p.job.plan.columns + int64_t{head.id} * capacity
                                   : p.job.plan.offsets + int64_t{head.id} * capacity;
    const uint32_t* chosen = head.chosen(kind);
    const int words = p.job.scratch.chosen_words, each = (words + kListThreads - 1) / kListThreads;
    const int begin = min(words, static_cast<int>(threadIdx.x) * each), end = min(words, begin + each);
    int mine = 0;
    if (done != kDense) {
      for (int i = begin; i < end; ++i) mine += __popc(chosen[i]);
    }
    int total = 0;
    int at = ExclusiveSum<kListThreads>(mine, warp_count, &total);
    if (done != kDense) {
      for (int i = begin; i < end; ++i) {
        for (uint32_t bits = chosen[i]; bits != 0; bits &= bits - 1) {
          if (at < capacity) out[at] = i * 32 + __ffs(bits) - 1;
          ++at;
        }
      }
    }
    if (kind == kColumn) {
      for (int i = total + threadIdx.x; i < capacity; i += kListThreads) out[i] = 0;
    }
    __syncthreads();
  }
}

// ---- tiles ----------------------------------------------------------------------------------------------------------
// Whether a bit of [first, last] is set; last - first < 127.
__device__ bool AnyBit(const uint32_t* words, int first, int last) {
  for (int w = first / 32; w <= last / 32; ++w) {
    uint32_t bits = words[w];
    if (w == first / 32) bits &= ~0u << (first % 32);
    if (w == last / 32) bits &= ~0u >> (31 - last % 32);
    if (bits != 0) return true;
  }
  return false;
}

__global__ void __launch_bounds__(kTileThreads) TilesKernel(const __grid_constant__ Params p) {
  LetNextStart();
  extern __shared__ uint32_t tile_words[];  // [2 tile_words]
  const Head head{p, p.job.head[blockIdx.y]};
  const LineSizes& sizes = p.job.plan.sizes;
  const int tile = blockIdx.x, n = head.keys();
  const int low = sizes.first_position + tile * 64, high = min(low + 63, n - 1);
  const int64_t at = int64_t{head.id} * sizes.num_row_tiles() + tile;
  WaitForPrevious();
  const bool dense = head.done() == kDense;
  auto* tiles = reinterpret_cast<uint32_t*>(p.job.plan.tiles + at * sizes.tile_words());
  for (int page = threadIdx.x; page < 64 * sizes.tile_words(); page += kTileThreads) {
    bool seen = page <= high / 64;
    if (seen && !dense) seen = AnyBit(head.chosen(kOffset), max(0, low - page * 64 - 63), high - page * 64);
    const unsigned bits = __ballot_sync(0xffffffffu, seen);
    if (threadIdx.x % 32 == 0) tiles[page / 32] = tile_words[page / 32] = bits;
  }
  __syncthreads();
  auto* masks = reinterpret_cast<uint32_t*>(p.job.plan.column_masks + at * sizes.column_words());
  const int num_columns = dense ? 0 : head.result().num_columns;
  const int32_t* columns = p.job.plan.columns + int64_t{head.id} * 64 * sizes.column_words();
  const int used = (num_columns + 63) / 64 * 64;
  for (int i = threadIdx.x; i < (used + kTileThreads - 1) / kTileThreads * kTileThreads; i += kTileThreads) {
    bool alone = false;
    if (i < num_columns) {
      const int column = columns[i], page = column / 64;
      alone = column < low && (tile_words[page / 32] >> (page % 32) & 1) == 0;
    }
    const unsigned bits = __ballot_sync(0xffffffffu, alone);
    if (threadIdx.x % 32 == 0 && i < used) masks[i / 32] = bits;
  }
  for (int i = used / 32 + threadIdx.x; i < 2 * sizes.column_words(); i += kTileThreads) masks[i] = 0;
}

// One block per 64 columns of a head: puts their K and V side by side, with zeros after the last one.
__global__ void __launch_bounds__(256) GatherKernel(const __grid_constant__ Params p) {
  LetNextStart();
  const Head head{p, p.job.head[blockIdx.y]};
  const LineSizes& sizes = p.job.plan.sizes;
  const int row_bytes = sizes.shape.head_dim * (sizes.page_dtype == DType::kF32 ? 4 : 2), chunks = row_bytes / 16;
  const int64_t page_bytes = int64_t{2} * kPageTokens * row_bytes;
  WaitForPrevious();
  const int count = min(kPageTokens, head.result().num_columns - static_cast<int>(blockIdx.x) * kPageTokens);
  if (count <= 0) return;
  const int32_t* columns = p.job.plan.columns + (int64_t{head.id} * sizes.column_words() + blockIdx.x) * kPageTokens;
  const int32_t* table =
      p.job.batch.page_tables + p.job.batch.table_offset[p.job.sequence] + head.id * p.job.batch.head_stride;
  auto* out = reinterpret_cast<uint4*>(p.job.plan.column_pages +
                                       (int64_t{head.id} * sizes.column_words() + blockIdx.x) * page_bytes);
  for (int i = threadIdx.x; i < 2 * kPageTokens * chunks; i += blockDim.x) {
    const int chunk = i % chunks, slot = i / chunks % kPageTokens, half = i / chunks / kPageTokens;
    uint4 x{};
    if (slot < count) {
      const int32_t column = columns[slot], physical = table[column / kPageTokens];
      if (physical >= 0) {
        x = *reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(p.job.batch.pool.base) +
                                            physical * page_bytes + half * (page_bytes / 2) +
                                            int64_t{column % kPageTokens} * row_bytes + chunk * 16);
      }
    }
    out[i] = x;
  }
}

}  // namespace

cudaError_t LineChoiceAndTiles(const LineJob& job, cudaStream_t stream) {
  const LineSizes& sizes = job.plan.sizes;
  Params p{job, true};
  constexpr int kSortBytes = sizeof(SortMemory), kGreedyBytes = sizeof(GreedyMemory);
  cudaError_t e = cudaFuncSetAttribute(SortKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSortBytes);
  if (e == cudaSuccess)
    e = cudaFuncSetAttribute(GreedyKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kGreedyBytes);
  const auto launch = [&](auto kernel, dim3 grid, int threads, size_t bytes) {
    if (e == cudaSuccess) e = LaunchEarly(kernel, grid, threads, bytes, stream, p);
  };
  const dim3 heads(job.num_heads);
  const dim3 sums((sizes.num_keys() + kSumThreads - 1) / kSumThreads, 2, job.num_heads);
  launch(StartKernel, heads, 256, 0);
  const int rounds = job.options.top_columns > 0 ? 1 : job.options.max_rounds;
  for (int round = 0; round < rounds; ++round) {
    launch(SumsKernel, sums, kSumThreads, 0);
    launch(SortKernel, dim3(2, job.num_heads), kSortThreads, kSortBytes);
    launch(GreedyKernel, heads, kGreedyThreads, kGreedyBytes);
    p.first_round = false;
  }
  launch(SumsKernel, sums, kSumThreads, 0);
  launch(ListKernel, heads, kListThreads, 0);
  launch(TilesKernel, dim3(sizes.num_row_tiles(), job.num_heads), kTileThreads,
         static_cast<size_t>(sizes.tile_words()) * sizeof(uint64_t));
  if (sizes.column_words() > 0) launch(GatherKernel, dim3(sizes.column_words(), job.num_heads), 256, 0);
  return e;
}

}  // namespace spl::kernels::cuda
