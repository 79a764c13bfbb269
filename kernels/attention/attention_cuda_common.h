// Parts shared by the CUDA attention variants: argument checks (host), the order in which prefill tiles run, and the
// pages that a query tile sees (device). Included by .cu files only.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "kernels/attention/attention_cuda.h"
#include "kernels/cuda/cuda_device_info.h"

namespace spl::kernels::cuda {

// The heads that a launch computes. Heads with lines have variants of their own; PrefillMma and PrefillSm90 compute the
// others.
enum class HeadsOf : uint8_t { kAll, kLines, kOthers };
// The variants, one file each. All take checked arguments and return cudaErrorNotSupported for arguments that they do
// not serve.
cudaError_t PrefillGeneric(const PrefillArgs& args, cudaStream_t stream, HeadsOf which);
cudaError_t PrefillMma(const PrefillArgs& args, cudaStream_t stream);
cudaError_t PrefillSm90(const PrefillArgs& args, cudaStream_t stream);
cudaError_t PrefillLinesSm90(const PrefillArgs& args, cudaStream_t stream);
cudaError_t DecodeGeneric(const DecodeArgs& args, cudaStream_t stream);
cudaError_t DecodeMma(const DecodeArgs& args, cudaStream_t stream);

inline bool Aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// Shapes both tensor-core families serve. codes: pages of kE4M3, too.
inline bool TensorCoreShape(const AttentionHeads& heads, const PagedBatch& batch, DType dtype, const void* q,
                            int64_t q_row_stride, const void* out, bool codes = false) {
  const DType pages = batch.pool.dtype;
  return dtype == DType::kBF16 && (pages == DType::kBF16 || (codes && pages == DType::kE4M3)) &&
         (heads.head_dim == 64 || heads.head_dim == 128) && Aligned16(q) && Aligned16(out) && q_row_stride % 8 == 0 &&
         Aligned16(batch.pool.base);
}

__host__ __device__ inline Band BandOf(const HeadRule& r) {
  if (r.rule == VisibilityRule::kSelected) return Band{0, kSelectedWindow};
  if (r.rule == VisibilityRule::kElsewhere) return Band{0, kElsewhereWindow};
  return r.rule == VisibilityRule::kBand ? Band{r.num_sinks, r.window < kFullWindow ? r.window : kFullWindow}
                                         : Band{0, kFullWindow};
}

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

// ---- Prefill schedule -----------------------------------------------------------------------------------------------
// A tile is kTileRows consecutive rows of one sequence times one query head. Tiles are numbered so that a CTA that
// takes them in order meets the long ones first: kFull heads before kBand heads; kFull heads in sections whose K and V
// fit in the L2 cache together; within a section the last tiles of all sequences, then the last but one, and so on.
inline constexpr int kTileRows = 128;

struct Schedule {
  uint8_t kv_head[kMaxKvHeads];  // kFull heads, then kBand heads; without kLines and skipped heads
  int32_t num_heads;
  int32_t num_full;
  int32_t section;  // kFull heads per section
};

// The rows that a launch computes of each sequence.
struct RowRanges {
  const int32_t* row_begin;  // [num_sequences + 1]
  int32_t last;              // > 0: only the last `last` rows
#ifdef __CUDACC__
  __device__ int end(int s) const { return row_begin[s + 1]; }
  __device__ int begin(int s) const { return last > 0 ? max(row_begin[s], row_begin[s + 1] - last) : row_begin[s]; }
#endif
};

constexpr int64_t kL2Budget = 32 << 20;  // for K and V of a section

inline Schedule MakeSchedule(const PrefillArgs& a) {
  Schedule s{};
  int n = 0;
  const auto is_left_out = [&](int h) {
    return a.rules.head[h].rule == VisibilityRule::kLines || (a.skip_heads >> h & 1) != 0;
  };
  const auto is_full = [&](int h) {
    const Band b = BandOf(a.rules.head[h]);
    return b.window >= a.max_kv_len;
  };
  for (int h = 0; h < a.heads.num_kv_heads; ++h) {
    if (!is_left_out(h) && is_full(h)) s.kv_head[n++] = static_cast<uint8_t>(h);
  }
  s.num_full = n;
  for (int h = 0; h < a.heads.num_kv_heads; ++h) {
    if (!is_left_out(h) && !is_full(h)) s.kv_head[n++] = static_cast<uint8_t>(h);
  }
  s.num_heads = n;
  const int64_t head_bytes = int64_t{4} * a.heads.head_dim * std::max(a.max_kv_len, 1);
  s.section = static_cast<int32_t>(std::clamp<int64_t>(kL2Budget / head_bytes, 1, std::max(s.num_full, 1)));
  return s;
}

// Upper bound of the number of tiles; only the device knows the exact number. 0: too many to number.
inline int32_t MaxTiles(const PrefillArgs& a) {
  int64_t num_rows = a.num_rows;
  if (a.last_rows > 0) num_rows = std::min(num_rows, int64_t{a.last_rows} * a.batch.num_sequences);
  const int64_t row_tiles = std::min<int64_t>(num_rows, num_rows / kTileRows + int64_t{a.batch.num_sequences});
  const int64_t tiles = row_tiles * a.heads.num_qo_heads;
  return tiles < (1 << 30) ? static_cast<int32_t>(tiles) : 0;
}

#ifdef __CUDACC__

struct Tile {
  int32_t sequence;
  int32_t row;       // first row
  int32_t num_rows;  // 1..kTileRows
  int32_t kv_head;
  int32_t qo_head;
};

__device__ inline int WarpSum(int x) { return __reduce_add_sync(0xffffffffu, x); }

// The rows that a launch computes, as a warp looks them up: lane i keeps those of sequence i, so that a batch of up to
// 32 sequences is read once, at the start.
class SequenceRows {
 public:
  // All 32 lanes, as every function.
  __device__ SequenceRows(const RowRanges& rows, int num_sequences) : rows_(rows), num_sequences_(num_sequences) {
    const int lane = threadIdx.x % 32;
    if (lane < num_sequences) {
      begin_ = rows.begin(lane);
      end_ = rows.end(lane);
    }
  }

  // False when t is past the last tile.
  __device__ bool FindTile(const Schedule& schedule, int group, int32_t t, Tile* tile) const;

  // The entry of an array over sequences. of_lane: the array's entry of the lane's sequence, where there is one.
  template <typename T>
  static __device__ T Of(int sequence, const T* array, T of_lane) {
    return sequence < 32 ? __shfl_sync(0xffffffffu, of_lane, sequence) : array[sequence];
  }

 private:
  static __device__ int Tiles(int num_rows) { return (num_rows + kTileRows - 1) / kTileRows; }
  // Row tiles of a sequence that is this lane's: s % 32 is the lane.
  __device__ int TilesOfLane(int s) const {
    if (s >= num_sequences_) return 0;
    return Tiles(s < 32 ? end_ - begin_ : rows_.end(s) - rows_.begin(s));
  }
  // Number of row tiles with rank (distance from the sequence's last tile) below `rank`.
  __device__ int TilesBelowRank(int rank) const {
    int n = 0;
    for (int s = threadIdx.x % 32; s < num_sequences_; s += 32) n += min(TilesOfLane(s), rank);
    return WarpSum(n);
  }

  const RowRanges& rows_;
  const int num_sequences_;
  int32_t begin_ = 0, end_ = 0;
};

__device__ inline bool SequenceRows::FindTile(const Schedule& schedule, int group, int32_t t, Tile* tile) const {
  const int row_tiles = TilesBelowRank(1 << 30);
  if (t >= row_tiles * schedule.num_heads * group) return false;
  const int32_t full = row_tiles * schedule.num_full * group;
  int first = 0, n = 0;  // heads of the section in schedule.kv_head
  if (t < full) {
    const int32_t per_section = row_tiles * schedule.section * group;
    const int section = t / per_section;
    t -= section * per_section;
    first = section * schedule.section;
    n = min(schedule.section, schedule.num_full - first);
  } else {
    t -= full;
    first = schedule.num_full;
    n = schedule.num_heads - schedule.num_full;
  }
  const int head = t % (n * group);
  int index = t / (n * group);  // index of the row tile; long ones come first
  tile->kv_head = schedule.kv_head[first + head / group];
  tile->qo_head = tile->kv_head * group + head % group;
  // The rank of tile `index`: the largest r with TilesBelowRank(r) <= index.
  int rank = index;
  if (num_sequences_ > 1) {
    int low = 0, high = index + 1;  // TilesBelowRank(low) <= index < TilesBelowRank(high) once high is past the rank
    while (high - low > 1) {
      const int mid = (low + high) / 2;
      if (TilesBelowRank(mid) <= index) {
        low = mid;
      } else {
        high = mid;
      }
    }
    rank = low;
    index -= TilesBelowRank(rank);
  } else {
    index = 0;
  }
  // The index-th sequence that has a tile of this rank.
  int sequence = 0;
  for (int base = 0; base < num_sequences_; base += 32) {
    unsigned has = __ballot_sync(0xffffffffu, TilesOfLane(base + threadIdx.x % 32) > rank);
    const int count = __popc(has);
    if (index < count) {
      for (; index > 0; --index) has &= has - 1;
      sequence = base + __ffs(has) - 1;
      break;
    }
    index -= count;
  }
  const int32_t begin = sequence < 32 ? __shfl_sync(0xffffffffu, begin_, sequence) : rows_.begin(sequence);
  const int32_t end = sequence < 32 ? __shfl_sync(0xffffffffu, end_, sequence) : rows_.end(sequence);
  const int first_row = (Tiles(end - begin) - 1 - rank) * kTileRows;
  tile->sequence = sequence;
  tile->row = begin + first_row;
  tile->num_rows = min(kTileRows, end - begin - first_row);
  return true;
}

// The pages that the rows of a tile see. Rows are sorted by position; `positions` points at the tile's first.
struct TileView {
  Band band;
  const int32_t* positions;
  int32_t num_rows;
  int32_t low, high;  // positions of the first and the last row

  // Logical pages worth asking about: index i in [0, num_candidates).
  int32_t sink_pages, band_begin, num_candidates;

  __device__ TileView(Band b, const int32_t* p, int32_t n, int32_t first, int32_t last_position, int page_group)
      : band(b), positions(p), num_rows(n), low(first), high(last_position) {
    // In units of page_group pages.
    const int unit = kPageTokens * page_group;
    const int last = high / unit;
    band_begin = max(low - band.window + 1, 0) / unit;
    sink_pages = min((min(band.sinks, high + 1) + unit - 1) / unit, band_begin);
    num_candidates = sink_pages + last - band_begin + 1;
  }

  __device__ int Candidate(int i) const { return i < sink_pages ? i : band_begin + i - sink_pages; }

  // Some row sees a slot of the page.
  __device__ bool Sees(int32_t page) const {
    const int32_t begin = page * kPageTokens;
    if (begin > high) return false;
    if (begin < band.sinks) return true;
    // A row at p in [begin, begin + 63 + window - 1] does; the first row at or past `begin` is the closest.
    const int64_t end = int64_t{begin} + kPageTokens - 1 + band.window;
    if (low >= begin) return low < end;
    if (high - low == num_rows - 1) return true;  // contiguous rows: some row is at `begin`
    int a = 0, b = num_rows - 1;                  // positions[a] < begin <= positions[b]
    while (b - a > 1) {
      const int mid = (a + b) / 2;
      if (positions[mid] < begin) {
        a = mid;
      } else {
        b = mid;
      }
    }
    return positions[b] < end;
  }

  // Every row sees every slot of [begin, end): no mask needed.
  __device__ bool AllSee(int32_t begin, int32_t end) const {
    return end <= low + 1 && (end <= band.sinks || begin > high - band.window);
  }
};

#endif  // __CUDACC__

}  // namespace spl::kernels::cuda
