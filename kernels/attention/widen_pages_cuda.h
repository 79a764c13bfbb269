// Pages of a pool of kE4M3 as pages of bf16, for attention that reads bf16: bf16 holds every value exactly
// (common/e4m3_rows.h), so its results are those of the codes.
//
// Threads, errors  as in attention_cuda.h: asynchronous on `stream`, nothing is allocated, values in device memory are
// not checked.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/attention/attention_cuda.h"

namespace spl::kernels::cuda {

// The pages of one sequence that are widened: the first num_pages of each head.
struct WidenSequence {
  int64_t first_page = 0;  // the sum of num_kv_heads * num_pages over the sequences before it
  int32_t num_pages = 0;
  int32_t first_position = 0;  // that is computed; heads with a band need no page before its window
};

struct WidenArgs {
  PagedBatch batch;  // pages of kE4M3; head_dim a multiple of 16
  int32_t num_kv_heads = 0;
  HeadRules rules;
  const WidenSequence* sequences = nullptr;  // device [batch.num_sequences]
  int64_t total_pages = 0;                   // num_kv_heads * num_pages over all sequences
  void* pages = nullptr;                     // device, 16-byte aligned: total_pages pages of bf16
  int32_t* tables = nullptr;                 // device [num_sequences, num_kv_heads, table_stride]
  int64_t* table_offset = nullptr;           // device [num_sequences]
  int32_t table_stride = 0;                  // at least each num_pages
};

// Writes the pages, and tables of them in which pages that are not resident or not visible by a band are kNoPage.
// Cost: reads each page once and writes it at twice the size.
cudaError_t WidenPages(const WidenArgs& args, cudaStream_t stream);

}  // namespace spl::kernels::cuda
