// Products with int4 weights by VDPBF16PS: a code less its zero point is exact in bf16. Compiled with AVX-512 and its
// BF16 extension; leaf code on raw pointers only (see common/simd.h).
#include <immintrin.h>

#include "kernels/gemm/gemm_bf16_passes_avx512.h"
#include "kernels/gemm/gemm_int4_isa.h"

namespace spl::kernels::cpu::avx512_bf16 {
namespace {

// -16 to 15 in bf16.
alignas(64) constexpr uint16_t kValues[32] = {0xc180, 0xc170, 0xc160, 0xc150, 0xc140, 0xc130, 0xc120, 0xc110,
                                              0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                              0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                              0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};

// Widens depth pairs of one scale group.
class Widener {
 public:
  // offsets: [32]; each stands twice, as its column's two depths do.
  explicit Widener(const uint8_t* offsets) : values_(_mm512_load_si512(kValues)) {
    const auto twice = [](const uint8_t* of_columns) {
      const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(of_columns));
      return _mm256_set_m128i(_mm_unpackhi_epi8(v, v), _mm_unpacklo_epi8(v, v));
    };
    first_ = twice(offsets);
    second_ = twice(offsets + 16);
  }

  // The 32 bytes of a depth pair as the words of the two tiles.
  void Pair(const uint8_t* codes, __m512i& w0, __m512i& w1) const {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    const __m256i mask = _mm256_set1_epi8(15);
    w0 = Values(_mm256_add_epi8(_mm256_and_si256(bytes, mask), first_));
    w1 = Values(_mm256_add_epi8(_mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask), second_));
  }

 private:
  __m512i Values(__m256i at) const { return _mm512_permutexvar_epi16(_mm512_cvtepu8_epi16(at), values_); }

  __m512i values_;
  __m256i first_, second_;
};

void Widen(const uint8_t* panel, const uint8_t* offsets, int64_t depth_blocks, bf16* out) {
  const Widener widener(offsets);
  for (int64_t block = 0; block < depth_blocks; ++block) {
    const uint8_t* codes = panel + block * kInt4BlockBytes;
    bf16* to = out + block * kBf16PairElements;
    for (int pair = 0; pair < kPairs; ++pair) {
      __m512i w0, w1;
      widener.Pair(codes + pair * 32, w0, w1);
      _mm512_store_si512(to + pair * 32, w0);
      _mm512_store_si512(to + kBf16TileElements + pair * 32, w1);
    }
  }
}

// 12 rows are 24 sums; two operands, a broadcast and the constants of Widener take the rest of the 32 registers.
constexpr int kMostRows = 12;

struct Panel {
  static constexpr int kTiles = 2;

  const uint8_t* codes;
  Widener widener;

  const uint8_t* at(int64_t block, int pair) const { return codes + block * kInt4BlockBytes + pair * 32; }
  void ask(int64_t block, int pair) const {  // two pairs are a line
    if (pair % 2 == 0) AskAhead(at(block, pair));
  }
  void get(int64_t block, int pair, __m512i (&w)[kTiles]) const { widener.Pair(at(block, pair), w[0], w[1]); }
};

void Multiply(const Int4Block& b) {
  MultiplyInPasses<kMostRows>(b.x, b.num_rows, b.depth_blocks, Panel{b.panel, Widener(b.offsets)}, true, false, b.sums);
}

}  // namespace

extern const Int4Bf16Kernels kInt4Bf16Gemm;
const Int4Bf16Kernels kInt4Bf16Gemm = {Widen, Multiply};

}  // namespace spl::kernels::cpu::avx512_bf16
