// Packed keys of one head stream on the host, as the reference and the CPU variant of SparseAttention share them: a
// tile is [32 dimensions][32 bytes], with position b in the low and b + 32 in the high four bits of byte b, then the
// scales.
#pragma once

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "kernels/common/kv_rows.h"
#include "kernels/selection/selecting_sequence.h"
#include "kernels/selection/sparcas/packed_keys.h"
#include "kernels/selection/sparcas/select_dims.h"
#include "kernels/selection/sparcas/sparse_attention.h"

namespace spl::kernels {

// A tile as numbers.
struct UnpackedTile {
  std::array<float, static_cast<size_t>(kPackedDims) * kPageTokens> levels;  // [dimension, position]
  std::array<float, kPackedDims> scales;
  float largest_scale = 0;
};

struct PackedStream {
  const SparseAttentionArgs& a;
  const SelectingSequence& s;
  int32_t head;
  const float* q;  // [group, head_dim]
  // Out, [group]: ln R_h of sparse_attention.h, or null: nobody asks. Filled with -infinity, which stays where
  // everything is listed.
  double* left_out;

  int32_t group() const { return a.shape.num_qo_heads / a.shape.num_kv_heads; }
  int32_t choosable() const { return std::max(s.kv_len - s.recent, 0); }
  int32_t num_tiles() const { return PackedKeys::NumTiles(s.kv_len, s.recent); }
  std::byte* tile(int32_t t) const {
    const PackedKeys packed{static_cast<int64_t>(a.pool.page_bytes())};
    return a.pool.k(s.compact_tables[head][t / packed.tiles_per_page()]) + packed.TileAt(t);
  }

  // Brings the packed keys up to date; returns the valid dimensions.
  const int32_t* Update() const {
    int32_t* tables = s.dims + 2 * int64_t{head} * kPackedDims;
    const int32_t* dims = tables + s.step.parity * kPackedDims;
    int32_t from = PackedKeys::NumTiles(s.step.first ? 0 : s.step.compact_len, s.recent);
    if (s.step.refresh) {
      int32_t* next = tables + (1 - s.step.parity) * kPackedDims;
      SelectDims(q, group(), a.shape.head_dim, kPackedDims, nullptr, next);
      dims = next;
      from = 0;
    }
    for (int32_t t = from; t < num_tiles(); ++t) Pack(t, dims);
    return dims;
  }

  void Unpack(int32_t t, UnpackedTile& to) const {
    const auto* bytes = reinterpret_cast<const uint8_t*>(tile(t));
    for (int32_t d = 0; d < kPackedDims; ++d) {
      float* row = to.levels.data() + int64_t{d} * kPageTokens;
      const uint8_t* from = bytes + d * (kPageTokens / 2);
      for (int32_t b = 0; b < kPageTokens / 2; ++b) row[b] = static_cast<float>((from[b] & 15) - 8);
      for (int32_t b = 0; b < kPageTokens / 2; ++b) row[kPageTokens / 2 + b] = static_cast<float>((from[b] >> 4) - 8);
      bf16 scale;
      std::memcpy(&scale, bytes + kPackedScalesAt + d * sizeof(bf16), sizeof(bf16));
      to.scales[static_cast<size_t>(d)] = ToFloat(scale);
    }
    to.largest_scale = *std::max_element(to.scales.begin(), to.scales.end());
  }
  // Largest |q| of a query head over the dimensions.
  float LargestQuery(int32_t query_head, const int32_t* dims) const {
    float largest = 0;
    for (int32_t d = 0; d < kPackedDims; ++d)
      largest = std::fmax(largest, std::fabs(q[int64_t{query_head} * a.shape.head_dim + dims[d]]));
    return largest;
  }
  // list: ascending; terms(h, j): exp(s_h[j]) / Z_h for j < choosable(), of which Z_h is the sum; log_sums [group]:
  // ln Z_h.
  template <typename Terms>
  void NoteLeftOut(std::span<const int32_t> list, const Terms& terms, std::span<const double> log_sums) const {
    const PackedSample sample{num_tiles()};
    std::vector<double> shares(log_sums.size(), 0);
    for (int32_t i = 0; i < sample.num(); ++i) {
      const int32_t begin = sample.tile(i) * kPageTokens, end = std::min(begin + kPageTokens, choosable());
      for (int32_t j = begin; j < end; ++j) {
        if (std::binary_search(list.begin(), list.end(), j)) continue;
        for (size_t h = 0; h < shares.size(); ++h) shares[h] += std::fmax(terms(h, j), 0);  // NaN counts as 0
      }
    }
    for (size_t h = 0; h < shares.size(); ++h)
      left_out[h] = std::log(std::min(shares[h] * sample.scale(choosable()), 1.0)) + log_sums[h];
  }
  // Q of sparse_attention.h: the factors of the levels in the scores of a query head, without sm_scale. to [32].
  void Factors(int32_t query_head, const int32_t* dims, const UnpackedTile& t, float largest_query, float* to) const {
    const float factor = PackedKeys::QueryFactor(largest_query, t.largest_scale);
    for (int32_t d = 0; d < kPackedDims; ++d) {
      const float x = q[int64_t{query_head} * a.shape.head_dim + dims[d]] * t.scales[static_cast<size_t>(d)];
      to[d] = std::nearbyint(x * factor) / factor;
    }
  }

 private:
  void Pack(int32_t t, const int32_t* dims) const {
    const std::byte* keys = s.hot.any() ? s.hot.stream(head).host_pages[t] : nullptr;
    if (keys == nullptr) keys = a.pool.k(s.page_tables[head][t]);
    auto* to = reinterpret_cast<uint8_t*>(tile(t));
    for (int32_t d = 0; d < kPackedDims; ++d) {
      std::array<float, kPageTokens> key;
      float largest = 0;
      for (int32_t j = 0; j < kPageTokens; ++j) {
        key[static_cast<size_t>(j)] = KvElement(a.pool, keys, j, dims[d]);
        largest = std::fmax(largest, std::fabs(key[static_cast<size_t>(j)]));
      }
      const bf16 scale = PackedKeys::ScaleOf(largest);
      std::memcpy(to + kPackedScalesAt + d * sizeof(bf16), &scale, sizeof(bf16));
      const auto nibble = [&](int32_t j) {
        return static_cast<uint8_t>(PackedKeys::Level(key[static_cast<size_t>(j)], ToFloat(scale)) + 8);
      };
      for (int32_t b = 0; b < kPageTokens / 2; ++b)
        to[d * (kPageTokens / 2) + b] = static_cast<uint8_t>(nibble(b) | nibble(b + kPageTokens / 2) << 4);
    }
  }
};

// Memory for the arguments of AttendChosen, the caller's to keep.
struct ChosenStreams {
  std::vector<HeadStreamView> views;
  std::vector<double> left_out;  // [num_sequences, num_qo_heads]: PackedStream::left_out
  std::vector<float> lse;        // [num_sequences, num_qo_heads]
};

// The mass of each stream whose weights were looked at.
inline void WriteKeptMass(const SparseAttentionArgs& a, const ChosenStreams& streams, const float* lse) {
  const int32_t heads = a.shape.num_kv_heads, group = a.shape.num_qo_heads / heads;
  for (size_t stream = 0; stream < streams.views.size(); ++stream) {
    const SelectingSequence& s = a.sequences[stream / static_cast<size_t>(heads)];
    if (streams.views[stream].visibility.rule != VisibilityRule::kSelected) continue;
    if (s.kv_len > s.budget && s.recent == s.budget) continue;
    double least = 1;
    for (size_t h = stream * static_cast<size_t>(group); h < (stream + 1) * static_cast<size_t>(group); ++h)
      least = std::min(least, 1 / (1 + std::exp(streams.left_out[h] - double{lse[h]})));
    a.kept_mass[stream] = static_cast<float>(least);
  }
}

// Calls choose(stream, tokens, count, weights) for the streams that select, then attend(arguments) over their lists,
// except those of sequences with a hot buffer.
template <typename Choose, typename Attend>
absl::Status AttendChosen(const SparseAttentionArgs& a, ChosenStreams& streams, const Choose& choose,
                          const Attend& attend) {
  if (absl::Status s = ValidateSparseAttention(a); !s.ok()) return s;
  const int32_t heads = a.shape.num_kv_heads, group = a.shape.num_qo_heads / heads;
  float* lse = a.lse;
  if (a.kept_mass != nullptr) {
    const size_t num_queries = a.sequences.size() * static_cast<size_t>(a.shape.num_qo_heads);
    streams.left_out.assign(num_queries, -std::numeric_limits<double>::infinity());
    streams.lse.resize(num_queries);
    if (lse == nullptr) lse = streams.lse.data();
  }
  choose(static_cast<int64_t>(a.sequences.size()) * heads, [&, heads, group](int64_t stream, const auto& list) {
    const int64_t i = stream / heads;
    const auto head = static_cast<int32_t>(stream % heads);
    const SelectingSequence& s = a.sequences[static_cast<size_t>(i)];
    if (!s.selects(head)) return;
    list(PackedStream{a, s, head, a.q + i * a.q_row_stride + int64_t{head} * group * a.shape.head_dim,
                      a.kept_mass == nullptr ? nullptr : streams.left_out.data() + stream * group},
         a.lists.tokens + stream * a.lists.stride, &a.lists.counts[stream],
         a.weights == nullptr ? nullptr : a.weights + stream * a.weights_stride);
  });
  streams.views.clear();
  for (const SelectingSequence& s : a.sequences) {
    for (int32_t h = 0; h < heads; ++h) {
      if (s.selects(h) && !s.hot.any()) {
        streams.views.push_back({s.page_tables[static_cast<size_t>(h)], s.kv_len, {VisibilityRule::kSelected}});
      } else {
        streams.views.push_back({{}, 0, {VisibilityRule::kElsewhere}});
      }
    }
  }
  absl::Status attended = attend(DecodeAttentionArgs{.shape = a.shape,
                                                     .pool = a.pool,
                                                     .q = a.q,
                                                     .q_row_stride = a.q_row_stride,
                                                     .out = a.out,
                                                     .lse = lse,
                                                     .streams = streams.views,
                                                     .lists = a.lists});
  if (attended.ok() && a.kept_mass != nullptr) WriteKeptMass(a, streams, lse);
  return attended;
}

}  // namespace spl::kernels
