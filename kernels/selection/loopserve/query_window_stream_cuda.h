// Arguments of query_window_cuda.cu, and a stream as its blocks see it. Included by that file only.
#pragma once

#include "kernels/cuda/cuda_types.h"
#include "kernels/selection/loopserve/query_window_cuda.h"

namespace spl::kernels::cuda::query_window {

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLowest = -3.0e38f;  // below every score, and finite: a difference of two of them is a number

// A stream has at most kMaxSplits splits, of whole multiples of kSplitKeys: with 8 KV heads about as many blocks as 132
// multiprocessors hold at a time.
inline constexpr int kSplitKeys = 256;
inline constexpr int kMaxSplits = 32;
inline constexpr int kThreads = 256, kWarps = kThreads / 32;
inline constexpr int kTileKeys = 32;     // keys per warp at a time: four right operands, never across two pages
inline constexpr int kChunkRows = 64;    // queries whose statistics a block keeps in registers
inline constexpr int kMaxMmaRows = 512;  // queries that fit in a block's shared memory
inline constexpr int kGenericThreads = 128;

struct Params {
  PagedBatch batch;
  SelectionBatch selection;
  const void* q;
  int64_t q_row_stride;
  int32_t* tokens;
  int32_t* counts;
  int64_t list_stride;
  float* scores;
  int64_t scores_stride;
  uint32_t* arrived;  // [max streams], zero between launches
  float* lse;         // [streams, rows], log2
  float2* parts;      // [streams, rows, kMaxSplits]: maximum (log2), sum of 2^(score - maximum)
  int64_t page_bytes;
  int32_t num_kv_heads, group, head_dim, window, rows;
  int32_t rows_per_page, query_pages, entries_per_page;  // QueryWindow
  int32_t query_bytes;                                   // bytes of a query element
  float scale;                                           // sm_scale · log2(e)
};

// One stream of the batch, as its blocks see it.
struct Stream {
  int32_t sequence, head, kv_len, budget, plan;
  StagedStep step;
  const int32_t* table;
  const int32_t* compact;
  Candidates own;

  __device__ Stream(const Params& p, int stream)
      : sequence(stream / p.num_kv_heads),
        head(stream % p.num_kv_heads),
        kv_len(p.batch.kv_len[sequence]),
        budget(min(p.selection.sequences[sequence].budget, static_cast<int32_t>(p.list_stride))),
        plan(p.selection.plan),
        step(p.selection.steps[sequence]),
        table(p.batch.page_tables + p.batch.table_offset[sequence] + head * p.batch.head_stride),
        compact(p.selection.CompactPages(sequence, head)),
        own(p.selection.CandidatesOf(sequence, head, kv_len)) {}

  // Only a step of the served plan has anything.
  __device__ bool has(int32_t flags) const { return (step.flags & (flags | plan)) == (flags | plan); }
  __device__ bool is_scored() const {
    return has(StagedStep::kRecords | StagedStep::kSelects | StagedStep::kRefresh) && own.count > budget &&
           compact[0] != kNoPage;
  }
  // Query `row` of the window; they lie in the order of their slots, not of their age.
  __device__ const std::byte* query(const Params& p, int row) const {
    return p.batch.pool.base + compact[row / p.rows_per_page] * p.page_bytes +
           static_cast<int64_t>(row % p.rows_per_page) * p.head_dim * p.query_bytes;
  }
  // Number of candidates that query `row` sees: those up to its own position; 0 if no query was recorded yet.
  __device__ int sees(const Params& p, int row) const {
    if (row >= p.rows) return 0;
    const int age = (step.compact_len % p.window - row / p.group + p.window) % p.window;
    return age <= step.compact_len ? own.count - age : 0;
  }
  __device__ int split_keys() const {
    return (own.count + kMaxSplits * kSplitKeys - 1) / (kMaxSplits * kSplitKeys) * kSplitKeys;
  }
  __device__ int num_splits() const { return (own.count + split_keys() - 1) / split_keys(); }
  // Where the row of candidate j's key is, in rows of the pool; past the last candidate that of the last one.
  __device__ int64_t KeyRow(int j) const {
    const int32_t position = own.Position(min(j, own.count - 1));
    return int64_t{table[position / kPageTokens]} * 2 * kPageTokens + position % kPageTokens;
  }
};

// Entry i of the stream's kept positions; entry 0 is their number.
__device__ __forceinline__ int32_t& Entry(const Params& p, const int32_t* compact, int32_t i) {
  return reinterpret_cast<int32_t*>(p.batch.pool.base + compact[p.query_pages + i / p.entries_per_page] *
                                                            p.page_bytes)[i % p.entries_per_page];
}

}  // namespace spl::kernels::cuda::query_window
