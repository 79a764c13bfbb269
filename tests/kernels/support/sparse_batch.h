// Decode batches for SparseAttention: keys as real attention has them, calls on the host, and an oracle that shares no
// code with the operation.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/selection/sparcas/packed_keys.h"
#include "kernels/selection/sparcas/sparse_attention.h"
#include "tests/kernels/support/selecting_batch.h"

namespace spl::kernels::testing {

inline SelectingShape SparseShape(int32_t kv_heads, int32_t group, int32_t head_dim, DType dtype = DType::kBF16) {
  return {kv_heads, group, head_dim, kPackedDims, dtype};
}
inline int32_t PackedPageTokens(const SelectingShape& shape) {
  return PackedKeys{static_cast<int64_t>(KvPageBytes(shape.dtype, shape.head_dim))}.page_tokens();
}

// How the keys of a stream are distributed.
enum class Keys {
  kNormal,
  kSinks,      // the first four positions take nearly all of the weight
  kHeavyTail,  // some dimensions and positions are far larger than others
  kEqual,      // all keys are the same: only ties
  kZero,
};

inline void ShapeKeys(Random& random, const SelectingShape& shape, Keys keys, TestStream& stream) {
  const auto dim = static_cast<size_t>(shape.head_dim), rows = stream.k.size() / dim;
  std::vector<float> scale(dim);
  for (float& x : scale) x = std::exp(random.Normal());
  for (size_t j = 0; j < rows; ++j) {
    const float size = random.Int(0, 99) == 0 ? 4.0f : 1.0f;
    for (size_t c = 0; c < dim; ++c) {
      float& x = stream.k[j * dim + c];
      if (keys == Keys::kZero) x = 0;
      if (keys == Keys::kEqual) x = stream.k[c];
      if (keys == Keys::kHeavyTail) x *= scale[c] * size;
      if (keys == Keys::kSinks) x = j < 4 ? 12 * x : 0.25f * x;
    }
  }
}

// Arguments of a call on the host, and what it writes.
struct SparseCall {
  std::vector<int32_t> tokens, counts;
  std::vector<float> weights, out, lse, kept_mass;
  std::vector<SelectingSequence> views;
  SparseAttentionArgs args;
  static constexpr float kUntouched = -77;

  SparseCall(SelectingBatch& b, int64_t stride, int64_t weights_stride)
      : tokens(b.num_streams() * static_cast<size_t>(stride), -77),
        counts(b.num_streams(), -77),
        weights(b.num_streams() * static_cast<size_t>(weights_stride), kUntouched),
        out(b.q().size(), kUntouched),
        lse(b.num_streams() * static_cast<size_t>(b.shape().group), kUntouched),
        kept_mass(b.num_streams(), kUntouched) {
    for (TestSequence& s : b.sequences()) views.push_back(s.view());
    args.shape = b.shape().attention();
    args.pool = b.pool().view();
    args.q = b.q().data();
    args.q_row_stride = b.shape().q_width();
    args.out = out.data();
    args.lse = lse.data();
    args.sequences = views;
    args.lists = {tokens.data(), counts.data(), stride};
    args.weights = weights.data();
    args.weights_stride = weights_stride;
    args.kept_mass = kept_mass.data();
  }
  SparseCall(const SparseCall&) = delete;
  std::span<const int32_t> list(size_t stream) const { return args.lists.of(static_cast<int64_t>(stream)); }
  std::span<const float> w(size_t stream, int32_t choosable) const {
    return std::span(weights).subspan(stream * static_cast<size_t>(args.weights_stride),
                                      static_cast<size_t>(choosable));
  }
};

// The weights by sparse_attention.h, straight from the keys: dims are the 32 of the step, and the keys of each tile are
// rounded as if they had just been packed. log_sums: ln Z_h of the group's heads, appended, or null; terms: of each of
// them exp(s_h[j]) / Z_h, appended, or null.
inline std::vector<float> OracleWeights(SelectingBatch& b, size_t stream, std::span<const int32_t> dims,
                                        std::vector<double>* log_sums = nullptr,
                                        std::vector<std::vector<double>>* terms = nullptr) {
  const SelectingShape& shape = b.shape();
  const TestSequence& s = b.sequence_of(stream);
  const int32_t choosable = s.kv_len - s.recent;
  std::vector<double> total(static_cast<size_t>(choosable), 0.0);
  std::vector<std::vector<double>> scores(static_cast<size_t>(shape.group), total);
  const auto query = [&](int32_t h, int32_t c) { return b.q_of(static_cast<int64_t>(stream))[h * shape.head_dim + c]; };
  for (int32_t t = 0; t * kPageTokens < choosable; ++t) {
    std::vector<float> scales;
    for (const int32_t c : dims) {
      double largest = 0;
      for (int32_t j = 0; j < kPageTokens; ++j)
        largest = std::max(largest, std::abs(b.Key(stream, t * kPageTokens + j, c)));
      scales.push_back(ToFloat(ToBf16(static_cast<float>(largest) / 7.0f)));
    }
    // The largest power of two that leaves the product of the largest query and scale below 2^14.
    std::vector<double> factor;
    for (int32_t h = 0; h < shape.group; ++h) {
      double largest = 0;
      for (const int32_t c : dims) largest = std::max<double>(largest, std::abs(query(h, c)));
      const double bound = largest * *std::max_element(scales.begin(), scales.end());
      factor.push_back(bound > 0 ? std::ldexp(1.0, 13 - std::ilogb(bound)) : 1);
    }
    for (size_t i = 0; i < dims.size(); ++i) {
      const int32_t c = dims[i];
      const float scale = scales[i];
      for (int32_t j = t * kPageTokens; j < std::min((t + 1) * kPageTokens, choosable); ++j) {
        const auto key = static_cast<float>(b.Key(stream, j, c));
        const double level = scale == 0 ? 0 : std::min(7.0f, std::max(-7.0f, std::nearbyint(key / scale)));
        for (int32_t h = 0; h < shape.group; ++h) {
          const double f = factor[static_cast<size_t>(h)];
          scores[static_cast<size_t>(h)][static_cast<size_t>(j)] += std::nearbyint(query(h, c) * scale * f) / f * level;
        }
      }
    }
  }
  for (std::vector<double>& of_head : scores) {
    const double scale = shape.attention().sm_scale, max = *std::max_element(of_head.begin(), of_head.end()) * scale;
    double sum = 0;
    for (double& x : of_head) sum += x = std::exp(x * scale - max);
    for (size_t j = 0; j < total.size(); ++j) total[j] += of_head[j] / sum;
    if (log_sums != nullptr) log_sums->push_back(max + std::log(sum));
    if (terms != nullptr) {
      for (double& x : of_head) x /= sum;
      terms->push_back(of_head);
    }
  }
  return {total.begin(), total.end()};
}

// The mass of a list by sparse_attention.h. terms, log_sums: of OracleWeights; lse: of the listed scores.
inline double OracleMass(const std::vector<std::vector<double>>& terms, std::span<const int32_t> list,
                         std::span<const double> log_sums, std::span<const float> lse) {
  const size_t num = terms[0].size(), tiles = (num + 63) / 64;
  std::vector<char> seen(num, tiles <= 32);  // positions that count
  for (size_t i = 0; i < 32 && tiles > 32; ++i)
    std::fill_n(seen.begin() + static_cast<int64_t>(i * tiles / 32 * 64), 64, 1);
  const auto sampled = static_cast<double>(std::count(seen.begin(), seen.end(), 1));
  for (const int32_t j : list) {
    if (static_cast<size_t>(j) < num) seen[static_cast<size_t>(j)] = 0;
  }
  double least = 1;
  for (size_t h = 0; h < lse.size(); ++h) {
    double share = 0;
    for (size_t j = 0; j < num; ++j) share += seen[j] ? terms[h][j] : 0;
    share = std::min(1.0, share * static_cast<double>(num) / sampled);
    least = std::min(least, 1 / (1 + share * std::exp(log_sums[h] - lse[h])));
  }
  return least;
}

// Σ_h |q_h| by dimension: the 32 largest, ascending.
inline std::vector<int32_t> OracleDims(SelectingBatch& b, size_t stream) {
  const SelectingShape& shape = b.shape();
  std::vector<float> size(static_cast<size_t>(shape.head_dim), 0);
  for (int32_t h = 0; h < shape.group; ++h) {
    for (int32_t c = 0; c < shape.head_dim; ++c)
      size[static_cast<size_t>(c)] += std::abs(b.q_of(static_cast<int64_t>(stream))[h * shape.head_dim + c]);
  }
  std::vector<int32_t> order(size.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t i, int32_t j) { return size[static_cast<size_t>(i)] > size[static_cast<size_t>(j)]; });
  order.resize(kPackedDims);
  std::sort(order.begin(), order.end());
  return order;
}

// Sizes by which logarithms of sums are compared (ExpectClose): a sum that is off by a factor moves its logarithm by
// the same amount, however small that is.
inline std::vector<float> LseSizes(std::vector<float> lse) {
  for (float& x : lse) x = 1 + std::abs(x);
  return lse;
}

// Attention of the reference over a list; out [group, head_dim], lse [group].
inline void ReferenceAttention(SelectingBatch& b, size_t stream, std::span<const int32_t> list, std::vector<float>& out,
                               std::vector<float>& lse) {
  const SelectingShape& shape = b.shape();
  AttentionShape one = shape.attention();
  one.num_kv_heads = 1;
  one.num_qo_heads = shape.group;
  out.assign(static_cast<size_t>(shape.group) * shape.head_dim, 0);
  lse.assign(static_cast<size_t>(shape.group), 0);
  const HeadStreamView view{
      b.stream(stream).page_table, b.sequence_of(stream).kv_len, {.rule = VisibilityRule::kList, .indices = list}};
  DecodeAttentionArgs a{.shape = one, .pool = b.pool().view()};
  a.q = b.q_of(static_cast<int64_t>(stream));
  a.q_row_stride = int64_t{shape.group} * shape.head_dim;
  a.out = out.data();
  a.lse = lse.data();
  a.streams = {&view, 1};
  ExpectOk(ref::DecodeAttention({}, a));
}

}  // namespace spl::kernels::testing
