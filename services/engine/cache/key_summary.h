// What a decode worker knows of keys that it does not have: enough to tell, for certain, that a head looks at them
// (docs/methods/redknot.md, "Restore", restoring while decoding, which gives no rule; what stands here is our
// definition).
//
// Summary of a page of 64 keys: the key k* farthest from the mean of all of them (ties to the first), and the mean m of
// the other 63. In the pool's type that is 1/32 of the bytes of K.
//
//   L_h = Σ over the pages of  exp(s <q_h, k*>) + 63 exp(s (<q_h, m> - ε Σ_c |q_h,c m_c|))      s: sm_scale
//
// By Jensen's inequality 63 exp(s <q, m>) is at most the sum of exp(s <q, k>) over these keys, with the mean as it was
// before it was rounded; ε covers the rounding (2^-8 in bf16, 2^-20 in f32). So L is never above the sum over the keys
// themselves, and with lse_seen, the log-sum-exp of what the head sees,
//
//   e-_h = L_h / (L_h + exp(lse_seen,h))   is at most   e_h, the share of the attention that lies outside (2.6).
//
// A head that is restored for e- above a threshold would be restored for e, too. The other way round it may be missed:
// when several keys of one page hold the mass, their mean may say nothing of them. One key apart from each page is what
// finds a single fact. Quest's bounds (min and max of each dimension, as many bytes) would miss none, but are above
// every threshold for almost every head: they can rank pages, not judge a share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/common/dtype.h"
#include "services/engine/cache/page_pool.h"

namespace spl::engine {

// Of pages [first_page, first_page + num_pages) of one head stream, all of them full.
struct KeySummary {
  int32_t stream = 0;  // layer * num_kv_heads + head
  int32_t first_page = 0;
  int32_t num_pages = 0;
  std::vector<std::byte> keys;  // [num_pages][k*, m][head_dim], of the pool's type
};

// Bytes of KeySummary::keys.
size_t KeySummaryBytes(int32_t num_pages, int32_t head_dim, kernels::DType dtype);

// Reads the pages' keys; nobody writes them meanwhile. REQUIRES: a pool in host memory. Cost: one read of the keys,
// twice through the cache.
KeySummary SummarizeKeys(const PagePool& pool, int32_t stream, int32_t first_page, std::span<const int32_t> pages);

// ln L of a query, -infinity without pages. `q` is [head_dim], rotated as the keys are.
double LogMassBelow(const KeySummary& summary, kernels::DType dtype, std::span<const float> q, float sm_scale);

// L / (L + exp(lse_seen)); 1 where the head sees nothing of its own (-infinity).
float ShareOutside(double log_mass, float lse_seen);

}  // namespace spl::engine
