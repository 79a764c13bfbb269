// One task per row: the largest logit; the weights; for top_k and top_p a histogram over exponents, of which only the
// bin with the threshold is searched exactly. Sums over chunks of the row locate the drawn token.
#include <algorithm>
#include <functional>
#include <vector>

#include "kernels/common/parallel.h"
#include "kernels/sampling/sample_tokens_isa.h"
#include "kernels/sampling/sampling_math.h"

namespace spl::kernels::cpu {
namespace {

constexpr int64_t kChunk = 1024;

// Scratch of one thread.
struct Memory {
  std::vector<float> adjusted, weights, bins;
  std::vector<uint64_t> histogram, chunk_sums;
  std::vector<uint32_t> keys;
  std::vector<std::pair<uint32_t, uint64_t>> weighted_keys;
};

// The lowest index of the largest number; 0 where there is none.
int32_t MostLikely(const SampleTokensKernels& kernels, const float* y, int64_t width) {
  float best = sampling::kNegativeInfinity;
  int64_t chunk = -1;
  for (int64_t i = 0; i < width; i += kChunk) {
    const float max = kernels.max(y + i, std::min(kChunk, width - i));
    if (max > best || (chunk < 0 && max == best)) {
      // A chunk of nothing but NaN gives -inf, too.
      if (max == sampling::kNegativeInfinity &&
          std::find(y + i, y + std::min(i + kChunk, width), max) == y + std::min(i + kChunk, width))
        continue;
      best = max;
      chunk = i;
    }
  }
  if (chunk < 0) return 0;
  return static_cast<int32_t>(std::find(y + chunk, y + width, best) - y);
}

// A row of logits, and the weights of its tokens at some temperature.
class Row {
 public:
  Row(const SampleTokensKernels& kernels, Memory& memory, const float* y, int64_t width, float max, float scale)
      : kernels_(kernels), memory_(memory), y_(y), width_(width), max_(max), scale_(scale) {}

  // Total weight of the tokens with y >= y_min and at least the least weight; keeps the sums of chunks.
  uint64_t Sum(float y_min, float min) {
    memory_.chunk_sums.clear();
    uint64_t total = 0;
    for (int64_t i = 0; i < width_; i += kChunk) {
      memory_.chunk_sums.push_back(
          kernels_.sum(y_ + i, memory_.weights.data() + i, std::min(kChunk, width_ - i), y_min, min));
      total += memory_.chunk_sums.back();
    }
    return total;
  }
  void Weigh() {
    memory_.weights.resize(static_cast<size_t>(width_));
    kernels_.weigh(y_, width_, max_, scale_, memory_.weights.data());
  }
  void Bin() {
    memory_.bins.resize(static_cast<size_t>(width_));
    kernels_.bin(y_, width_, max_, scale_, memory_.bins.data());
  }

  // The k-th largest number, k in [1, width]; -inf for NaN. `only_weighing`: -inf as well when it weighs nothing.
  float CountThreshold(int64_t k, bool only_weighing) {
    memory_.histogram.assign(kExponentBins, 0);
    for (int64_t i = 0; i < width_; ++i) ++memory_.histogram[BinOf(i)];
    size_t bin = 0;
    auto left = static_cast<uint64_t>(k);
    while (left > memory_.histogram[bin]) left -= memory_.histogram[bin++];
    if (only_weighing && bin == kExponentBins - 1) return sampling::kNegativeInfinity;
    std::vector<uint32_t>& keys = memory_.keys;
    keys.clear();
    for (int64_t i = 0; i < width_; ++i) {
      if (BinOf(i) == bin) keys.push_back(sampling::OrderedKey(y_[i]));
    }
    const auto at = keys.begin() + static_cast<std::ptrdiff_t>(left - 1);
    std::nth_element(keys.begin(), at, keys.end(), std::greater<>());
    return *at == 0 ? sampling::kNegativeInfinity : sampling::OfKey(*at);
  }

  // The largest number with which the weights from the largest on reach ceil(top_p · total); of those kept only.
  float WeightThreshold(uint64_t fraction, float y_min, float min) {
    memory_.histogram.assign(kExponentBins, 0);
    for (int64_t i = 0; i < width_; ++i) memory_.histogram[BinOf(i)] += WeightOf(i, y_min, min);
    uint64_t total = 0;
    for (const uint64_t sum : memory_.histogram) total += sum;
    uint64_t left = sampling::TopPTarget(fraction, total);
    size_t bin = 0;
    while (left > memory_.histogram[bin]) left -= memory_.histogram[bin++];
    auto& keys = memory_.weighted_keys;
    keys.clear();
    for (int64_t i = 0; i < width_; ++i) {
      if (BinOf(i) != bin) continue;
      if (const uint64_t w = WeightOf(i, y_min, min); w > 0) keys.emplace_back(sampling::OrderedKey(y_[i]), w);
    }
    std::sort(keys.begin(), keys.end(), std::greater<>());
    size_t n = 0;
    while (left > keys[n].second) left -= keys[n++].second;
    return sampling::OfKey(keys[n].first);
  }

  // After Sum with the same bounds; r is below it.
  int32_t Find(uint64_t r, float y_min, float min) const {
    size_t chunk = 0;
    while (r >= memory_.chunk_sums[chunk]) r -= memory_.chunk_sums[chunk++];
    int64_t i = static_cast<int64_t>(chunk) * kChunk;
    for (;; ++i) {
      const uint64_t w = WeightOf(i, y_min, min);
      if (r < w) break;
      r -= w;
    }
    return static_cast<int32_t>(i);
  }

 private:
  size_t BinOf(int64_t i) const { return sampling::Bits(memory_.bins[static_cast<size_t>(i)]) & 0x7fffff; }
  // 0: left out.
  uint64_t WeightOf(int64_t i, float y_min, float min) const {
    const float w = memory_.weights[static_cast<size_t>(i)];
    return y_[i] >= y_min && w >= min ? static_cast<uint64_t>(w * 0x1.0p40f) : 0;
  }

  const SampleTokensKernels& kernels_;
  Memory& memory_;
  const float* const y_;
  const int64_t width_;
  const float max_, scale_;
};

int32_t Choose(const SampleTokensKernels& kernels, Memory& memory, const float* y, int64_t width,
               const SampleRow& row) {
  const int32_t best = MostLikely(kernels, y, width);
  const float max = y[best];
  if (row.temperature == 0 || !sampling::IsFinite(max)) return best;
  Row weighed(kernels, memory, y, width, max, sampling::ScaleOf(row.temperature));
  weighed.Weigh();
  const uint64_t fraction = sampling::TopPFraction(row.top_p);
  const bool cuts = row.top_k > 0 && row.top_k < width;
  if (cuts || fraction != 0) weighed.Bin();
  // The least f32 weight that is kept.
  const double least = std::ldexp(static_cast<double>(sampling::MinWeight(row.min_p)), -kWeightBits);
  float min = static_cast<float>(least);
  if (static_cast<double>(min) < least) min = std::nextafter(min, 2.0f);
  float y_min = sampling::kNegativeInfinity;
  if (cuts) y_min = weighed.CountThreshold(row.top_k, true);
  if (fraction != 0) y_min = weighed.WeightThreshold(fraction, y_min, min);
  const uint64_t total = weighed.Sum(y_min, min);
  return weighed.Find(sampling::DrawBelow(row.random, total), y_min, min);
}

// The logits after edits and mask: x itself, or a copy if any logit changes.
const float* Adjust(const float* x, int64_t width, const SampleRow& row, Memory& memory) {
  if (row.edits.empty() && row.mask.empty()) return x;
  std::vector<float>& y = memory.adjusted;
  y.assign(x, x + width);
  for (const TokenEdit& edit : row.edits) {
    if (edit.token < 0 || edit.token >= width) continue;
    float& of_token = y[static_cast<size_t>(edit.token)];
    of_token = sampling::Edited(of_token, edit, row.repetition_penalty, row.presence_penalty, row.frequency_penalty,
                                row.bans_ends);
  }
  for (size_t word = 0; word < row.mask.size(); ++word) {
    if (row.mask[word] == ~0u) continue;
    for (size_t i = 32 * word; i < std::min<size_t>(32 * word + 32, y.size()); ++i) {
      if ((row.mask[word] >> (i % 32) & 1) == 0) y[i] = sampling::kNegativeInfinity;
    }
  }
  return y.data();
}

void ListTop(Row& row, const float* x, int64_t width, int32_t num_top, TopToken* top) {
  std::fill_n(top, num_top, TopToken{});
  const int64_t k = std::min<int64_t>(num_top, width);
  row.Bin();
  const float threshold = row.CountThreshold(k, false);
  std::vector<TopToken> above, equal;
  for (int64_t i = 0; i < width; ++i) {
    if (!(x[i] >= threshold)) continue;
    auto& list = x[i] > threshold ? above : equal;
    if (static_cast<int64_t>(list.size()) < k) list.push_back({static_cast<int32_t>(i), x[i]});
  }
  std::stable_sort(above.begin(), above.end(), [](const TopToken& a, const TopToken& b) { return a.logit > b.logit; });
  above.insert(above.end(), equal.begin(), equal.end());
  std::copy_n(above.begin(), std::min(above.size(), static_cast<size_t>(k)), top);
}

void SampleOne(const SampleTokensKernels& kernels, const SampleTokensArgs& a, size_t i) {
  thread_local Memory memory;
  const SampleRow& row = a.rows[i];
  const float* x = a.logits + row.logits_row * a.width;
  SampledRow& out = a.out[i];
  out = {.token = Choose(kernels, memory, Adjust(x, a.width, row, memory), a.width, row)};
  out.logit = x[out.token];
  if (a.tokens != nullptr) a.tokens[i] = out.token;
  if (row.num_top < 0) return;
  out.max_logit = x[MostLikely(kernels, x, a.width)];
  Row own(kernels, memory, x, a.width, out.max_logit, sampling::kLog2E);
  own.Weigh();
  out.total = own.Sum(sampling::kNegativeInfinity, 0x1.0p-40f);
  if (row.num_top > 0) ListTop(own, x, a.width, row.num_top, a.top + static_cast<int64_t>(i) * a.top_stride);
}

}  // namespace

absl::Status SampleTokens(const KernelContext& ctx, const SampleTokensArgs& a) {
  if (absl::Status s = ValidateSampleTokens(a); !s.ok()) return s;
  const SampleTokensKernels& kernels = SampleTokensKernelsFor(ctx.isa);
  ParallelTasks(ctx, static_cast<int64_t>(a.rows.size()),
                [&](int64_t i) { SampleOne(kernels, a, static_cast<size_t>(i)); });
  return absl::OkStatus();
}

}  // namespace spl::kernels::cpu
