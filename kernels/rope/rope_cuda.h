// Rotary embedding and page write on a device; the contract is rope.h's.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/rope/rope.h"

namespace spl::kernels::cuda {

// Positions and page tables of the rows of a pass, in device memory; see PagedBatch in attention_cuda.h.
struct RopeBatch {
  const int32_t* positions = nullptr;     // [num_rows]
  const int32_t* angles = nullptr;        // [num_rows], or null: as positions; see RopeSequence
  const int32_t* row_sequence = nullptr;  // [num_rows]
  const int32_t* page_tables = nullptr;   // the caller has added the layer's offset
  const int64_t* table_offset = nullptr;  // [num_sequences]
  int64_t head_stride = 0;
  int32_t num_rows = 0;
};

// Asynchronous on `stream`. Reads `batch` instead of args.sequences and does not check device memory: a row on a
// kNoPage page writes nothing. qkv is f32 or bf16, pages are f32, bf16 or e4m3; cudaErrorNotSupported otherwise. qkv,
// q_out, the tables of angles and the weights of the norm are 16-byte aligned. Cost: qkv is read once, and from 512
// rows on what is read and written moves at more than 3 TB/s on an H200.
cudaError_t RopeWriteKv(const RopeWriteKvArgs& args, const RopeBatch& batch, cudaStream_t stream);

}  // namespace spl::kernels::cuda
