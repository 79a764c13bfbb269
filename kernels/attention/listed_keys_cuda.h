// Two kernels for attention over lists of positions on a CUDA device (listed_keys.h): one gathers K and V, the other
// writes the results of rows that see nothing.
//
// Threads, errors  as in attention_cuda.h: asynchronous on `stream`, nothing is allocated, values in device memory are
// not checked.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/attention/attention_cuda.h"

namespace spl::kernels::cuda {

// KV heads of a launch, by value.
struct HeadList {
  uint8_t head[kMaxKvHeads];
  int32_t count = 0;
};

struct GatherListedArgs {
  PagedBatch batch;  // one sequence; page_tables with the layer's offset
  HeadList heads;
  const int32_t* list = nullptr;  // device [count]: positions below kv_len on resident pages
  int32_t count = 0;
  int32_t num_pages = 0;  // per head; 64 num_pages >= count
  void* pages = nullptr;  // device, 16-byte aligned: [heads.count, num_pages] pages as those of the pool
};

// Entry i of the list of head heads.head[n] becomes slot i % 64 of page n num_pages + i / 64. Slots after the last
// entry become zeros. Copies bits. Cost: reads 2 count rows per head, writes the pages once.
cudaError_t GatherListed(const GatherListedArgs& args, cudaStream_t stream);

// Writes zeros to out, and -infinity to lse unless it is null, for rows [first_row, end_row) of these heads.
struct EmptyRowsArgs {
  AttentionHeads shape;
  HeadList heads;
  DType dtype = DType::kBF16;  // type of out
  void* out = nullptr;         // [rows, num_qo_heads * head_dim]
  float* lse = nullptr;        // [rows, num_qo_heads] or null
  int32_t first_row = 0, end_row = 0;
};
cudaError_t WriteEmptyRows(const EmptyRowsArgs& args, cudaStream_t stream);

}  // namespace spl::kernels::cuda
