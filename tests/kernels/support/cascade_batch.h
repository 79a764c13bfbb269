// Decode batches of a cascade, with an oracle in double: which tokens each stream keeps, and which of these it chooses.
// For tests of all backends.
#pragma once

#include <algorithm>
#include <cmath>
#include <deque>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "kernels/selection/loopserve/query_window.h"
#include "kernels/selection/sparcas/select_dims.h"
#include "tests/kernels/support/selecting_batch.h"

namespace spl::kernels::testing {

struct CascadeSizes {
  int32_t window = 16, candidates = 0, budget = 0;
};

// All sequences take the same steps; positions are the same in all heads.
class CascadeBatch {
 public:
  CascadeBatch(Random& random, const SelectingShape& shape, const std::vector<int32_t>& lengths,
               const CascadeSizes& sizes, int32_t steps, DType query_dtype = DType::kF32)
      : sizes_(sizes),
        window_{.head_dim = shape.head_dim,
                .group = shape.group,
                .window = sizes.window,
                .budget = sizes.candidates,
                .query_dtype = query_dtype,
                .page_bytes = KvPageBytes(shape.dtype, shape.head_dim)} {
    const int64_t keys =
        CompactKeys{shape.head_dim, shape.num_dims, shape.dtype}.num_pages(static_cast<int32_t>(window_.list_tokens()));
    const auto pages = static_cast<int32_t>(window_.num_pages() + keys);
    int32_t longest = 0;
    std::vector<std::pair<int32_t, int32_t>> both;
    for (const int32_t length : lengths) longest = std::max(longest, length + steps);
    for (const int32_t length : lengths) both.emplace_back(length, longest);
    batch_ = std::make_unique<SelectingBatch>(random, shape, both, std::max(longest / pages, 1));
    batch_->Write();
    for (TestSequence& s : batch_->sequences()) {
      s.budget = sizes.budget;
      s.recent = std::min(sizes.budget, 5);
    }
    streams_.resize(batch_->num_streams());
    kept_.resize(batch_->sequences().size());
  }

  // New queries, and what both choices do in this step: from the second step on one more position.
  void NextStep(Random& random) {
    for (size_t i = 0; step_ >= 0 && i < batch_->sequences().size(); ++i) batch_->Append(i);
    ++step_;
    batch_->q() = random.Normals(batch_->q().size());
    if (batch_->shape().dtype != DType::kF32) {
      for (float& x : batch_->q()) x = ToFloat(ToBf16(x));
    }
    queries_.push_back(batch_->q());
    if (static_cast<int32_t>(queries_.size()) > sizes_.window) queries_.pop_front();
    const int32_t since = step_ + 1 - sizes_.window;
    outer_ = {.selects = since >= 0,
              .refresh = since >= 0 && since % sizes_.window == 0,
              .compact_len = step_,
              .records = true};
    for (size_t i = 0; i < batch_->sequences().size(); ++i) {
      TestSequence& s = batch_->sequences()[i];
      if (s.step.refresh) s.step.parity ^= 1;
      s.step.selects = s.step.listed = outer_.selects;
      s.step.first = outer_.refresh;
      s.step.refresh = outer_.selects && since % sizes_.window % 4 == 0;
      s.step.compact_len = outer_.refresh ? 0 : kept_[i];
      s.first_fresh = s.kv_len;
      if (outer_.selects) kept_[i] = outer_.refresh ? std::min(s.kv_len, sizes_.candidates) : kept_[i] + 1;
    }
  }

  // Whether `kept` is what the last queries attended to most, and `chosen` the best of these by the dimensions that are
  // valid. Where weights are closer than rounding either may be taken; the oracle then follows.
  ::testing::AssertionResult Agrees(size_t stream, const std::vector<int32_t>& kept,
                                    const std::vector<int32_t>& chosen) {
    if (!outer_.selects) return ::testing::AssertionSuccess();
    Stream& x = streams_[stream];
    const TestSequence& s = batch_->sequence_of(stream);
    const SelectingShape& shape = batch_->shape();
    const std::string what = "stream " + std::to_string(stream) + ", kv_len " + std::to_string(s.kv_len) + ": ";
    if (!outer_.refresh) {
      x.kept.push_back(s.kv_len - 1);
      if (kept != x.kept) return ::testing::AssertionFailure() << what << "another position joined";
    } else {
      std::vector<int32_t> all(static_cast<size_t>(s.kv_len));
      std::iota(all.begin(), all.end(), 0);
      std::vector<double> weights(all.size());
      for (size_t b = 0; b < queries_.size(); ++b) {
        const size_t sees = all.size() - (queries_.size() - 1 - b);
        AddWeights(stream, queries_[b], std::span(all).first(sees), AllDims(), weights);
      }
      const auto same = Same(kept, all, weights, sizes_.candidates, std::min(s.recent, sizes_.candidates));
      if (!same) return ::testing::AssertionFailure() << what << "kept: " << same.message();
      x.kept = kept;
    }
    const size_t head = stream % static_cast<size_t>(shape.kv_heads);
    if (s.step.refresh) {
      std::vector<int32_t> next(static_cast<size_t>(shape.num_dims));
      SelectDims(batch_->q_of(static_cast<int64_t>(stream)), shape.group, shape.head_dim, shape.num_dims,
                 s.step.first ? nullptr : x.dims.data(), next.data());
      x.dims = next;
    }
    std::vector<double> weights(x.kept.size());
    AddWeights(stream, batch_->q(), x.kept, x.dims, weights);
    const auto same = Same(chosen, x.kept, weights, s.budget, s.recent);
    if (!same) return ::testing::AssertionFailure() << what << "chosen in head " << head << ": " << same.message();
    if (static_cast<int32_t>(x.kept.size()) > s.budget && static_cast<int32_t>(x.kept.size()) < s.kv_len) ++num_chosen_;
    return ::testing::AssertionSuccess();
  }
  // Whether some stream has chosen a part of a part.
  bool HasChosen() const { return num_chosen_ > 0; }

  SelectingBatch& batch() { return *batch_; }
  const CascadeSizes& sizes() const { return sizes_; }
  const QueryWindow& window() const { return window_; }
  const LayerSelection& outer() const { return outer_; }
  int64_t stride() const { return window_.list_tokens(); }
  int32_t longest() const { return batch_->sequences()[0].max_len; }

 private:
  struct Stream {
    std::vector<int32_t> kept, dims;
  };

  std::vector<int32_t> AllDims() const {
    std::vector<int32_t> dims(static_cast<size_t>(batch_->shape().head_dim));
    std::iota(dims.begin(), dims.end(), 0);
    return dims;
  }
  // Adds what the stream's queries in `q` pay to each of the positions, by these dimensions.
  void AddWeights(size_t stream, const std::vector<float>& q, std::span<const int32_t> positions,
                  const std::vector<int32_t>& dims, std::vector<double>& weights) {
    const SelectingShape& shape = batch_->shape();
    for (int32_t g = 0; g < shape.group; ++g) {
      const float* row = q.data() + (static_cast<int64_t>(stream) * shape.group + g) * shape.head_dim;
      std::vector<double> scores;
      double most = -INFINITY, total = 0;
      for (const int32_t j : positions) {
        double dot = 0;
        for (const int32_t c : dims) dot += double{row[c]} * batch_->Key(stream, j, c);
        scores.push_back(dot * shape.attention().sm_scale);
        most = std::max(most, scores.back());
      }
      for (double& score : scores) total += score = std::exp(score - most);
      for (size_t k = 0; k < scores.size(); ++k) weights[k] += scores[k] / total;
    }
  }
  // Whether `got` are the last `recent` of the candidates and the `budget` best of all.
  static ::testing::AssertionResult Same(const std::vector<int32_t>& got, const std::vector<int32_t>& candidates,
                                         const std::vector<double>& weights, int32_t budget, int32_t recent) {
    const auto count = static_cast<int32_t>(candidates.size());
    std::vector<int32_t> numbers, order(static_cast<size_t>(count));
    for (const int32_t position : got) {
      const auto at = std::lower_bound(candidates.begin(), candidates.end(), position);
      if (at == candidates.end() || *at != position)
        return ::testing::AssertionFailure() << "position " << position << " is no candidate";
      numbers.push_back(static_cast<int32_t>(at - candidates.begin()));
    }
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      const bool forced = a >= count - recent, other = b >= count - recent;
      return forced != other ? forced : weights[static_cast<size_t>(a)] > weights[static_cast<size_t>(b)];
    });
    order.resize(static_cast<size_t>(std::min(budget, count)));
    std::sort(order.begin(), order.end());
    const std::vector<float> rounded(weights.begin(), weights.end());
    return SameChoice(numbers, order, rounded, count - recent);
  }

  const CascadeSizes sizes_;
  const QueryWindow window_;
  std::unique_ptr<SelectingBatch> batch_;
  std::vector<Stream> streams_;
  std::vector<int32_t> kept_;  // of each sequence
  std::deque<std::vector<float>> queries_;
  LayerSelection outer_;
  int32_t step_ = -1;
  int num_chosen_ = 0;
};

// The calls of one step on the host: both see the same sequences, each its own part of the compact pages.
struct CascadeCall {
  std::vector<int32_t> tokens, counts;
  std::vector<float> scores;
  std::vector<SelectingSequence> outer, inner;
  std::vector<std::vector<std::span<const int32_t>>> lists, keys;
  CascadeBatch& b;

  explicit CascadeCall(CascadeBatch& batch) : b(batch) {
    SelectingBatch& all = batch.batch();
    tokens.assign(all.num_streams() * static_cast<size_t>(batch.stride()), -9);
    counts.assign(all.num_streams(), 0);
    scores.assign(all.num_streams() * static_cast<size_t>(batch.longest()), 0.0f);
    const auto begin = static_cast<size_t>(batch.window().query_pages());
    const auto end = static_cast<size_t>(batch.window().num_pages());
    for (TestSequence& s : all.sequences()) {
      outer.push_back(s.view());
      outer.back().step = batch.outer();
      outer.back().budget = batch.sizes().candidates;
      outer.back().recent = std::min(s.recent, batch.sizes().candidates);
      outer.back().list_tables = {};
      inner.push_back(s.view());
      lists.emplace_back();
      keys.emplace_back();
      for (const auto& pages : s.compact) {
        lists.back().push_back(std::span(pages).subspan(begin, end - begin));
        keys.back().push_back(std::span(pages).subspan(end));
      }
    }
    for (size_t i = 0; i < inner.size(); ++i) {
      inner[i].list_tables = lists[i];
      inner[i].compact_tables = keys[i];
    }
  }
  QueryWindowArgs OuterArgs() {
    return {.shape = b.batch().shape().attention(),
            .pool = b.batch().pool().view(),
            .window = b.sizes().window,
            .q = b.batch().q().data(),
            .q_row_stride = b.batch().shape().q_width(),
            .sequences = outer,
            .scores = scores.data(),
            .scores_stride = b.longest(),
            .lists = {tokens.data(), counts.data(), b.stride()},
            .chooses = b.outer().refresh,
            .outer = true};
  }
  SelectTokensArgs InnerArgs() {
    return {.shape = b.batch().shape().attention(),
            .pool = b.batch().pool().view(),
            .num_dims = b.batch().shape().num_dims,
            .q = b.batch().q().data(),
            .q_row_stride = b.batch().shape().q_width(),
            .sequences = inner,
            .lists = {tokens.data(), counts.data(), b.stride()},
            .after_outer = true};
  }
  std::vector<std::vector<int32_t>> Lists() const {
    std::vector<std::vector<int32_t>> all;
    for (size_t stream = 0; stream < counts.size(); ++stream) {
      const auto begin = tokens.begin() + static_cast<int64_t>(stream) * b.stride();
      all.emplace_back(begin, begin + counts[stream]);
    }
    return all;
  }
};

}  // namespace spl::kernels::testing
