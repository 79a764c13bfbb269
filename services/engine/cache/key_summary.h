// Summaries of keys that a decode worker does not have. They suffice to prove that a head attends to these keys
// (docs/methods/redknot.md, "Restore"). RedKnot gives no rule for restoring while decoding: this definition is ours.
//
// The summary of a page of 64 keys is the key k* that is farthest from the mean of all (ties to the first), and the
// mean m of the other 63. Stored in the pool's type, it has 1/32 of the bytes of K; in a pool of kE4M3 it is bf16.
//
//   L_h = Σ over the pages of  exp(s <q_h, k*>) + 63 exp(s (<q_h, m> - ε Σ_c |q_h,c m_c|))      s: sm_scale
//
// By Jensen's inequality, 63 exp(s <q, m>) is at most the sum of exp(s <q, k>) over these keys if m is not rounded; ε
// covers the rounding (2^-8 in bf16, 2^-20 in f32). L is therefore never above the sum over the keys themselves. With
// lse_seen, the log-sum-exp over the tokens that the head sees,
//
//   e-_h = L_h / (L_h + exp(lse_seen,h))   is at most   e_h, the share of the attention that lies outside (2.6).
//
// If e- is above a threshold, e is above it, too: no head is restored without need. A head may be missed, however: if
// several keys of one page hold the mass, their mean may hide them. Keeping one key of each page apart finds a single
// fact. Quest's bounds (min and max of each dimension, as many bytes) would miss no head, but exceed every threshold
// for almost every head: they can rank pages, but not measure a share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/common/dtype.h"
#include "services/engine/cache/page_pool.h"

namespace spl::engine {

// Summaries of pages [first_page, first_page + num_pages) of one head stream, all full.
struct KeySummary {
  int32_t stream = 0;  // layer * num_kv_heads + head
  int32_t first_page = 0;
  int32_t num_pages = 0;
  std::vector<std::byte> keys;  // [num_pages][k*, m][head_dim], in the DerivedKeyType of the pool's type
};

// Size of KeySummary::keys in bytes. `dtype`: the pool's, here and below.
size_t KeySummaryBytes(int32_t num_pages, int32_t head_dim, kernels::DType dtype);

// Summarizes these pages. REQUIRES: the pool is in host memory, and the pages are not written meanwhile. Cost: reads
// the keys once from memory and a second time from the CPU's cache.
KeySummary SummarizeKeys(const PagePool& pool, int32_t stream, int32_t first_page, std::span<const int32_t> pages);

// ln L of a query. `q`: [head_dim], rotated like the keys. -infinity: there are no pages.
double LogMassBelow(const KeySummary& summary, kernels::DType dtype, std::span<const float> q, float sm_scale);

// e- = L / (L + exp(lse_seen)), for log_mass = ln L. lse_seen -infinity (the head sees nothing): 1.
float ShareOutside(double log_mass, float lse_seen);

}  // namespace spl::engine
