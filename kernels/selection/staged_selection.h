// SequenceSelection (token_selection.h) as kernels read it: staged by the session, at the same addresses in every step.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/hot_rows.h"
#include "kernels/common/kv_pool.h"

namespace spl::kernels::cuda {

struct StagedSequence {
  int32_t* dims = nullptr;     // [num_layers, num_kv_heads, 2, num_dims]
  int64_t compact_offset = 0;  // offset of its tables in compact_tables
  int32_t budget = 0;
  int32_t recent = 0;
  int32_t list_begin = 0;
  int32_t list_pages = 0;
  int32_t first_fresh = 0;
  HotRows hot;
};

// LayerSelection as bits. kParity holds parity; one bit from kPlan0 on names the plan.
struct StagedStep {
  static constexpr int32_t kSelects = 1, kRefresh = 2, kFirst = 4, kParity = 8, kRecords = 16, kListed = 32;
  static constexpr int32_t kPlan0 = 1 << 8;
  static constexpr int32_t PlanBit(int32_t plan) { return kPlan0 << plan; }
  int32_t flags = 0;
  int32_t compact_len = 0;
  int32_t num_sinks = 0;
  int32_t window = 0;
};

// The candidates of a stream (candidates.h). If the stream holds everything, candidate i is position i.
struct Candidates {
  const std::byte* pool = nullptr;
  const int32_t* pages = nullptr;  // pages with the list; null: every position is a candidate
  int64_t page_bytes = 0;
  int32_t num_listed = 0;
  int32_t first_fresh = 0;
  int32_t count = 0;

#ifdef __CUDACC__
  __device__ int32_t Position(int32_t i) const {
    return i < num_listed ? Entry(i + 1) : first_fresh + (i - num_listed);
  }
  __device__ int32_t Entry(int32_t i) const {
    const auto per_page = static_cast<uint32_t>(page_bytes / 4), at = static_cast<uint32_t>(i);
    return reinterpret_cast<const int32_t*>(pool + pages[at / per_page] * page_bytes)[at % per_page];
  }
#endif
};

// One layer of a staged batch whose sequences choose tokens.
struct SelectionBatch {
  const StagedSequence* sequences = nullptr;  // device [num_sequences]
  const StagedStep* steps = nullptr;          // device [num_sequences], for this layer
  const int32_t* compact_tables = nullptr;    // device; the caller has added the layer's offset
  int64_t compact_head_stride = 0;            // elements between the tables of two KV heads
  int32_t flags = StagedStep::kSelects;       // flags that the step of a sequence must have for Selects
  int32_t plan = 0;                           // StagedStep::PlanBit of the sequences to serve; 0: all
  const std::byte* pool = nullptr;            // page 0, from which lists are read; unused without lists
  int64_t page_bytes = 0;

#ifdef __CUDACC__
  // True if the stream chooses in this step; a head without compact pages never does.
  __device__ bool Selects(int32_t sequence, int32_t kv_head) const {
    if (!Has(sequence, flags)) return false;
    return compact_tables == nullptr ||
           compact_tables[sequences[sequence].compact_offset + kv_head * compact_head_stride] != kNoPage;
  }
  __device__ bool Has(int32_t sequence, int32_t wanted) const {
    return (steps[sequence].flags & (wanted | plan)) == (wanted | plan);
  }
  // Pages of the stream, from list_begin on: those of its list, then those that operations keep.
  __device__ const int32_t* ListPages(int32_t sequence, int32_t kv_head) const {
    return compact_tables + sequences[sequence].compact_offset + kv_head * compact_head_stride +
           sequences[sequence].list_begin;
  }
  __device__ const int32_t* CompactPages(int32_t sequence, int32_t kv_head) const {
    return ListPages(sequence, kv_head) + sequences[sequence].list_pages;
  }
  __device__ bool Listed(int32_t sequence) const { return (steps[sequence].flags & StagedStep::kListed) != 0; }
  // Lists were written before the first step, so they may be read while the previous kernel still runs; except by
  // SelectTokens behind an outer choice, which wrote them.
  __device__ Candidates CandidatesOf(int32_t sequence, int32_t kv_head, int32_t kv_len) const {
    if (!Listed(sequence)) return {.count = kv_len};
    Candidates own{.pool = pool,
                   .pages = ListPages(sequence, kv_head),
                   .page_bytes = page_bytes,
                   .first_fresh = sequences[sequence].first_fresh};
    own.num_listed = own.Entry(0);
    own.count = own.num_listed + (kv_len - own.first_fresh);
    return own;
  }
#endif
};

}  // namespace spl::kernels::cuda
