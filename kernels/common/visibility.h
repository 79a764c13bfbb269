// What a row of one KV head may attend to. Every prefill and decode method is data in these structs; kernels never see
// a dense mask. (RedKnot 3.2, LoopServe 3.2, SamKV 3.1, SparCas 3: algorithms.md section 8, "two attention contracts".)
#pragma once

#include <cstdint>
#include <span>

namespace spl::kernels {

enum class VisibilityRule : uint8_t {
  kFull,    // positions [0, pos]
  kBand,    // positions [0, num_sinks) ∪ [pos - window + 1, pos]
  kBlocks,  // positions of the 64-token tiles listed in `indices`, and <= pos
  kList,    // positions listed in `indices`, and <= pos
  // Decode only: the positions that the call's lists hold for the stream (TokenLists), and <= pos. What is known to the
  // device alone is `kSelected`, what the caller has at hand `kList`.
  kSelected,
};

// Causality is by original position in every rule: a row at position p never sees a position above p.
struct HeadVisibility {
  VisibilityRule rule = VisibilityRule::kFull;
  int32_t num_sinks = 0;                  // kBand; >= 0
  int32_t window = 0;                     // kBand; >= 1, counts the row itself
  std::span<const int32_t> indices = {};  // kBlocks, kList: sorted ascending, no duplicates; borrowed for the call
};

}  // namespace spl::kernels
