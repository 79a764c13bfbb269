// Decode batches whose sequences choose tokens: streams in a pool that is NaN wherever nothing was written, compact
// pages, dimension tables, and the checks that tests of all backends share.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "kernels/common/token_selection.h"
#include "kernels/selection/candidates.h"
#include "kernels/selection/sparcas/compact_keys.h"
#include "kernels/selection/sparcas/select_tokens.h"
#include "tests/kernels/support/paged_kv.h"

namespace spl::kernels::testing {

struct SelectingShape {
  int32_t kv_heads = 2, group = 4, head_dim = 64, num_dims = 16;
  DType dtype = DType::kBF16;

  AttentionShape attention() const {
    return {kv_heads * group, kv_heads, head_dim, 1.0f / std::sqrt(static_cast<float>(head_dim))};
  }
  int64_t q_width() const { return int64_t{kv_heads} * group * head_dim; }
};

// Keys of each type that a pool has; groups and heads of one and several.
inline constexpr std::array<SelectingShape, 4> kShapesOfAllTypes = {{{2, 4, 128, 16, DType::kBF16},
                                                                     {1, 1, 64, 16, DType::kF32},
                                                                     {2, 3, 16, 8, DType::kBF16},
                                                                     {2, 2, 64, 16, DType::kE4M3}}};

// A sequence that will have at most max_len positions; [0, kv_len) are written.
struct TestSequence {
  int32_t kv_len = 0, max_len = 0;
  int32_t budget = 64, recent = 1;
  LayerSelection step;
  std::vector<TestStream> streams;            // [kv_heads], each of max_len
  std::vector<std::vector<int32_t>> compact;  // [kv_heads]
  std::vector<int32_t> dims;                  // [kv_heads, 2, num_dims]
  // Where something was left out: [kv_heads] the positions in front of first_fresh that are there, and their pages.
  std::vector<std::vector<int32_t>> listed, list_pages;
  int32_t first_fresh = 0;
  std::vector<std::span<const int32_t>> page_tables, compact_tables, list_tables;

  SelectingSequence view() {
    page_tables.clear();
    compact_tables.clear();
    list_tables.clear();
    for (const TestStream& s : streams) page_tables.emplace_back(s.page_table);
    for (const auto& pages : compact) compact_tables.emplace_back(pages);
    for (const auto& pages : list_pages) list_tables.emplace_back(pages);
    return {page_tables, compact_tables, kv_len, step, budget, recent, dims.data(), list_tables, first_fresh};
  }
  // What a head may choose from: how many positions, and which.
  int32_t candidates(size_t head) const {
    return listed.empty() ? kv_len : static_cast<int32_t>(listed[head].size()) + kv_len - first_fresh;
  }
  int32_t position(size_t head, int32_t i) const {
    if (listed.empty()) return i;
    const auto n = static_cast<int32_t>(listed[head].size());
    return i < n ? listed[head][static_cast<size_t>(i)] : first_fresh + i - n;
  }
  // Positions as numbers of candidates; -1 for one that is none.
  std::vector<int32_t> NumbersOf(size_t head, std::span<const int32_t> tokens) const {
    std::vector<int32_t> all, numbers;
    for (int32_t i = 0; i < candidates(head); ++i) all.push_back(position(head, i));
    for (const int32_t token : tokens) {
      const auto at = std::lower_bound(all.begin(), all.end(), token);
      numbers.push_back(at == all.end() || *at != token ? -1 : static_cast<int32_t>(at - all.begin()));
    }
    return numbers;
  }
  // What follows a call: the next step appends one position, and names the table that a refresh has written.
  void Advance() {
    step.compact_len = candidates(0);  // as many in all heads
    if (step.refresh) step.parity ^= 1;
    step.refresh = step.first = false;
  }
};

// page_tokens: positions a compact page.
class SelectingBatch {
 public:
  SelectingBatch(const SelectingBatch&) = delete;
  SelectingBatch& operator=(const SelectingBatch&) = delete;

  SelectingBatch(Random& random, const SelectingShape& shape, const std::vector<std::pair<int32_t, int32_t>>& lengths,
                 int32_t page_tokens)
      : shape_(shape), page_tokens_(page_tokens), pool_(MakePool(shape, lengths, page_tokens)) {
    pool_->Shuffle(random);
    for (const auto& [kv_len, max_len] : lengths) {
      TestSequence s{.kv_len = kv_len, .max_len = max_len};
      for (int32_t h = 0; h < shape.kv_heads; ++h) {
        s.streams.push_back(MakeStream(random, max_len, shape.head_dim));
        s.compact.emplace_back();
        for (int32_t at = 0; at < max_len; at += page_tokens) s.compact.back().push_back(pool_->Take());
      }
      s.dims.assign(static_cast<size_t>(shape.kv_heads) * 2 * shape.num_dims, -1);
      s.step = {.selects = true, .refresh = true, .first = true};
      sequences_.push_back(std::move(s));
    }
    q_ = random.Normals(lengths.size() * shape.q_width());
  }
  SelectingBatch(Random& random, const SelectingShape& shape, const std::vector<std::pair<int32_t, int32_t>>& lengths)
      : SelectingBatch(random, shape, lengths, CompactKeys{shape.head_dim, shape.num_dims, shape.dtype}.page_tokens()) {
  }

  // Once K and V are as they shall be: gives pages to the streams and writes [0, kv_len) of each.
  void Write() {
    for (TestSequence& s : sequences_) {
      for (TestStream& stream : s.streams) {
        stream.page_table.clear();
        for (int32_t at = 0; at < s.max_len; at += kPageTokens) stream.page_table.push_back(pool_->Take());
        for (int32_t j = 0; j < s.kv_len; ++j) pool_->WriteToken(stream, j);
      }
    }
  }
  // Behind Write: of what is in front of `first_fresh` the sequence's heads only have `listed` [kv_heads] from here on.
  // The rest becomes NaN, and pages without any of it leave the tables. REQUIRES: first_fresh < kv_len.
  void Hold(size_t sequence, const std::vector<std::vector<int32_t>>& listed, int32_t first_fresh) {
    TestSequence& s = sequences_[sequence];
    s.listed = listed;
    s.first_fresh = first_fresh;
    s.step.listed = true;
    const int64_t per_page = ListEntriesPerPage(pool_->view().page_bytes());
    for (size_t h = 0; h < listed.size(); ++h) {
      TestStream& stream = s.streams[h];
      std::vector<char> there(static_cast<size_t>(first_fresh), 0);
      for (const int32_t j : listed[h]) there[static_cast<size_t>(j)] = 1;
      for (int32_t j = 0; j < first_fresh; ++j) {
        if (there[static_cast<size_t>(j)]) continue;
        const auto row = static_cast<size_t>(j) * static_cast<size_t>(shape_.head_dim);
        std::fill_n(stream.k.begin() + static_cast<int64_t>(row), shape_.head_dim, std::nanf(""));
        std::fill_n(stream.v.begin() + static_cast<int64_t>(row), shape_.head_dim, std::nanf(""));
        pool_->WriteToken(stream, j);
      }
      for (int32_t page = 0; (page + 1) * kPageTokens <= first_fresh; ++page) {
        const auto begin = there.begin() + page * kPageTokens;
        if (std::count(begin, begin + kPageTokens, 1) == 0) stream.page_table[static_cast<size_t>(page)] = kNoPage;
      }
      std::vector<int32_t> entries = {static_cast<int32_t>(listed[h].size())};
      entries.insert(entries.end(), listed[h].begin(), listed[h].end());
      s.list_pages.emplace_back();
      for (int64_t at = 0; at < ListPages(static_cast<int64_t>(listed[h].size()), pool_->view().page_bytes()); ++at) {
        s.list_pages.back().push_back(pool_->Take());
        const auto first = static_cast<size_t>(at * per_page);
        const size_t count = std::min(static_cast<size_t>(per_page), entries.size() - first);
        std::memcpy(pool_->view().k(s.list_pages.back().back()), &entries[first], count * sizeof(int32_t));
      }
    }
  }
  // The same with random lists, runs of `run` positions at most; every head has as many of `share` as the others.
  void HoldSome(Random& random, size_t sequence, int32_t run, double share) {
    TestSequence& s = sequences_[sequence];
    if (s.kv_len < 2) return;
    const int32_t first_fresh = random.Int(std::max(1, s.kv_len - 20), s.kv_len - 1);
    const auto wanted = static_cast<size_t>(std::max(0.0, share * first_fresh));
    std::vector<std::vector<int32_t>> listed(s.streams.size());
    for (auto& list : listed) {
      std::set<int32_t> positions;
      while (positions.size() < wanted) {
        const int32_t begin = random.Int(0, first_fresh - 1), end = std::min(first_fresh, begin + random.Int(1, run));
        for (int32_t j = begin; j < end && positions.size() < wanted; ++j) positions.insert(j);
      }
      list.assign(positions.begin(), positions.end());
    }
    Hold(sequence, listed, first_fresh);
  }
  // One more position in every stream of the sequence.
  void Append(size_t sequence) {
    TestSequence& s = sequences_[sequence];
    for (const TestStream& stream : s.streams) pool_->WriteToken(stream, s.kv_len);
    ++s.kv_len;
  }

  const SelectingShape& shape() const { return shape_; }
  std::vector<TestSequence>& sequences() { return sequences_; }
  std::vector<float>& q() { return q_; }
  TestPool& pool() { return *pool_; }
  size_t num_streams() const { return sequences_.size() * shape_.kv_heads; }
  int32_t page_tokens() const { return page_tokens_; }
  const float* q_of(int64_t stream) const {
    return q_.data() + stream * shape_.group * shape_.head_dim;  // rows are contiguous
  }
  TestSequence& sequence_of(size_t stream) { return sequences_[stream / shape_.kv_heads]; }
  TestStream& stream(size_t stream) { return sequence_of(stream).streams[stream % shape_.kv_heads]; }

  // As the pool has it.
  double Key(size_t stream_index, int32_t j, int32_t c) {
    const float* const row = &stream(stream_index).k[static_cast<size_t>(j) * shape_.head_dim];
    if (shape_.dtype != DType::kE4M3) return shape_.dtype == DType::kF32 ? row[c] : ToFloat(ToBf16(row[c]));
    float amax = 0;
    for (int32_t i = 0; i < shape_.head_dim; ++i) amax = std::max(amax, std::fabs(row[i]));
    const uint8_t scale = RowScaleOf(amax);
    return E4M3ToFloat(FloatToE4M3(row[c] * InverseRowScale(scale))) * RowScaleValue(scale);
  }

  // Whether compact slot i of every candidate has dimension dims[i] of its key, bit for bit.
  ::testing::AssertionResult CompactKeysAreThoseOf(size_t stream_index, std::span<const int32_t> dims) {
    const TestSequence& s = sequence_of(stream_index);
    const CompactKeys compact{shape_.head_dim, shape_.num_dims, shape_.dtype};
    const KvPoolView& pool = pool_->view();
    const size_t head = stream_index % static_cast<size_t>(shape_.kv_heads);
    for (int32_t j = 0; j < s.candidates(head); ++j) {
      const int32_t position = s.position(head, j);
      const std::byte* key = pool.k(stream(stream_index).page_table[position / kPageTokens]);
      const std::byte* page = pool.k(s.compact[stream_index % shape_.kv_heads][j / compact.page_tokens()]);
      for (int32_t i = 0; i < shape_.num_dims; ++i) {
        const float want = KvElement(pool, key, position % kPageTokens, dims[i]);
        const float got = LoadElement(page, compact.dtype(), compact.element(j) + int64_t{i} * kPageTokens);
        if (std::bit_cast<uint32_t>(got) != std::bit_cast<uint32_t>(want))
          return ::testing::AssertionFailure() << "stream " << stream_index << ", position " << j << ", slot " << i;
      }
    }
    return ::testing::AssertionSuccess();
  }
  // The table that is valid after the last call, before Advance.
  std::span<const int32_t> dims(size_t stream_index) {
    const TestSequence& s = sequence_of(stream_index);
    const int table = s.step.refresh ? 1 - s.step.parity : s.step.parity;
    return std::span(s.dims).subspan((stream_index % shape_.kv_heads * 2 + table) * shape_.num_dims, shape_.num_dims);
  }

 private:
  static std::unique_ptr<TestPool> MakePool(const SelectingShape& shape,
                                            const std::vector<std::pair<int32_t, int32_t>>& lengths,
                                            int32_t page_tokens) {
    int32_t pages = 3;
    for (const auto& [kv_len, max_len] : lengths) {
      pages += shape.kv_heads * ((max_len + kPageTokens - 1) / kPageTokens + (max_len + page_tokens - 1) / page_tokens);
      // And a list of everything.
      const size_t page_bytes = KvPageBytes(shape.dtype, shape.head_dim);
      pages += shape.kv_heads * static_cast<int32_t>(ListPages(max_len, page_bytes));
    }
    return std::make_unique<TestPool>(shape.dtype, shape.head_dim, pages);
  }

  SelectingShape shape_;
  int32_t page_tokens_;
  std::unique_ptr<TestPool> pool_;
  std::vector<TestSequence> sequences_;
  std::vector<float> q_;
};

// Positions of different lists of one length must have weights closer to the smallest chosen one than rounding makes.
inline ::testing::AssertionResult SameChoice(std::span<const int32_t> got, std::span<const int32_t> want,
                                             std::span<const float> weights, int32_t first_recent) {
  if (got.size() != want.size()) return ::testing::AssertionFailure() << got.size() << " against " << want.size();
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] < 0 || got[i] >= static_cast<int32_t>(weights.size()) || (i > 0 && got[i] <= got[i - 1]))
      return ::testing::AssertionFailure() << "entry " << i << " is " << got[i];
  }
  float threshold = std::numeric_limits<float>::infinity();
  for (const int32_t j : want) {
    if (j < first_recent) threshold = std::min(threshold, weights[j]);
  }
  std::vector<int32_t> different;
  std::set_symmetric_difference(got.begin(), got.end(), want.begin(), want.end(), std::back_inserter(different));
  for (const int32_t j : different) {
    if (j >= first_recent || std::abs(weights[j] - threshold) > 2e-5f * threshold + 1e-37f)
      return ::testing::AssertionFailure()
             << "position " << j << " of weight " << weights[j] << ", the smallest is " << threshold;
  }
  return ::testing::AssertionSuccess();
}

}  // namespace spl::kernels::testing
