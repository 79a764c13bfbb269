// Tensor maps for TMA loads of matrices (host side).
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace spl::kernels::cuda {

// Finds the driver's encoder at run time, so that nothing links against the driver. Null: there is none.
inline decltype(&cuTensorMapEncodeTiled) FindEncodeTiled() {
  void* f = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found) != cudaSuccess ||
      found != cudaDriverEntryPointSuccess) {
    return nullptr;
  }
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(f);
}

// Encodes a matrix [rows][64 * blocks], whose rows are row_bytes apart, as [block][row][64] with boxes of box_rows x
// box_blocks. base and row_bytes are multiples of 16 bytes. False: the driver refuses.
inline bool EncodeBlocks(CUtensorMap* map, const void* base, uint64_t rows, uint64_t row_bytes, uint32_t blocks,
                         uint32_t box_rows, uint32_t box_blocks) {
  static const auto encode = FindEncodeTiled();
  if (encode == nullptr) return false;
  const cuuint64_t dims[3] = {64, rows, blocks};
  const cuuint64_t strides[2] = {row_bytes, 128};
  const cuuint32_t box[3] = {64, box_rows, box_blocks};
  const cuuint32_t element_strides[3] = {1, 1, 1};
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(base), dims, strides, box, element_strides,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Encodes a row-major matrix, whose rows are row_bytes apart, with boxes of box_rows x box_columns; elements outside of
// it are loaded as zeros. base and row_bytes are multiples of 16 bytes. False: the driver refuses.
inline bool EncodeMatrix(CUtensorMap* map, CUtensorMapDataType type, const void* base, uint64_t rows, uint64_t columns,
                         uint64_t row_bytes, uint32_t box_rows, uint32_t box_columns, CUtensorMapSwizzle swizzle) {
  static const auto encode = FindEncodeTiled();
  if (encode == nullptr) return false;
  const cuuint64_t dims[2] = {columns, rows};
  const cuuint64_t strides[1] = {row_bytes};
  const cuuint32_t box[2] = {box_columns, box_rows};
  const cuuint32_t element_strides[2] = {1, 1};
  return encode(map, type, 2, const_cast<void*>(base), dims, strides, box, element_strides,
                CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace spl::kernels::cuda
