// One task per stream for the choice: tiles are unpacked into a few KiB of floats, which the leaf code of SelectTokens
// scores. The attention is DecodeAttention's.
#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/common/parallel.h"
#include "kernels/common/scratch.h"
#include "kernels/selection/sparcas/packed_stream.h"
#include "kernels/selection/sparcas/select_tokens_isa.h"
#include "kernels/selection/sparcas/sparse_attention.h"
#include "kernels/selection/token_choice.h"

namespace spl::kernels::cpu {
namespace {

constexpr float kLog2E = 1.4426950408889634f;

// w [64 tiles], in the scratch of this thread.
const float* Weights(const PackedStream& x, const SelectTokensKernels& kernels, const int32_t* dims) {
  thread_local Scratch scratch;
  thread_local UnpackedTile tile;
  const int64_t num_tiles = x.num_tiles(), stride = num_tiles * kPageTokens, group = x.group();
  float* scores = scratch.Floats(static_cast<size_t>(group * (stride + kPackedDims + 1)));
  float* factors_of_tile = scores + group * stride;
  float* factors = factors_of_tile + group * kPackedDims;
  for (int32_t h = 0; h < group; ++h) factors[h] = x.LargestQuery(h, dims);
  for (int32_t t = 0; t < num_tiles; ++t) {
    x.Unpack(t, tile);
    for (int32_t h = 0; h < group; ++h) {
      float* of_head = factors_of_tile + h * kPackedDims;
      x.Factors(h, dims, tile, factors[h], of_head);
      for (int32_t d = 0; d < kPackedDims; ++d) of_head[d] *= x.a.shape.sm_scale * kLog2E;
    }
    kernels.score_tiles({.keys = tile.levels.data(),
                         .q = factors_of_tile,
                         .scores = scores + int64_t{t} * kPageTokens,
                         .score_stride = stride,
                         .dtype = DType::kF32,
                         .num_tiles = 1,
                         .num_heads = static_cast<int32_t>(group),
                         .num_dims = kPackedDims});
  }
  for (int64_t h = 0; h < group; ++h) {
    float* of_head = scores + h * stride;
    std::fill(of_head + x.choosable(), of_head + stride, -std::numeric_limits<float>::infinity());
    factors[h] = 1.0f / kernels.exp_sum(of_head, num_tiles);
  }
  kernels.add_heads(scores, stride, factors, static_cast<int32_t>(group), num_tiles, scores);
  return scores;
}

void Choose(const PackedStream& x, const SelectTokensKernels& kernels, int32_t* tokens, int32_t* count,
            float* weights) {
  const SelectingSequence& s = x.s;
  const int32_t* dims = x.Update();
  *count = std::min(s.kv_len, s.budget);
  if (s.kv_len <= s.budget) return std::iota(tokens, tokens + s.kv_len, 0);
  const float* w = Weights(x, kernels, dims);
  if (weights != nullptr && s.budget > s.recent) std::copy_n(w, x.choosable(), weights);
  thread_local std::vector<uint32_t> bits;
  bits.assign(static_cast<size_t>(s.kv_len), 0);
  std::transform(w, w + x.choosable(), bits.begin(), WeightBits);
  ChooseLargest(bits, s.budget, s.recent, tokens);
}

}  // namespace

absl::Status SparseAttention(const KernelContext& ctx, const SparseAttentionArgs& a) {
  const SelectTokensKernels& kernels = SelectTokensKernelsFor(ctx.isa);
  thread_local std::vector<HeadStreamView> streams;
  return AttendChosen(
      a, streams,
      [&](int64_t num_streams, const auto& run) {
        ParallelTasks(ctx, num_streams, [&](int64_t stream) {
          run(stream, [&](const PackedStream& x, int32_t* tokens, int32_t* count, float* weights) {
            Choose(x, kernels, tokens, count, weights);
          });
        });
      },
      [&](const DecodeAttentionArgs& attention) { return DecodeAttention(ctx, attention); });
}

}  // namespace spl::kernels::cpu
