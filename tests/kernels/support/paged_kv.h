// Head streams with known keys and values, laid into a page pool in which everything else is NaN.
#pragma once

#include <algorithm>
#include <cstring>
#include <numeric>
#include <span>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/common/kv_rows.h"
#include "tests/kernels/support/kernel_test_util.h"

namespace spl::kernels::testing {

// One (sequence, KV head): K and V [length, head_dim], and where its pages ended up.
struct TestStream {
  int32_t kv_len = 0;
  std::vector<float> k, v;
  std::vector<int32_t> page_table;
  std::vector<int32_t> indices;  // owned here for visibility
  HeadVisibility visibility;

  HeadStreamView view() const {
    HeadStreamView s{page_table, kv_len, visibility};
    s.visibility.indices = indices;
    return s;
  }
};

inline TestStream MakeStream(Random& random, int32_t kv_len, int32_t head_dim) {
  TestStream s;
  s.kv_len = kv_len;
  s.k = random.Normals(static_cast<size_t>(kv_len) * head_dim);
  s.v = random.Normals(static_cast<size_t>(kv_len) * head_dim);
  return s;
}

inline bool Visible(const HeadVisibility& v, std::span<const int32_t> indices, int32_t p, int32_t j) {
  if (j > p) return false;
  switch (v.rule) {
    case VisibilityRule::kFull:
      return true;
    case VisibilityRule::kBand:
      return j < v.num_sinks || j > p - v.window;
    case VisibilityRule::kList:
    case VisibilityRule::kSelected:
      return std::binary_search(indices.begin(), indices.end(), j);
    case VisibilityRule::kElsewhere:
    case VisibilityRule::kLines:
      return false;  // tests of lines have their own
  }
  return false;
}

class TestPool {
 public:
  TestPool(DType dtype, int32_t head_dim, int32_t num_pages)
      : bytes_(static_cast<size_t>(num_pages) * KvPageBytes(dtype, head_dim) + 64, kNan) {
    const auto address = reinterpret_cast<uintptr_t>(bytes_.data());
    view_ = {bytes_.data() + (64 - address % 64) % 64, dtype, head_dim, num_pages};
    free_.resize(num_pages);
    std::iota(free_.begin(), free_.end(), 0);
  }

  const KvPoolView& view() const { return view_; }
  void Shuffle(Random& random) { std::shuffle(free_.begin(), free_.end(), random.engine()); }

  // Gives the stream pages and writes it. Pages for which `skip` says so stay kNoPage.
  template <typename Skip>
  void Place(TestStream& s, const Skip& skip) {
    s.page_table.clear();
    for (int32_t i = 0; i * kPageTokens < s.kv_len; ++i) {
      if (skip(i)) {
        s.page_table.push_back(kNoPage);
        continue;
      }
      ASSERT_FALSE(free_.empty());
      s.page_table.push_back(free_.back());
      free_.pop_back();
    }
    for (int32_t j = 0; j < s.kv_len; ++j) {
      const int32_t page = s.page_table[j / kPageTokens];
      if (page == kNoPage) continue;
      Write(view_.k(page), j % kPageTokens, &s.k[static_cast<size_t>(j) * view_.head_dim]);
      Write(view_.v(page), j % kPageTokens, &s.v[static_cast<size_t>(j) * view_.head_dim]);
    }
  }
  void Place(TestStream& s) {
    Place(s, [](int32_t) { return false; });
  }

  // A page that nothing has been written to.
  int32_t Take() {
    EXPECT_FALSE(free_.empty());
    const int32_t page = free_.back();
    free_.pop_back();
    return page;
  }
  // Writes K and V of one position of a stream that has its page.
  void WriteToken(const TestStream& s, int32_t j) {
    Write(view_.k(s.page_table[j / kPageTokens]), j % kPageTokens, &s.k[static_cast<size_t>(j) * view_.head_dim]);
    Write(view_.v(s.page_table[j / kPageTokens]), j % kPageTokens, &s.v[static_cast<size_t>(j) * view_.head_dim]);
  }
  // All pages, one after the other.
  std::span<const std::byte> bytes() const {
    return {view_.base, static_cast<size_t>(view_.num_pages) * view_.page_bytes()};
  }

 private:
  static constexpr std::byte kNan{0xff};  // of these bytes everything is NaN in every type

  void Write(std::byte* half, int32_t slot, const float* row) {
    StoreKvRow(view_.dtype, view_.head_dim, half, slot, row);
  }

  std::vector<std::byte> bytes_;
  KvPoolView view_;
  std::vector<int32_t> free_;
};

// The pages of a pool in another type, each row rounded once, under the same numbers.
class ConvertedPages {
 public:
  ConvertedPages(const KvPoolView& from, DType to)
      : bytes_(static_cast<size_t>(from.num_pages) * KvPageBytes(to, from.head_dim)) {
    view_ = {bytes_.data(), to, from.head_dim, from.num_pages, from.first_page};
    std::vector<float> row(static_cast<size_t>(from.head_dim));
    for (int32_t page = from.first_page; page < from.first_page + from.num_pages; ++page) {
      for (int32_t slot = 0; slot < kPageTokens; ++slot) {
        LoadKvRow(from.dtype, from.head_dim, from.k(page), slot, row.data());
        StoreKvRow(to, from.head_dim, view_.k(page), slot, row.data());
        LoadKvRow(from.dtype, from.head_dim, from.v(page), slot, row.data());
        StoreKvRow(to, from.head_dim, view_.v(page), slot, row.data());
      }
    }
  }
  const KvPoolView& view() const { return view_; }
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
  KvPoolView view_;
};

}  // namespace spl::kernels::testing
