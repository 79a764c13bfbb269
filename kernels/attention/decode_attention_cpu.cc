// Work is cut into (head stream, 512 positions, or entries of a list). Each part gives a softmax state (max, sum, out);
// the parts of a stream are merged in order. The cut depends on those alone, never on load: see "Determinism" in
// attention.h.
#include <algorithm>
#include <bit>
#include <cassert>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/attention/attention_isa.h"
#include "kernels/attention/visible_pages.h"
#include "kernels/common/e4m3_rows.h"
#include "kernels/common/parallel.h"
#include "kernels/common/scratch.h"

namespace spl::kernels::cpu {
namespace {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// 512 positions of bf16 at head_dim 64 are 128 KiB of pages. Reading them takes about 10 us, ten times the cost of
// handing out a part, and parts are small enough that one long sequence keeps many cores busy.
constexpr int32_t kPagesPerPart = 8;

struct Part {
  int32_t stream;
  int32_t first;  // page; of a stream with a list: 64 entries of it take the place of a page
};

// Shared by all parts of one call. State of part i: max [group], sum [group], out [group, padded].
struct Call {
  const DecodeAttentionArgs& a;
  const AttentionKernels& kernels;
  const std::vector<Part>& parts;
  float* states;
  int32_t group, padded;

  int64_t state_floats() const { return (static_cast<int64_t>(group) * (padded + 2) + 15) / 16 * 16; }
  float* state(int64_t part) const { return states + part * state_floats(); }
};

// The place of dimension c in a padded row: see DecodePage.
int32_t PlaceOf(const Call& call, int32_t c) {
  if (call.a.pool.dtype == DType::kF32) return c;
  const int32_t block = 2 * call.kernels.lanes;
  return c / block * block + c % 2 * call.kernels.lanes + c % block / 2;
}

void PackQueries(const Call& call, int32_t stream, float* q) {
  const AttentionShape& shape = call.a.shape;
  const int64_t sequence = stream / shape.num_kv_heads, head = int64_t{stream} % shape.num_kv_heads * call.group;
  const float* from = call.a.q + sequence * call.a.q_row_stride + head * shape.head_dim;
  const float scale = shape.sm_scale * kLog2E;
  std::fill_n(q, static_cast<int64_t>(call.group) * call.padded, 0.0f);
  for (int32_t g = 0; g < call.group; ++g) {
    for (int32_t c = 0; c < shape.head_dim; ++c) {
      q[g * call.padded + PlaceOf(call, c)] = from[g * shape.head_dim + c] * scale;
    }
  }
}

int32_t RowsOf(uint64_t visible, int64_t row_bytes, int64_t* rows) {
  int32_t n = 0;
  for (; visible != 0; visible &= visible - 1) rows[n++] = std::countr_zero(visible) * row_bytes;
  return n;
}

// The factors of the codes of a page of kE4M3, for the slots of a DecodePage.
struct SlotScales {
  float keys[kPageTokens] = {}, values[kPageTokens] = {};

  void Set(int32_t i, const KvPoolView& pool, int32_t page, int32_t slot) {
    keys[i] = RowScaleValue(pool.scales(pool.k(page))[slot]);
    values[i] = RowScaleValue(pool.scales(pool.v(page))[slot]);
  }
};

bool HasList(const HeadStreamView& stream) { return stream.visibility.rule == VisibilityRule::kList; }

// The visible slots of one page after the other.
void RunPages(const Call& call, const Part& part, DecodePage& p) {
  const HeadStreamView& stream = call.a.streams[part.stream];
  const KvPoolView& pool = call.a.pool;
  int64_t rows[kPageTokens];
  SlotScales scales;
  p.rows = rows;
  p.key_scales = scales.keys;
  p.value_scales = scales.values;
  const VisiblePages pages(stream.visibility);
  const int64_t row_bytes = p.head_dim * static_cast<int64_t>(DTypeBytes(pool.dtype));
  const int32_t position = stream.kv_len - 1, end = part.first + kPagesPerPart;
  int32_t page = pages.Next(part.first, position, position);
  while (page < end) {
    const int32_t next = pages.Next(page + 1, position, position);
    const int32_t physical = stream.page_table[page];
    const int32_t ahead = next == VisiblePages::kNone ? kNoPage : stream.page_table[next];
    const uint64_t visible = pages.Slots(page, position);
    p.num_slots = RowsOf(visible, row_bytes, rows);
    assert((physical != kNoPage || p.num_slots == 0) && "a visible position is not resident");
    if (physical != kNoPage && p.num_slots > 0) {
      if (pool.dtype == DType::kE4M3) {
        int32_t n = 0;
        for (uint64_t left = visible; left != 0; left &= left - 1)
          scales.Set(n++, pool, physical, std::countr_zero(left));
      }
      p.keys = pool.k(physical);
      p.values = pool.v(physical);
      p.next_keys = ahead == kNoPage ? nullptr : pool.k(ahead);
      p.next_values = ahead == kNoPage ? nullptr : pool.v(ahead);
      call.kernels.decode_page(p);
    }
    page = next;
  }
}

// Runs over 64 entries of a list after the other, wherever they lie. Offsets of rows count from the first page of the
// pool.
void RunList(const Call& call, const Part& part, DecodePage& p) {
  const HeadStreamView& stream = call.a.streams[part.stream];
  const KvPoolView& pool = call.a.pool;
  const std::span<const int32_t> list = stream.visibility.indices;
  const int64_t row_bytes = p.head_dim * static_cast<int64_t>(DTypeBytes(pool.dtype));
  int64_t rows[2][kPageTokens];
  SlotScales scales[2];
  p.values = pool.base + pool.half_bytes();
  p.keys = pool.base;
  size_t at = static_cast<size_t>(part.first) * kPageTokens;
  const size_t end = std::min(list.size(), at + kPagesPerPart * kPageTokens);
  const auto take = [&](int turn) {
    int32_t n = 0;
    for (; n < kPageTokens && at < end && list[at] < stream.kv_len; ++at) {
      const int32_t j = list[at], page = stream.page_table[j / kPageTokens];
      assert(page != kNoPage && "a visible position is not resident");
      if (page == kNoPage) continue;
      if (pool.dtype == DType::kE4M3) scales[turn].Set(n, pool, page, j % kPageTokens);
      rows[turn][n++] = pool.k(page) - pool.base + j % kPageTokens * row_bytes;
    }
    return n;
  };
  int turn = 0;
  p.num_next = take(turn);
  while (p.num_next > 0) {
    p.rows = rows[turn];
    p.key_scales = scales[turn].keys;
    p.value_scales = scales[turn].values;
    p.num_slots = p.num_next;
    turn ^= 1;
    p.next_rows = rows[turn];
    p.num_next = take(turn);
    p.next_keys = p.num_next > 0 ? p.keys : nullptr;
    p.next_values = p.num_next > 0 ? p.values : nullptr;
    call.kernels.decode_page(p);
  }
}

void RunPart(const Call& call, int64_t index) {
  thread_local Scratch scratch;
  const Part part = call.parts[static_cast<size_t>(index)];
  const int64_t row_floats = static_cast<int64_t>(call.group) * call.padded;
  float* q = scratch.Floats(row_floats + static_cast<int64_t>(call.group) * kPageTokens);
  PackQueries(call, part.stream, q);
  float* state = call.state(index);
  std::fill_n(state, call.group, -std::numeric_limits<float>::infinity());
  std::fill_n(state + call.group, call.group + row_floats, 0.0f);

  DecodePage p;
  p.q = q;
  p.scores = q + row_floats;
  std::fill_n(p.scores, static_cast<int64_t>(call.group) * kPageTokens, 0.0f);
  p.max = state;
  p.sum = state + call.group;
  p.out = state + 2 * call.group;
  p.dtype = call.a.pool.dtype;
  p.num_heads = call.group;
  p.head_dim = call.a.shape.head_dim;
  p.padded_dim = call.padded;
  if (HasList(call.a.streams[part.stream])) {
    RunList(call, part, p);
  } else {
    RunPages(call, part, p);
  }
}

// Parts [begin, end) belong to `stream`; none means that it sees nothing.
void Merge(const Call& call, int32_t stream, int64_t begin, int64_t end) {
  const AttentionShape& shape = call.a.shape;
  const int64_t sequence = stream / shape.num_kv_heads, first_head = int64_t{stream} % shape.num_kv_heads * call.group;
  for (int32_t g = 0; g < call.group; ++g) {
    const int64_t at = sequence * shape.num_qo_heads + first_head + g;
    float* out = call.a.out + at * shape.head_dim;
    float max = -std::numeric_limits<float>::infinity(), sum = 0;
    for (int64_t i = begin; i < end; ++i) max = std::max(max, call.state(i)[g]);
    std::fill_n(out, shape.head_dim, 0.0f);
    for (int64_t i = begin; i < end; ++i) {
      const float* state = call.state(i);
      if (state[call.group + g] == 0) continue;
      const float factor = std::exp2(state[g] - max);
      const float* from = state + 2 * call.group + static_cast<int64_t>(g) * call.padded;
      sum += state[call.group + g] * factor;
      for (int32_t c = 0; c < shape.head_dim; ++c) out[c] += from[PlaceOf(call, c)] * factor;
    }
    const float inverse = sum > 0 ? 1.0f / sum : 0.0f;
    for (int32_t c = 0; c < shape.head_dim; ++c) out[c] = out[c] * inverse + 0.0f;
    if (call.a.lse != nullptr) {
      call.a.lse[at] = sum > 0 ? (max + std::log2(sum)) * kLn2 : -std::numeric_limits<float>::infinity();
    }
  }
}

// Parts in order of streams; first[s] .. first[s + 1] are those of stream s.
void MakeParts(const DecodeAttentionArgs& a, std::vector<Part>& parts, std::vector<int64_t>& first) {
  parts.clear();
  first.assign(1, 0);
  for (size_t s = 0; s < a.streams.size(); ++s) {
    if (HasList(a.streams[s])) {
      const auto entries = static_cast<int32_t>(a.streams[s].visibility.indices.size());
      for (int32_t begin = 0; begin * kPageTokens < entries; begin += kPagesPerPart)
        parts.push_back({static_cast<int32_t>(s), begin});
      first.push_back(static_cast<int64_t>(parts.size()));
      continue;
    }
    const VisiblePages pages(a.streams[s].visibility);
    const int32_t position = a.streams[s].kv_len - 1;
    for (int32_t page = pages.Next(0, position, position); page != VisiblePages::kNone;) {
      const int32_t begin = page / kPagesPerPart * kPagesPerPart;
      parts.push_back({static_cast<int32_t>(s), begin});
      page = pages.Next(begin + kPagesPerPart, position, position);
    }
    first.push_back(static_cast<int64_t>(parts.size()));
  }
}

}  // namespace

absl::Status DecodeAttention(const KernelContext& ctx, const DecodeAttentionArgs& args) {
  if (absl::Status s = ValidateDecodeAttention(args); !s.ok()) return s;
  DecodeAttentionArgs a = args;
  thread_local std::vector<HeadStreamView> views;
  if (args.lists.tokens != nullptr) {  // lists chosen on this device are at hand here
    views.assign(args.streams.begin(), args.streams.end());
    for (size_t i = 0; i < views.size(); ++i) {
      if (views[i].visibility.rule != VisibilityRule::kSelected) continue;
      views[i].visibility.rule = VisibilityRule::kList;
      views[i].visibility.indices = args.lists.of(static_cast<int64_t>(i));
    }
    a.streams = views;
  }
  thread_local std::vector<Part> parts;
  thread_local std::vector<int64_t> first;
  thread_local Scratch states;
  MakeParts(a, parts, first);
  const AttentionKernels& kernels = AttentionKernelsFor(ctx.isa);
  const int32_t block = 2 * kernels.lanes;
  Call call{a,
            kernels,
            parts,
            nullptr,
            a.shape.num_qo_heads / a.shape.num_kv_heads,
            (a.shape.head_dim + block - 1) / block * block};
  call.states = states.Floats(static_cast<size_t>(call.state_floats()) * parts.size());
  ParallelTasks(ctx, static_cast<int64_t>(parts.size()), [&](int64_t i) { RunPart(call, i); });
  const std::vector<int64_t>& bounds = first;  // a worker's own thread_local is another one
  ParallelRows(ctx, static_cast<int64_t>(a.streams.size()), 16, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      if (call.a.streams[static_cast<size_t>(s)].visibility.rule == VisibilityRule::kElsewhere) continue;
      Merge(call, static_cast<int32_t>(s), bounds[s], bounds[s + 1]);
    }
  });
  return absl::OkStatus();
}

}  // namespace spl::kernels::cpu
