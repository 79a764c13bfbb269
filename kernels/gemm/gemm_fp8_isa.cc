#include "kernels/gemm/gemm_fp8_isa.h"

#include "kernels/common/simd.h"

namespace spl::kernels::cpu::SPLICE_ISA {
namespace {

constexpr int kColumns = static_cast<int>(kBf16PanelColumns);
constexpr int kStep = 2 * kLanes;  // columns at a time; two registers of sums a row
// With the two operands and a broadcast the sums fill the register file.
constexpr int kRowsAtOnce = kLanes == 16 ? 12 : 6;

template <int kRows>
void MultiplyRows(const float* x, int64_t x_stride, int64_t depth, const uint8_t* panel, float* sums) {
  for (int column = 0; column < kColumns; column += kStep) {
    const uint8_t* codes[2];
    for (int c = 0; c < 2; ++c) {
      const int at = column + c * kLanes;
      codes[c] = panel + at / 16 * kBf16TileElements + at % 16 * 2;
    }
    F total[kRows][2];
    SPLICE_UNROLL
    for (int r = 0; r < kRows; ++r) total[r][0] = total[r][1] = Zero();
    for (int64_t k = 0; k < depth; k += 2) {
      const int64_t at = k / kBf16DepthBlock * kBf16PairElements + k % kBf16DepthBlock * 16;
      F even[2], odd[2];
      SPLICE_UNROLL
      for (int c = 0; c < 2; ++c) LoadE4M3Pairs(codes[c] + at, even[c], odd[c]);
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

void Multiply(const float* x, int64_t x_stride, int64_t num_rows, int64_t depth, const uint8_t* panel, float* sums) {
  int64_t row = 0;
  const auto run = [&](auto rows_of, int rows) {
    for (; row + rows <= num_rows; row += rows)
      rows_of(x + row * x_stride, x_stride, depth, panel, sums + row * kColumns);
  };
  run(MultiplyRows<kRowsAtOnce>, kRowsAtOnce);
  run(MultiplyRows<3>, 3);
  run(MultiplyRows<1>, 1);
}

void Scale(const float* sums, int64_t num_rows, const float* scales, bool add, float* totals) {
  for (int column = 0; column < kColumns; column += kLanes) {
    const F scale = Load(scales + column);
    for (int64_t r = 0; r < num_rows; ++r) {
      const F sum = Load(sums + r * kColumns + column);
      float* to = totals + r * kColumns + column;
      Store(to, add ? Fma(sum, scale, Load(to)) : Mul(sum, scale));
    }
  }
}

void StoreTotals(const float* totals, int64_t num_rows, int64_t num_columns, const float* bias, float* y,
                 int64_t y_stride) {
  for (int64_t c = 0; c < num_columns; c += kLanes) {
    const int n = num_columns - c < kLanes ? static_cast<int>(num_columns - c) : kLanes;
    for (int64_t r = 0; r < num_rows; ++r) {
      const F total = Load(totals + r * kColumns + c);
      StorePartial(y + r * y_stride + c, bias != nullptr ? Add(total, LoadPartial(bias + c, n)) : total, n);
    }
  }
}

}  // namespace

extern const Fp8GemmKernels kFp8Gemm;
const Fp8GemmKernels kFp8Gemm = {Multiply, Scale, StoreTotals};

}  // namespace spl::kernels::cpu::SPLICE_ISA
