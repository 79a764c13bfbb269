#include "kernels/common/e4m3_rows_isa.h"

#include "kernels/common/e4m3_rows.h"
#include "kernels/common/simd.h"

namespace spl::kernels::cpu::SPLICE_ISA {
namespace {

SPLICE_INLINE int Lanes(int32_t width, int32_t c) { return width - c < kLanes ? width - c : kLanes; }

void Quantize(const float* rows, int32_t num_rows, int32_t width, uint8_t* codes, uint8_t* scales) {
  for (int64_t r = 0; r < num_rows; ++r) {
    const float* row = rows + r * width;
    F most = Zero(), differences = Zero();
    for (int32_t c = 0; c < width; c += kLanes) {
      const F x = LoadPartial(row + c, Lanes(width, c));
      most = Max(most, Max(x, Sub(Zero(), x)));
      differences = Add(differences, Sub(x, x));  // NaN for an infinity and for NaN
    }
    const bool finite = ReduceAdd(differences) == 0;
    scales[r] = finite ? RowScaleOf(ReduceMax(most)) : kNotFiniteScale;
    const F inverse = Set1(InverseRowScale(scales[r]));
    for (int32_t c = 0; c < width; c += kLanes) {
      const int n = Lanes(width, c);
      StoreE4M3(codes + r * width + c, Mul(LoadPartial(row + c, n), inverse), n);
    }
  }
}

void Widen(const uint8_t* codes, const uint8_t* scales, int32_t num_rows, int32_t width, float* rows) {
  for (int64_t r = 0; r < num_rows; ++r) {
    const F scale = Set1(RowScaleValue(scales[r]));
    for (int32_t c = 0; c < width; c += kLanes) {
      const int n = Lanes(width, c);
      StorePartial(rows + r * width + c, Mul(LoadE4M3(codes + r * width + c, n), scale), n);
    }
  }
}

}  // namespace

extern const E4M3RowKernels kE4M3Rows;
const E4M3RowKernels kE4M3Rows = {Quantize, Widen};

}  // namespace spl::kernels::cpu::SPLICE_ISA
