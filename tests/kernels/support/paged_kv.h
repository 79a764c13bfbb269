// Head streams with known keys and values, laid into a page pool in which everything else is NaN.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <span>
#include <string>
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

// Rows of pages of kE4M3 that two backends wrote, where the values may differ in their last bits before they are
// rounded. A value that lies in the middle between two codes then becomes either, and these are up to an eighth of it
// apart: more than ToleranceFor allows. Each element may therefore be one code away, and 1 in 10,000 of all may differ,
// and one more. Norms and rotations in f32 move one in a million; a wrong way to round moves every second one.
class CodeRows {
 public:
  // Row `slot` of half a page each.
  void Compare(int32_t head_dim, const std::byte* got, const std::byte* want, int32_t slot, const std::string& what) {
    const uint8_t got_scale = KvRowScale(head_dim, got, slot), want_scale = KvRowScale(head_dim, want, slot);
    ASSERT_LE(std::abs(got_scale - want_scale), 1) << what << ": scales";
    const float scale = RowScaleValue(std::max(got_scale, want_scale));
    for (int32_t c = 0; c < head_dim; ++c) {
      const float x = KvElement(DType::kE4M3, head_dim, got, slot, c);
      const float y = KvElement(DType::kE4M3, head_dim, want, slot, c);
      ++compared_;
      if (x == y || (std::isnan(x) && std::isnan(y))) continue;
      ++differ_;
      ASSERT_LE(std::abs(x - y), Step(std::min(std::abs(x), std::abs(y)), scale))
          << what << " at " << c << ": " << x << ", want " << y;
    }
  }
  // After the last row.
  void ExpectFewDiffer(const std::string& what) const {
    EXPECT_LE(differ_, compared_ / 10000 + 1) << what << ": elements that differ, of " << compared_;
  }

 private:
  // From a magnitude to that of the next code. Below 2^-6 codes are multiples of 2^-9.
  static float Step(float magnitude, float scale) {
    return std::ldexp(1.0f, std::ilogb(std::max(magnitude, scale * 0x1p-6f)) - 3);
  }

  size_t compared_ = 0, differ_ = 0;
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
