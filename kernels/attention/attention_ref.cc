#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/common/kv_rows.h"

namespace spl::kernels::ref {
namespace {

bool SeesLines(const LineVisibility& v, int32_t p, int32_t j) {
  const auto bit = [](const uint64_t* words, int32_t i) { return (words[i / 64] >> (i % 64) & 1) != 0; };
  const int64_t tile = (p - v.first_position) / 64;
  if (bit(v.tiles + tile * v.tile_words, j / kPageTokens)) return true;
  for (int32_t i = 0; i < 64 * v.column_words; ++i) {
    if (bit(v.column_masks + tile * v.column_words, i) && v.columns[i] == j) return true;
  }
  return false;
}

// Whether the rule lets a row at position p see position j.
bool Sees(const HeadVisibility& v, int32_t p, int32_t j) {
  if (j > p) return false;
  switch (v.rule) {
    case VisibilityRule::kFull:
      return true;
    case VisibilityRule::kBand:
      return j < v.num_sinks || j > static_cast<int64_t>(p) - v.window;
    case VisibilityRule::kList:
    case VisibilityRule::kSelected:  // made a list by its caller
      return std::binary_search(v.indices.begin(), v.indices.end(), j);
    case VisibilityRule::kElsewhere:
      return false;
    case VisibilityRule::kLines:
      return SeesLines(*v.lines, p, j);
  }
  return false;
}

// One (row, query head). out [head_dim]; returns lse.
double Attend(const AttentionShape& shape, const KvPoolView& pool, const HeadStreamView& stream, int32_t p,
              const float* q, float* out) {
  struct Scored {
    int32_t page, slot;
    double score;
  };
  std::vector<Scored> seen;
  double max = -std::numeric_limits<double>::infinity();
  for (int32_t j = 0; j <= p && j < stream.kv_len; ++j) {
    if (!Sees(stream.visibility, p, j)) continue;
    const int32_t page = stream.page_table[j / kPageTokens];
    assert(page != kNoPage && "a visible position is not resident");
    if (page == kNoPage) continue;
    double dot = 0;
    for (int c = 0; c < shape.head_dim; ++c) dot += double{KvElement(pool, pool.k(page), j % kPageTokens, c)} * q[c];
    seen.push_back({page, j % kPageTokens, dot * shape.sm_scale});
    max = std::max(max, seen.back().score);
  }
  std::vector<double> sum(shape.head_dim, 0.0);
  double total = 0;
  for (const Scored& s : seen) {
    const double weight = std::exp(s.score - max);
    total += weight;
    for (int c = 0; c < shape.head_dim; ++c) sum[c] += weight * KvElement(pool, pool.v(s.page), s.slot, c);
  }
  for (int c = 0; c < shape.head_dim; ++c) out[c] = seen.empty() ? 0.0f : static_cast<float>(sum[c] / total);
  return seen.empty() ? -std::numeric_limits<double>::infinity() : max + std::log(total);
}

}  // namespace

absl::Status PrefillAttention(const KernelContext&, const PrefillAttentionArgs& a) {
  if (absl::Status s = ValidatePrefillAttention(a); !s.ok()) return s;
  const int32_t group = a.shape.num_qo_heads / a.shape.num_kv_heads;
  for (const PrefillSequence& s : a.sequences) {
    const int64_t first = a.last_rows > 0 ? std::max(s.row_begin, s.row_end - a.last_rows) : s.row_begin;
    for (int64_t row = first; row < s.row_end; ++row) {
      for (int64_t h = 0; h < a.shape.num_qo_heads; ++h) {
        const int64_t at = row * a.shape.num_qo_heads + h;
        const double lse = Attend(a.shape, a.pool, s.heads[h / group], s.positions[row - s.row_begin],
                                  a.q + row * a.q_row_stride + h * a.shape.head_dim, a.out + at * a.shape.head_dim);
        if (a.lse != nullptr) a.lse[at] = static_cast<float>(lse);
      }
    }
  }
  return absl::OkStatus();
}

absl::Status DecodeAttention(const KernelContext&, const DecodeAttentionArgs& a) {
  if (absl::Status s = ValidateDecodeAttention(a); !s.ok()) return s;
  const int32_t group = a.shape.num_qo_heads / a.shape.num_kv_heads;
  const int64_t num_sequences = static_cast<int64_t>(a.streams.size()) / a.shape.num_kv_heads;
  for (int64_t i = 0; i < num_sequences; ++i) {
    for (int64_t h = 0; h < a.shape.num_qo_heads; ++h) {
      const int64_t stream_index = i * a.shape.num_kv_heads + h / group;
      HeadStreamView stream = a.streams[stream_index];
      if (stream.visibility.rule == VisibilityRule::kElsewhere) continue;
      if (stream.visibility.rule == VisibilityRule::kSelected) stream.visibility.indices = a.lists.of(stream_index);
      const int64_t at = i * a.shape.num_qo_heads + h;
      const double lse = Attend(a.shape, a.pool, stream, stream.kv_len - 1,
                                a.q + i * a.q_row_stride + h * a.shape.head_dim, a.out + at * a.shape.head_dim);
      if (a.lse != nullptr) a.lse[at] = static_cast<float>(lse);
    }
  }
  return absl::OkStatus();
}

}  // namespace spl::kernels::ref
