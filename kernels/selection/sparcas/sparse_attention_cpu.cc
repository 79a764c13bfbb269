// One task per stream for the choice: tiles are unpacked into a few KiB of floats, which the leaf code of SelectTokens
// scores. The attention is DecodeAttention's.
#include <algorithm>
#include <cmath>
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
constexpr double kLn2 = 0.6931471805599453;

// w [64 tiles], in the scratch of this thread. log_sums [group]: ln Z_h of sparse_attention.h; empty: nobody asks.
const float* Weights(const PackedStream& x, const SelectTokensKernels& kernels, const int32_t* dims,
                     std::span<double> log_sums, std::vector<float>& terms) {
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
    const float max = log_sums.empty() ? 0 : *std::max_element(of_head, of_head + x.choosable());
    const float sum = kernels.exp_sum(of_head, num_tiles);
    factors[h] = 1.0f / sum;
    if (!log_sums.empty()) log_sums[static_cast<size_t>(h)] = max * kLn2 + std::log(double{sum});
  }
  if (!log_sums.empty()) {
    terms.resize(static_cast<size_t>(group * stride));
    for (int64_t i = 0; i < group * stride; ++i) terms[static_cast<size_t>(i)] = scores[i] * factors[i / stride];
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
  thread_local std::vector<double> log_sums;
  log_sums.resize(x.left_out == nullptr ? 0 : static_cast<size_t>(x.group()));
  thread_local std::vector<float> terms;
  const float* w = Weights(x, kernels, dims, log_sums, terms);
  if (weights != nullptr && s.budget > s.recent) std::copy_n(w, x.choosable(), weights);
  thread_local std::vector<uint32_t> bits;
  bits.assign(static_cast<size_t>(s.kv_len), 0);
  std::transform(w, w + x.choosable(), bits.begin(), WeightBits);
  const size_t stride = static_cast<size_t>(x.num_tiles()) * kPageTokens;
  ChooseLargest(bits, s.budget, s.recent, tokens);
  if (x.left_out != nullptr)
    x.NoteLeftOut(
        std::span(tokens, static_cast<size_t>(s.budget)),
        [&](size_t h, int32_t j) { return terms[h * stride + static_cast<size_t>(j)]; }, log_sums);
}

}  // namespace

absl::Status SparseAttention(const KernelContext& ctx, const SparseAttentionArgs& a) {
  const SelectTokensKernels& kernels = SelectTokensKernelsFor(ctx.isa);
  thread_local ChosenStreams streams;
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
