// Products of rows with one panel by VDPBF16PS, for panels of bf16 and of codes that are widened in registers. For the
// files that are compiled with AVX-512 and its BF16 extension.
#pragma once

#include <immintrin.h>

#include <array>
#include <utility>

#include "kernels/gemm/gemm_ask_ahead.h"
#include "kernels/gemm/gemm_bf16_isa.h"

namespace spl::kernels::cpu {
namespace {

constexpr int kPairs = static_cast<int>(kBf16DepthBlock / 2);

// kRows rows from `row` on: sums[r] = x[r] · panel, added to what is there if `add`. x: packed rows
// (gemm_bf16_isa.h); sums: [32 rows][32 columns] of each panel, 64-byte aligned.
//
// Words gives one panel or neighbouring ones: kTiles is 2 for each panel, get(block, pair, w) sets the words of all
// tiles, and ask(block, pair) asks for what the same call will read kAhead later.
template <int kRows, bool kFromMemory, typename Words>
void MultiplyRows(const bf16* x, int64_t row, int64_t depth_blocks, const Words& words, bool add, float* sums) {
  constexpr int kTiles = Words::kTiles;
  const int32_t* rows[kRows];
  for (int r = 0; r < kRows; ++r) rows[r] = reinterpret_cast<const int32_t*>(x) + (row + r) * kPairs;
  const auto sums_of = [&](int r, int t) {
    return sums + t / 2 * kBf16SumsOfPanel + (row + r) * kBf16PanelColumns + t % 2 * 16;
  };
  __m512 c[kRows][kTiles];
#pragma GCC unroll 14
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; ++t) c[r][t] = add ? _mm512_load_ps(sums_of(r, t)) : _mm512_setzero_ps();
  }
  for (int64_t block = 0; block < depth_blocks; ++block) {
#pragma GCC unroll 16
    for (int pair = 0; pair < kPairs; ++pair) {
      if (kFromMemory) words.ask(block, pair);
      __m512i w[kTiles];
      words.get(block, pair, w);
#pragma GCC unroll 14
      for (int r = 0; r < kRows; ++r) {
        const auto xr = reinterpret_cast<__m512bh>(_mm512_set1_epi32(rows[r][block * (kBf16PairElements / 2) + pair]));
#pragma GCC unroll 4
        for (int t = 0; t < kTiles; ++t) c[r][t] = _mm512_dpbf16_ps(c[r][t], xr, reinterpret_cast<__m512bh>(w[t]));
      }
    }
  }
#pragma GCC unroll 14
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; ++t) _mm512_store_ps(sums_of(r, t), c[r][t]);
  }
}

// All rows of a block (up to kBf16RowBlock) in as few passes over the panel as kMostRows allows, of nearly equal size.
// The first pass brings the panel in, if it is `from_memory`; the others find it in a cache.
template <int kMostRows, typename Words>
void MultiplyInPasses(const bf16* x, int64_t num_rows, int64_t depth_blocks, const Words& words, bool from_memory,
                      bool add, float* sums) {
  using Multiply = void (*)(const bf16*, int64_t, int64_t, const Words&, bool, float*);
  // [from memory][number of rows - 1]
  static constexpr auto kByRows = []<size_t... kIndex>(std::index_sequence<kIndex...>) {
    return std::array<std::array<Multiply, kMostRows>, 2>{
        {{MultiplyRows<static_cast<int>(kIndex) + 1, false, Words>...},
         {MultiplyRows<static_cast<int>(kIndex) + 1, true, Words>...}}};
  }
  (std::make_index_sequence<kMostRows>());
  const int64_t passes = (num_rows + kMostRows - 1) / kMostRows;
  for (int64_t pass = 0, row = 0; pass < passes; ++pass) {
    const int64_t end = num_rows * (pass + 1) / passes;
    kByRows[from_memory && pass == 0][end - row - 1](x, row, depth_blocks, words, add, sums);
    row = end;
  }
}

}  // namespace
}  // namespace spl::kernels::cpu
