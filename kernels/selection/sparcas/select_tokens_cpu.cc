// One task per stream: gather what is missing, score tile after tile at memory speed, weigh, choose. The scores of a
// stream stay in the core's second-level cache up to some 32K positions and 4 query heads.
#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/common/kv_rows.h"
#include "kernels/common/parallel.h"
#include "kernels/common/scratch.h"
#include "kernels/selection/candidates.h"
#include "kernels/selection/selecting_sequence.h"
#include "kernels/selection/sparcas/compact_keys.h"
#include "kernels/selection/sparcas/select_dims.h"
#include "kernels/selection/sparcas/select_tokens.h"
#include "kernels/selection/sparcas/select_tokens_isa.h"
#include "kernels/selection/token_choice.h"

namespace spl::kernels::cpu {
namespace {

constexpr float kLog2E = 1.4426950408889634f;

struct Stream {
  const SelectTokensArgs& a;
  const SelectTokensKernels& kernels;
  const SelectingSequence& s;
  int32_t head, group;
  const float* q;  // [group, head_dim]
  CompactKeys compact;
  Candidates own;

  int32_t* dims(int parity) const { return s.dims + (2 * int64_t{head} + parity) * a.num_dims; }

  template <typename T>
  void GatherAs(int32_t begin, int32_t end, std::span<const int32_t> slots, const int32_t* dims) const {
    for (int32_t j = begin; j < end; ++j) {
      const int32_t position = own.position(j);
      const T* key = reinterpret_cast<const T*>(a.pool.k(s.page_tables[head][position / kPageTokens])) +
                     int64_t{position % kPageTokens} * a.shape.head_dim;
      T* to = reinterpret_cast<T*>(a.pool.k(s.compact_tables[head][j / compact.page_tokens()])) + compact.element(j);
      for (const int32_t slot : slots) to[int64_t{slot} * kPageTokens] = key[dims[slot]];
    }
  }
  // Widens: compact keys of a pool of kE4M3 are bf16.
  void GatherCodes(int32_t begin, int32_t end, std::span<const int32_t> slots, const int32_t* dims) const {
    for (int32_t j = begin; j < end; ++j) {
      const int32_t position = own.position(j), slot_of = position % kPageTokens;
      std::byte* const keys = a.pool.k(s.page_tables[head][position / kPageTokens]);
      const uint8_t* codes = reinterpret_cast<const uint8_t*>(keys) + int64_t{slot_of} * a.shape.head_dim;
      const float scale = RowScaleValue(a.pool.scales(keys)[slot_of]);
      auto* const to =
          reinterpret_cast<bf16*>(a.pool.k(s.compact_tables[head][j / compact.page_tokens()])) + compact.element(j);
      for (const int32_t slot : slots) to[int64_t{slot} * kPageTokens] = ToBf16(kE4M3Values[codes[dims[slot]]] * scale);
    }
  }
  void Gather(int32_t begin, int32_t end, std::span<const int32_t> slots, const int32_t* dims) const {
    if (slots.empty()) return;
    switch (a.pool.dtype) {
      case DType::kF32:
        return GatherAs<uint32_t>(begin, end, slots, dims);
      case DType::kE4M3:
        return GatherCodes(begin, end, slots, dims);
      default:
        return GatherAs<uint16_t>(begin, end, slots, dims);
    }
  }

  // Brings the compact keys up to date; returns the valid dimensions.
  const int32_t* Update() const {
    const int32_t* dims = this->dims(s.step.parity);
    const int32_t gathered = s.step.first ? 0 : s.step.compact_len;
    if (s.step.refresh) {
      int32_t* next = this->dims(1 - s.step.parity);
      const std::vector<int32_t> changed =
          SelectDims(q, group, a.shape.head_dim, a.num_dims, s.step.first ? nullptr : dims, next);
      Gather(0, gathered, changed, next);
      dims = next;
    }
    thread_local std::vector<int32_t> all;
    all.resize(static_cast<size_t>(a.num_dims));
    std::iota(all.begin(), all.end(), 0);
    Gather(gathered, own.count(), all, dims);
    return dims;
  }

  // w [64 ceil(candidates / 64)], in the scratch of this thread.
  const float* Weights(const int32_t* dims) const {
    thread_local Scratch scratch;
    const int64_t num_tiles = (int64_t{own.count()} + kPageTokens - 1) / kPageTokens, stride = num_tiles * kPageTokens;
    float* scores = scratch.Floats(static_cast<size_t>(group * (stride + a.num_dims + 1)));
    float* packed = scores + group * stride;
    float* factors = packed + int64_t{group} * a.num_dims;
    for (int32_t h = 0; h < group; ++h) {
      for (int32_t i = 0; i < a.num_dims; ++i)
        packed[h * a.num_dims + i] = q[int64_t{h} * a.shape.head_dim + dims[i]] * (a.shape.sm_scale * kLog2E);
    }
    const int64_t tiles_per_page = compact.page_tokens() / kPageTokens;
    for (int64_t tile = 0; tile < num_tiles; tile += tiles_per_page) {
      kernels.score_tiles({.keys = a.pool.k(s.compact_tables[head][tile / tiles_per_page]),
                           .q = packed,
                           .scores = scores + tile * kPageTokens,
                           .score_stride = stride,
                           .dtype = compact.dtype(),
                           .num_tiles = static_cast<int32_t>(std::min(tiles_per_page, num_tiles - tile)),
                           .num_heads = group,
                           .num_dims = a.num_dims});
    }
    for (int32_t h = 0; h < group; ++h) {
      float* of_head = scores + h * stride;
      std::fill(of_head + own.count(), of_head + stride, -std::numeric_limits<float>::infinity());
      factors[h] = 1.0f / kernels.exp_sum(of_head, num_tiles);
    }
    kernels.add_heads(scores, stride, factors, group, num_tiles, scores);
    return scores;
  }

  void Run(int32_t* tokens, int32_t* count, float* weights) const {
    const int32_t* dims = Update();
    const int32_t num = own.count();
    const bool everything = num <= s.budget;
    if (everything) *count = static_cast<int32_t>(own.Copy(0, num, tokens) - tokens);
    if (everything && weights == nullptr) return;
    const float* w = Weights(dims);
    if (weights != nullptr) std::copy_n(w, num, weights);
    if (everything) return;
    thread_local std::vector<uint32_t> bits;
    bits.resize(static_cast<size_t>(num));
    std::transform(w, w + num, bits.begin(), WeightBits);
    ChooseLargest(bits, s.budget, s.recent, tokens);
    own.ToPositions({tokens, static_cast<size_t>(s.budget)});
    *count = s.budget;
  }
};

}  // namespace

absl::Status SelectTokens(const KernelContext& ctx, const SelectTokensArgs& a) {
  if (absl::Status s = ValidateHostSelectTokens(a); !s.ok()) return s;
  const SelectTokensKernels& kernels = SelectTokensKernelsFor(ctx.isa);
  const int32_t group = a.shape.num_qo_heads / a.shape.num_kv_heads;
  ParallelTasks(ctx, static_cast<int64_t>(a.sequences.size()) * a.shape.num_kv_heads, [&](int64_t stream) {
    const int64_t i = stream / a.shape.num_kv_heads;
    const auto head = static_cast<int32_t>(stream % a.shape.num_kv_heads);
    const SelectingSequence& s = a.sequences[static_cast<size_t>(i)];
    if (!s.selects(head)) return;
    const float* q = a.q + i * a.q_row_stride + int64_t{head} * group * a.shape.head_dim;
    const Stream x{a, kernels, s, head, group, q, {a.shape.head_dim, a.num_dims, a.pool.dtype}, {a.pool, s, head}};
    x.Run(a.lists.tokens + stream * a.lists.stride, &a.lists.counts[stream],
          a.weights == nullptr ? nullptr : a.weights + stream * a.weights_stride);
  });
  return absl::OkStatus();
}

}  // namespace spl::kernels::cpu
