// The definition: plain loops, and sorts of the whole row.
#include <algorithm>
#include <numeric>
#include <vector>

#include "kernels/sampling/argmax.h"
#include "kernels/sampling/sampling_math.h"

namespace spl::kernels::ref {
namespace {

std::vector<float> Adjusted(const float* x, int64_t width, const SampleRow& row) {
  std::vector<float> y(x, x + width);
  for (const TokenEdit& edit : row.edits) {
    if (edit.token < 0 || edit.token >= width) continue;
    float& of_token = y[static_cast<size_t>(edit.token)];
    of_token = sampling::Edited(of_token, edit, row.repetition_penalty, row.presence_penalty, row.frequency_penalty,
                                row.bans_ends);
  }
  for (size_t i = 0; i < y.size() && !row.mask.empty(); ++i) {
    if ((row.mask[i / 32] >> (i % 32) & 1) == 0) y[i] = sampling::kNegativeInfinity;
  }
  return y;
}

int32_t MostLikely(const std::vector<float>& y) {
  int32_t token = 0;
  (void)Argmax({}, {.logits = y.data(), .out = &token, .num_rows = 1, .width = static_cast<int64_t>(y.size())});
  return token;
}

// Ids by falling y, ties to the lower id, NaN last.
std::vector<int32_t> Falling(const float* y, int64_t width) {
  std::vector<int32_t> ids(static_cast<size_t>(width));
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(),
                   [&](int32_t a, int32_t b) { return sampling::OrderedKey(y[a]) > sampling::OrderedKey(y[b]); });
  return ids;
}

int32_t Choose(const std::vector<float>& y, const SampleRow& row) {
  const int32_t best = MostLikely(y);
  const float max = y[static_cast<size_t>(best)];
  if (row.temperature == 0 || !sampling::IsFinite(max)) return best;
  const float scale = sampling::ScaleOf(row.temperature);
  const uint64_t min_weight = sampling::MinWeight(row.min_p);
  const std::vector<int32_t> falling = Falling(y.data(), static_cast<int64_t>(y.size()));
  const auto key = [&](int32_t i) { return sampling::OrderedKey(y[static_cast<size_t>(i)]); };
  uint32_t least_key = 0;
  if (row.top_k > 0 && static_cast<size_t>(row.top_k) < y.size())
    least_key = key(falling[static_cast<size_t>(row.top_k) - 1]);
  // 0: left out.
  const auto weight = [&](int32_t i) -> uint64_t {
    const uint64_t w = sampling::WeightOf(y[static_cast<size_t>(i)], max, scale);
    return w >= min_weight && key(i) >= least_key ? w : 0;
  };
  const auto sum = [&] {
    uint64_t total = 0;
    for (const int32_t i : falling) total += weight(i);
    return total;
  };
  if (const uint64_t fraction = sampling::TopPFraction(row.top_p); fraction != 0) {
    const uint64_t target = sampling::TopPTarget(fraction, sum());
    uint64_t reached = 0;
    for (const int32_t i : falling) {
      reached += weight(i);
      if (reached < target) continue;
      least_key = key(i);
      break;
    }
  }
  const uint64_t r = sampling::DrawBelow(row.random, sum());
  uint64_t up_to = 0;
  for (int32_t i = 0; i < static_cast<int32_t>(y.size()); ++i) {
    up_to += weight(i);
    if (up_to > r) return i;
  }
  return best;
}

void SampleOne(const SampleTokensArgs& a, size_t i) {
  const SampleRow& row = a.rows[i];
  const float* x = a.logits + row.logits_row * a.width;
  SampledRow& out = a.out[i];
  out = {.token = Choose(Adjusted(x, a.width, row), row)};
  out.logit = x[out.token];
  if (a.tokens != nullptr) a.tokens[i] = out.token;
  if (row.num_top < 0) return;
  out.max_logit = x[MostLikely({x, x + a.width})];
  for (int64_t j = 0; j < a.width; ++j) out.total += sampling::WeightOf(x[j], out.max_logit, sampling::kLog2E);
  if (row.num_top == 0) return;
  TopToken* top = a.top + static_cast<int64_t>(i) * a.top_stride;
  std::fill_n(top, row.num_top, TopToken{});
  const std::vector<int32_t> falling = Falling(x, a.width);
  for (int32_t n = 0; n < row.num_top && n < a.width; ++n) {
    if (std::isnan(x[falling[static_cast<size_t>(n)]])) break;
    top[n] = {falling[static_cast<size_t>(n)], x[falling[static_cast<size_t>(n)]]};
  }
}

}  // namespace

absl::Status SampleTokens(const KernelContext&, const SampleTokensArgs& a) {
  if (absl::Status s = ValidateSampleTokens(a); !s.ok()) return s;
  for (size_t i = 0; i < a.rows.size(); ++i) SampleOne(a, i);
  return absl::OkStatus();
}

}  // namespace spl::kernels::ref
