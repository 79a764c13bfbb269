#include "kernels/gemm/gemm_int4_isa.h"

#include "kernels/common/simd.h"

namespace spl::kernels::cpu::SPLICE_ISA {
namespace {

constexpr int kColumns = static_cast<int>(kBf16PanelColumns);
constexpr int kStep = 2 * kLanes;  // columns at a time; two registers of sums a row
// With the operands, the zero points and a broadcast the sums fill the register file.
constexpr int kRowsAtOnce = kLanes == 16 ? 12 : 5;

template <int kRows>
void MultiplyRows(const float* x, int64_t x_stride, int64_t depth, const uint8_t* panel, const float* zeros,
                  float* sums) {
  for (int column = 0; column < kColumns; column += kStep) {
    const uint8_t* codes[2];
    int shift[2];
    F zero[2], total[kRows][2];
    for (int c = 0; c < 2; ++c) {
      const int at = column + c * kLanes;
      codes[c] = panel + at % 16 * 2;
      shift[c] = at / 16 * 4;
      zero[c] = Load(zeros + at);
    }
    SPLICE_UNROLL
    for (int r = 0; r < kRows; ++r) total[r][0] = total[r][1] = Zero();
    for (int64_t k = 0; k < depth; k += 2) {
      F even[2], odd[2];
      SPLICE_UNROLL
      for (int c = 0; c < 2; ++c) {
        LoadInt4Pairs(codes[c] + k / 2 * 32, shift[c], even[c], odd[c]);
        even[c] = Sub(even[c], zero[c]);
        odd[c] = Sub(odd[c], zero[c]);
      }
      SPLICE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const F factor = Set1(x[r * x_stride + k]);
        SPLICE_UNROLL
        for (int c = 0; c < 2; ++c) total[r][c] = Fma(factor, even[c], total[r][c]);
      }
      if (k + 1 == depth) break;
      SPLICE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const F factor = Set1(x[r * x_stride + k + 1]);
        SPLICE_UNROLL
        for (int c = 0; c < 2; ++c) total[r][c] = Fma(factor, odd[c], total[r][c]);
      }
    }
    SPLICE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      SPLICE_UNROLL
      for (int c = 0; c < 2; ++c) Store(sums + r * kColumns + column + c * kLanes, total[r][c]);
    }
  }
}

void Multiply(const float* x, int64_t x_stride, int64_t num_rows, int64_t depth, const uint8_t* panel,
              const uint8_t* offsets, float* sums) {
  float zeros[kColumns];
  for (int c = 0; c < kColumns; ++c) zeros[c] = static_cast<float>(16 - offsets[c]);
  int64_t row = 0;
  const auto run = [&](auto rows_of, int rows) {
    for (; row + rows <= num_rows; row += rows)
      rows_of(x + row * x_stride, x_stride, depth, panel, zeros, sums + row * kColumns);
  };
  run(MultiplyRows<kRowsAtOnce>, kRowsAtOnce);
  run(MultiplyRows<3>, 3);
  run(MultiplyRows<1>, 1);
}

}  // namespace

extern const Int4GemmKernels kInt4Gemm;
const Int4GemmKernels kInt4Gemm = {Multiply};

}  // namespace spl::kernels::cpu::SPLICE_ISA
