// The leaf code of CPU attention, compiled once per instruction set (attention_isa.cc): raw pointers, no decisions.
#pragma once

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/common/isa_table.h"

namespace spl::kernels::cpu {

// Running softmax of several rows over the keys of one page. Scores are in units of log2: q is scaled by sm_scale ·
// log2(e).
struct PrefillPage {
  const float* q = nullptr;           // [num_rows, head_dim], scaled
  const float* keys = nullptr;        // [head_dim, 64]
  const float* values = nullptr;      // [64, value_stride]
  const uint64_t* visible = nullptr;  // [num_rows]: bit j is slot j; not 0
  float* max = nullptr;               // [num_rows], starts at -infinity
  float* sum = nullptr;               // [num_rows], starts at 0
  float* out = nullptr;               // [num_rows, value_stride], starts at 0; relative to 2^max
  const void* next_page = nullptr;    // the next page, for prefetch: [page_bytes]; or null
  int64_t page_bytes = 0;
  int32_t num_rows = 0;
  int32_t head_dim = 0;
  int32_t value_stride = 0;  // head_dim rounded up to whole vectors
};

// The same for the query heads that share one KV head. All of them see the same keys, at most 64: slots of a page, or
// entries of a list. q and out are padded with zeros to padded_dim, a whole number of blocks of 2 · lanes. For pages of
// bf16 and of kE4M3 a block holds its even dimensions, then its odd ones: a register of 32-bit words then widens with
// one shift and one mask, one of pairs of codes with a shift.
struct DecodePage {
  const void* keys = nullptr;     // row i of the keys, [head_dim] of dtype, starts rows[i] bytes after this
  const void* values = nullptr;   // the same for the values
  const int64_t* rows = nullptr;  // [num_slots]
  // kE4M3: what the codes of a row are multiplied with, [64]. A scale is a power of two, so scores and weights are
  // scaled instead of elements, and the result is that of pages widened to bf16.
  const float* key_scales = nullptr;
  const float* value_scales = nullptr;
  // The rows that come next, for prefetch. next_rows null: 64 consecutive rows. next_keys null: none.
  const void* next_keys = nullptr;
  const void* next_values = nullptr;
  const int64_t* next_rows = nullptr;  // [num_next]
  int32_t num_next = 0;
  const float* q = nullptr;  // [num_heads, padded_dim], scaled
  float* scores = nullptr;   // [min(num_heads, 64), 64]: scratch
  float* max = nullptr;      // [num_heads]
  float* sum = nullptr;      // [num_heads]
  float* out = nullptr;      // [num_heads, padded_dim]
  DType dtype = DType::kBF16;
  int32_t num_slots = 0;  // 1..64
  int32_t num_heads = 0;
  int32_t head_dim = 0;
  int32_t padded_dim = 0;
};

struct AttentionKernels {
  int32_t lanes;
  // keys, half a page of dtype of which num_tokens rows are read, to out [head_dim, 64]; values to out [64, stride];
  // zeros past num_tokens.
  void (*transpose_keys)(const void* keys, DType dtype, int32_t head_dim, int32_t num_tokens, float* out);
  void (*widen_values)(const void* values, DType dtype, int32_t head_dim, int32_t num_tokens, int32_t stride,
                       float* out);
  void (*prefill_page)(const PrefillPage& page);
  void (*decode_page)(const DecodePage& page);
};

SPLICE_DECLARE_ISA_TABLES(AttentionKernels, kAttention)

}  // namespace spl::kernels::cpu
