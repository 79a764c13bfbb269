// How the products on x86 ask for lines of a weight before they need them.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace spl::kernels::cpu {
namespace {

// How far ahead of its use a line is asked for when a panel comes from memory. Lines are asked for one by one, beside
// the products, and into the second-level cache: requests for the first level wait for its few buffers and hold up the
// products behind them (docs/results/2026-11-26-cpu-decoding.md).
constexpr int64_t kAhead = 6 << 10;

inline void AskAhead(const void* words) { _mm_prefetch(static_cast<const char*>(words) + kAhead, _MM_HINT_T1); }

}  // namespace
}  // namespace spl::kernels::cpu
