#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "kernels/selection/sparcas/packed_stream.h"
#include "kernels/selection/sparcas/sparse_attention.h"
#include "kernels/selection/token_choice.h"

namespace spl::kernels::ref {
namespace {

// [group][choosable], without the scale of the softmax.
std::vector<std::vector<double>> Scores(const PackedStream& x, const int32_t* dims) {
  std::vector<std::vector<double>> scores(static_cast<size_t>(x.group()));
  UnpackedTile tile;
  std::vector<std::array<float, kPackedDims>> factors(scores.size());
  std::vector<float> largest;
  for (int32_t h = 0; h < x.group(); ++h) largest.push_back(x.LargestQuery(h, dims));
  for (int32_t j = 0; j < x.choosable(); ++j) {
    if (j % kPageTokens == 0) {
      x.Unpack(j / kPageTokens, tile);
      for (int32_t h = 0; h < x.group(); ++h)
        x.Factors(h, dims, tile, largest[static_cast<size_t>(h)], factors[static_cast<size_t>(h)].data());
    }
    for (int32_t h = 0; h < x.group(); ++h) {
      double dot = 0;
      for (int32_t d = 0; d < kPackedDims; ++d)
        dot += double{factors[static_cast<size_t>(h)][static_cast<size_t>(d)]} *
               tile.levels[static_cast<size_t>(d * kPageTokens + j % kPageTokens)];
      scores[static_cast<size_t>(h)].push_back(dot * x.a.shape.sm_scale);
    }
  }
  return scores;
}

void Choose(const PackedStream& x, int32_t* tokens, int32_t* count, float* weights) {
  const SelectingSequence& s = x.s;
  const int32_t* dims = x.Update();
  *count = std::min(s.kv_len, s.budget);
  if (s.kv_len <= s.budget) return std::iota(tokens, tokens + s.kv_len, 0);
  const auto num = static_cast<size_t>(x.choosable());
  std::vector<double> w(num, 0.0), log_sums;
  std::vector<std::vector<double>> terms = Scores(x, dims);
  for (std::vector<double>& of_head : terms) {
    const double max = *std::max_element(of_head.begin(), of_head.end());
    double sum = 0;
    for (double& term : of_head) sum += term = std::exp(term - max);
    for (size_t j = 0; j < num; ++j) w[j] += of_head[j] /= sum;
    log_sums.push_back(max + std::log(sum));
  }
  const std::vector<float> rounded(w.begin(), w.end());
  if (weights != nullptr && s.budget > s.recent) std::copy(rounded.begin(), rounded.end(), weights);
  std::vector<int32_t> order(num);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t i, int32_t j) {
    return WeightBits(rounded[static_cast<size_t>(i)]) > WeightBits(rounded[static_cast<size_t>(j)]);
  });
  std::copy_n(order.begin(), s.budget - s.recent, tokens);
  std::iota(tokens + s.budget - s.recent, tokens + s.budget, s.kv_len - s.recent);
  std::sort(tokens, tokens + s.budget);
  if (x.left_out != nullptr)
    x.NoteLeftOut(
        std::span(tokens, static_cast<size_t>(s.budget)),
        [&](size_t h, int32_t j) { return terms[h][static_cast<size_t>(j)]; }, log_sums);
}

}  // namespace

absl::Status SparseAttention(const KernelContext& ctx, const SparseAttentionArgs& a) {
  ChosenStreams streams;
  return AttendChosen(
      a, streams,
      [](int64_t num_streams, const auto& run) {
        for (int64_t stream = 0; stream < num_streams; ++stream) run(stream, Choose);
      },
      [&](const DecodeAttentionArgs& attention) { return DecodeAttention(ctx, attention); });
}

}  // namespace spl::kernels::ref
