// The leaf code of rows in e4m3 on the CPU, compiled once per instruction set (e4m3_rows_isa.cc): e4m3_rows.h's
// functions for several rows, bit for bit.
#pragma once

#include <cstdint>

#include "kernels/common/isa_table.h"

namespace spl::kernels::cpu {

struct E4M3RowKernels {
  // rows [num_rows, width] to codes [num_rows, width] and scales [num_rows].
  void (*quantize)(const float* rows, int32_t num_rows, int32_t width, uint8_t* codes, uint8_t* scales);
  // The other way.
  void (*widen)(const uint8_t* codes, const uint8_t* scales, int32_t num_rows, int32_t width, float* rows);
};

SPLICE_DECLARE_ISA_TABLES(E4M3RowKernels, kE4M3Rows)

}  // namespace spl::kernels::cpu
