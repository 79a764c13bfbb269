// Work is cut into tiles of (sequence, KV head, consecutive rows). A tile stacks the query heads of its KV head, walks
// the pages in ascending order, and widens each page once for all its rows.
#include <algorithm>
#include <bit>
#include <cassert>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/attention/attention_isa.h"
#include "kernels/attention/visible_pages.h"
#include "kernels/common/kv_rows.h"
#include "kernels/common/parallel.h"
#include "kernels/common/scratch.h"

namespace spl::kernels::cpu {
namespace {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Query rows (positions x heads of the group) per tile. Widening a page costs about as much as 10 rows of attention, so
// 96 rows keep it near a tenth; more would cost balance between threads and overflow the second-level cache.
constexpr int32_t kRowsPerTile = 96;

struct Tile {
  const PrefillSequence* sequence;
  int32_t kv_head;
  int32_t begin, end;  // rows, relative to the sequence
  int64_t cost;        // about: rows x pages
};

// The memory of one tile, in one piece of scratch.
struct TileMemory {
  float *q, *keys, *values, *max, *sum, *out;
  uint64_t* visible;
  std::byte* gathered;  // a page of columns of kLines
};

TileMemory Carve(Scratch& scratch, int32_t rows, int32_t head_dim, int32_t stride) {
  const size_t sizes[] = {static_cast<size_t>(rows) * head_dim,
                          static_cast<size_t>(kPageTokens) * head_dim,
                          static_cast<size_t>(kPageTokens) * stride,
                          static_cast<size_t>(rows),
                          static_cast<size_t>(rows),
                          static_cast<size_t>(rows) * stride,
                          static_cast<size_t>(rows) * 2,
                          static_cast<size_t>(2 * kPageTokens) * head_dim};
  size_t total = 0;
  for (size_t s : sizes) total += (s + 15) / 16 * 16;
  float* at[std::size(sizes)];
  float* p = scratch.Floats(total);
  for (size_t i = 0; i < std::size(sizes); ++i) {
    at[i] = p;
    p += (sizes[i] + 15) / 16 * 16;
  }
  return {at[0],
          at[1],
          at[2],
          at[3],
          at[4],
          at[5],
          reinterpret_cast<uint64_t*>(at[6]),
          reinterpret_cast<std::byte*>(at[7])};
}

class TileRun {
 public:
  TileRun(const AttentionKernels& kernels, const PrefillAttentionArgs& args, const Tile& tile, Scratch& scratch)
      : k_(kernels),
        a_(args),
        t_(tile),
        stream_(tile.sequence->heads[tile.kv_head]),
        group_(args.shape.num_qo_heads / args.shape.num_kv_heads),
        rows_((tile.end - tile.begin) * group_),
        dim_(args.shape.head_dim),
        stride_((dim_ + kernels.lanes - 1) / kernels.lanes * kernels.lanes),
        m_(Carve(scratch, rows_, dim_, stride_)) {}

  void Run() {
    PackQueries();
    std::fill_n(m_.max, rows_, -std::numeric_limits<float>::infinity());
    std::fill_n(m_.sum, rows_, 0.0f);
    std::fill_n(m_.out, static_cast<int64_t>(rows_) * stride_, 0.0f);
    const VisiblePages pages(stream_.visibility);
    const int32_t low = Position(0), high = Position(rows_ - 1);
    for (int32_t page = pages.Next(0, low, high); page != VisiblePages::kNone;) {
      const int32_t next = pages.Next(page + 1, low, high);
      next_page_ = next == VisiblePages::kNone ? kNoPage : stream_.page_table[next];
      AttendPage(pages, page);
      page = next;
    }
    if (stream_.visibility.rule == VisibilityRule::kLines) AttendColumns();
    WriteOut();
  }

 private:
  int32_t Position(int32_t row) const { return t_.sequence->positions[t_.begin + row / group_]; }
  int64_t GlobalRow(int32_t row) const { return t_.sequence->row_begin + t_.begin + row / group_; }
  int32_t Head(int32_t row) const { return t_.kv_head * group_ + row % group_; }

  void PackQueries() {
    const float scale = a_.shape.sm_scale * kLog2E;
    for (int32_t r = 0; r < rows_; ++r) {
      const float* q = a_.q + GlobalRow(r) * a_.q_row_stride + static_cast<int64_t>(Head(r)) * dim_;
      float* to = m_.q + static_cast<int64_t>(r) * dim_;
      for (int32_t c = 0; c < dim_; ++c) to[c] = q[c] * scale;
    }
  }

  // Rows that see nothing of the page are left out, so that they stay exactly as they are.
  void AttendPage(const VisiblePages& pages, int32_t page) {
    for (int32_t r = 0; r < rows_; r += group_) std::fill_n(m_.visible + r, group_, pages.Slots(page, Position(r)));
    bool widened = false;
    for (int32_t begin = 0; begin < rows_;) {
      if (m_.visible[begin] == 0) {
        begin += group_;
        continue;
      }
      int32_t end = begin;
      while (end < rows_ && m_.visible[end] != 0) end += group_;
      if (!widened && !Widen(page)) return;
      widened = true;
      AttendRows(begin, end);
      begin = end;
    }
  }

  // The single columns of the row tile, gathered 64 at a time.
  void AttendColumns() {
    const LineVisibility& v = *stream_.visibility.lines;
    const int64_t row_tile = (Position(0) - v.first_position) / 64;
    const uint64_t* masks = v.column_masks + row_tile * v.column_words;
    std::byte* const keys = m_.gathered;
    std::byte* const values = keys + a_.pool.half_bytes();
    int32_t count = 0;
    const auto attend = [&] {
      if (count == 0) return;
      k_.transpose_keys(keys, a_.pool.dtype, dim_, count, m_.keys);
      k_.widen_values(values, a_.pool.dtype, dim_, count, stride_, m_.values);
      std::fill_n(m_.visible, rows_, count == 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1);
      next_page_ = kNoPage;
      AttendRows(0, rows_);
      count = 0;
    };
    for (int32_t word = 0; word < v.column_words; ++word) {
      for (uint64_t bits = masks[word]; bits != 0; bits &= bits - 1) {
        const int32_t column = v.columns[word * 64 + std::countr_zero(bits)];
        const int32_t physical = stream_.page_table[column / kPageTokens];
        assert(physical != kNoPage && "a visible position is not resident");
        if (physical == kNoPage) continue;
        const int32_t slot = column % kPageTokens;
        CopyKvRows(a_.pool.dtype, dim_, a_.pool.k(physical), slot, keys, count, 1);
        CopyKvRows(a_.pool.dtype, dim_, a_.pool.v(physical), slot, values, count, 1);
        if (++count == kPageTokens) attend();
      }
    }
    attend();
  }

  bool Widen(int32_t page) {
    const int32_t physical = stream_.page_table[page];
    assert(physical != kNoPage && "a visible position is not resident");
    if (physical == kNoPage) return false;
    const int32_t num_tokens = std::min(kPageTokens, stream_.kv_len - page * kPageTokens);
    k_.transpose_keys(a_.pool.k(physical), a_.pool.dtype, dim_, num_tokens, m_.keys);
    k_.widen_values(a_.pool.v(physical), a_.pool.dtype, dim_, num_tokens, stride_, m_.values);
    return true;
  }

  void AttendRows(int32_t begin, int32_t end) {
    PrefillPage p;
    p.q = m_.q + static_cast<int64_t>(begin) * dim_;
    p.keys = m_.keys;
    p.values = m_.values;
    p.visible = m_.visible + begin;
    p.max = m_.max + begin;
    p.sum = m_.sum + begin;
    p.out = m_.out + static_cast<int64_t>(begin) * stride_;
    if (next_page_ != kNoPage) p.next_page = a_.pool.k(next_page_);
    p.page_bytes = static_cast<int64_t>(a_.pool.page_bytes());
    p.num_rows = end - begin;
    p.head_dim = dim_;
    p.value_stride = stride_;
    k_.prefill_page(p);
  }

  // "+ 0" turns -0 into +0: the sign of a zero sum could depend on how many masked zeros were added to it.
  void WriteOut() {
    for (int32_t r = 0; r < rows_; ++r) {
      const int64_t at = GlobalRow(r) * a_.shape.num_qo_heads + Head(r);
      const float inverse = m_.sum[r] > 0 ? 1.0f / m_.sum[r] : 0.0f;
      const float* from = m_.out + static_cast<int64_t>(r) * stride_;
      for (int32_t c = 0; c < dim_; ++c) a_.out[at * dim_ + c] = from[c] * inverse + 0.0f;
      if (a_.lse == nullptr) continue;
      a_.lse[at] = m_.sum[r] > 0 ? (m_.max[r] + std::log2(m_.sum[r])) * kLn2 : -std::numeric_limits<float>::infinity();
    }
  }

  const AttentionKernels& k_;
  const PrefillAttentionArgs& a_;
  const Tile& t_;
  const HeadStreamView& stream_;
  const int32_t group_, rows_, dim_, stride_;
  const TileMemory m_;
  int32_t next_page_ = kNoPage;  // physical; only a hint
};

int64_t PagesSeen(const LineVisibility& v, int32_t position) {
  const int64_t row_tile = (position - v.first_position) / 64;
  int64_t pages = 1, columns = 0;
  for (int32_t i = 0; i < v.tile_words; ++i) pages += std::popcount(v.tiles[row_tile * v.tile_words + i]);
  for (int32_t i = 0; i < v.column_words; ++i) columns += std::popcount(v.column_masks[row_tile * v.column_words + i]);
  return pages + columns / kPageTokens;
}

int64_t PagesSeen(const HeadVisibility& v, int32_t position) {
  const int64_t causal = position / kPageTokens + 1;
  switch (v.rule) {
    case VisibilityRule::kFull:
      break;
    case VisibilityRule::kBand:
      return std::min<int64_t>(causal, (int64_t{v.num_sinks} + v.window) / kPageTokens + 2);
    case VisibilityRule::kList:
    case VisibilityRule::kSelected:  // refused by the validation, as the next one
    case VisibilityRule::kElsewhere:
      return std::min<int64_t>(causal, static_cast<int64_t>(v.indices.size()));
    case VisibilityRule::kLines:
      return PagesSeen(*v.lines, position);
  }
  return causal;
}

// Longest first, so that no thread starts a long tile when the others are done.
std::vector<Tile> MakeTiles(const PrefillAttentionArgs& a) {
  const int32_t group = a.shape.num_qo_heads / a.shape.num_kv_heads;
  const int32_t step = std::max(1, kRowsPerTile / group);
  std::vector<Tile> tiles;
  for (const PrefillSequence& s : a.sequences) {
    const int32_t num_rows = s.row_end - s.row_begin;
    const int32_t first = a.last_rows > 0 ? std::max(0, num_rows - a.last_rows) : 0;
    for (int32_t h = 0; h < a.shape.num_kv_heads; ++h) {
      // Rows of one row tile only: all of a tile see the same columns.
      const bool lines = s.heads[h].visibility.rule == VisibilityRule::kLines;
      for (int32_t begin = first, end = 0; begin < num_rows; begin = end) {
        end = std::min(num_rows, lines ? (begin / 64 + 1) * 64 : begin + step);
        tiles.push_back({&s, h, begin, end, (end - begin) * PagesSeen(s.heads[h].visibility, s.positions[end - 1])});
      }
    }
  }
  std::stable_sort(tiles.begin(), tiles.end(), [](const Tile& x, const Tile& y) { return x.cost > y.cost; });
  return tiles;
}

}  // namespace

absl::Status PrefillAttention(const KernelContext& ctx, const PrefillAttentionArgs& a) {
  if (absl::Status s = ValidatePrefillAttention(a); !s.ok()) return s;
  const AttentionKernels& kernels = AttentionKernelsFor(ctx.isa);
  const std::vector<Tile> tiles = MakeTiles(a);
  ParallelTasks(ctx, static_cast<int64_t>(tiles.size()), [&](int64_t i) {
    thread_local Scratch scratch;
    TileRun(kernels, a, tiles[static_cast<size_t>(i)], scratch).Run();
  });
  return absl::OkStatus();
}

}  // namespace spl::kernels::cpu
