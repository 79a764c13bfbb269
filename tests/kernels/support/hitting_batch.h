// Decode batches that keep heavy hitters, with an oracle in double: what each stream keeps and what it was paid. For
// tests of all backends.
#pragma once

#include <bit>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "kernels/selection/h2o/heavy_hitters.h"
#include "tests/kernels/support/selecting_batch.h"

namespace spl::kernels::testing {

class HittingBatch {
 public:
  // `lengths`: positions of the prompt, and the budget. Streams begin with what random rows of the prompt paid; the
  // longest sequence has that many `steps`.
  HittingBatch(Random& random, const SelectingShape& shape, const std::vector<std::pair<int32_t, int32_t>>& lengths,
               int32_t steps) {
    std::vector<std::pair<int32_t, int32_t>> both;
    for (const auto& [length, budget] : lengths) both.emplace_back(length, length + steps);
    batch_ = std::make_unique<SelectingBatch>(random, shape, both, 16);  // more pages than the state takes
    batch_->Write();
    oracle_.resize(batch_->num_streams());
    for (size_t i = 0; i < lengths.size(); ++i) {
      TestSequence& s = sequence(i);
      s.budget = lengths[i].second;
      s.recent = s.budget - s.budget / 2;
      s.step = {.selects = true};
      for (int32_t h = 0; h < shape.kv_heads; ++h) Begin(random, i * static_cast<size_t>(shape.kv_heads) + h);
    }
    // The first call appends nothing: the last position of the prompt is the first step's own.
  }

  // New queries; from the second step on one more position in every sequence. Also what the oracle makes of it.
  void NextStep(Random& random) {
    for (size_t i = 0; i < batch_->sequences().size(); ++i) batch_->Append(i);
    if (!silent_) batch_->q() = random.Normals(batch_->q().size());
    // Sharp enough for new heavy hitters; in bf16, as a device has them.
    for (float& x : batch_->q()) x = shape().dtype == DType::kF32 ? 2 * x : ToFloat(ToBf16(2 * x));
    for (size_t stream = 0; stream < num_streams(); ++stream) Step(stream);
  }
  // Queries of zeros, from now on.
  void SilenceQueries() {
    silent_ = true;
    std::fill(batch_->q().begin(), batch_->q().end(), 0.0f);
  }

  // Whether a call's list and its attention before the eviction are the oracle's, and what is kept now is, too. Where
  // two of the smallest are closer than rounding, either may leave; the oracle then follows.
  ::testing::AssertionResult Agrees(size_t stream, const std::vector<int32_t>& list,
                                    const std::vector<float>& attention) {
    return Agrees(stream, list, attention, kept(stream));
  }
  ::testing::AssertionResult Agrees(size_t stream, const std::vector<int32_t>& list,
                                    const std::vector<float>& attention, const std::vector<int32_t>& now) {
    Oracle& o = oracle_[stream];
    const std::string what = "stream " + std::to_string(stream) + ": ";
    if (list != o.list) return ::testing::AssertionFailure() << what << "another list";
    if (attention.size() != o.list.size()) return ::testing::AssertionFailure() << what << "another length";
    for (size_t k = 0; k < attention.size(); ++k) {
      if (!(std::abs(attention[k] - o.paid[k]) <= 2e-4 * (1 + o.paid[k])))
        return ::testing::AssertionFailure()
               << what << "position " << list[k] << " was paid " << attention[k] << ", not " << o.paid[k];
    }
    const TestSequence& s = batch_->sequence_of(stream);
    size_t leaves = o.list.size();
    if (static_cast<int32_t>(o.list.size()) > s.budget) {
      const size_t others = o.list.size() - static_cast<size_t>(s.recent);
      leaves = 0;
      for (size_t k = 1; k < others; ++k) leaves = o.paid[k] <= o.paid[leaves] ? k : leaves;
      for (size_t k = 0; k < others; ++k) {
        if (o.paid[k] <= o.paid[leaves] + 4e-4 && (k >= now.size() || now[k] != o.list[k])) {
          leaves = k;
          break;
        }
      }
    }
    if (leaves < o.list.size()) {
      o.generated_stay |=
          o.list[leaves] < o.prompt && o.list[o.list.size() - static_cast<size_t>(s.recent) - 1] >= o.prompt;
      o.list.erase(o.list.begin() + static_cast<int64_t>(leaves));
      o.paid.erase(o.paid.begin() + static_cast<int64_t>(leaves));
    }
    if (now != o.list) return ::testing::AssertionFailure() << what << "something else left";
    return ::testing::AssertionSuccess();
  }
  // Whether in some stream a position of the prompt has left while the generated one that left the window then stayed.
  bool HasChanged() const {
    return std::any_of(oracle_.begin(), oracle_.end(), [](const Oracle& o) { return o.generated_stay; });
  }

  // The positions that the stream keeps: in its pages on the host.
  std::vector<int32_t> kept(size_t stream) {
    std::vector<int32_t> positions;
    for (int32_t i = 0; i < Word(stream, 0); ++i)
      positions.push_back(Word(stream, HeavyHitterPages::kPosition + 2 * int64_t{i}));
    return positions;
  }
  void SetKept(size_t stream, const std::vector<int32_t>& positions, const std::vector<float>& attention) {
    Word(stream, 0) = static_cast<int32_t>(positions.size());
    for (size_t i = 0; i < positions.size(); ++i) {
      Word(stream, HeavyHitterPages::kPosition + 2 * static_cast<int64_t>(i)) = positions[i];
      Word(stream, HeavyHitterPages::kAttention + 2 * static_cast<int64_t>(i)) = std::bit_cast<int32_t>(attention[i]);
    }
    oracle_[stream].list = positions;
    oracle_[stream].paid.assign(attention.begin(), attention.end());
  }

  SelectingBatch& batch() { return *batch_; }
  TestSequence& sequence(size_t i) { return batch_->sequences()[i]; }
  const SelectingShape& shape() const { return batch_->shape(); }
  size_t num_streams() const { return batch_->num_streams(); }
  const std::vector<double>& attention(size_t stream) const { return oracle_[stream].paid; }
  int32_t most() const { return 64 + 1; }

 private:
  struct Oracle {
    std::vector<int32_t> list;
    std::vector<double> paid;
    int32_t prompt = 0;
    bool generated_stay = false;
  };

  int32_t& Word(size_t stream, int64_t i) {
    const TestSequence& s = batch_->sequence_of(stream);
    const std::vector<int32_t>& pages = s.compact[stream % static_cast<size_t>(shape().kv_heads)];
    const KvPoolView& pool = batch_->pool().view();
    const int64_t per_page = HeavyHitterPages{s.budget, pool.page_bytes()}.words_per_page();
    return reinterpret_cast<int32_t*>(pool.k(pages[static_cast<size_t>(i / per_page)]))[i % per_page];
  }

  // The attention of query `q` [head_dim] to each of the positions.
  std::vector<double> Pays(size_t stream, const float* q, const std::vector<int32_t>& positions) {
    std::vector<double> weights;
    double most = -INFINITY, total = 0;
    for (const int32_t j : positions) {
      double dot = 0;
      for (int32_t c = 0; c < shape().head_dim; ++c) dot += double{q[c]} * batch_->Key(stream, j, c);
      weights.push_back(dot * shape().attention().sm_scale);
      most = std::max(most, weights.back());
    }
    for (double& w : weights) total += w = std::exp(w - most);
    for (double& w : weights) w /= total;
    return weights;
  }

  // Some of the prompt's rows, with random queries: what they paid, and the largest half of the budget and the last
  // ones.
  void Begin(Random& random, size_t stream) {
    const TestSequence& s = batch_->sequence_of(stream);
    std::vector<double> paid(static_cast<size_t>(s.kv_len));
    std::vector<int32_t> seen;
    for (int32_t row = 0; row < s.kv_len; ++row) {
      seen.push_back(row);
      if (row % 16 != 15) continue;  // fewer rows than steps, so that what steps pay counts
      for (int32_t g = 0; g < shape().group; ++g) {
        const std::vector<float> q = random.Normals(static_cast<size_t>(shape().head_dim));
        const std::vector<double> pays = Pays(stream, q.data(), seen);
        for (size_t j = 0; j < pays.size(); ++j) paid[j] += pays[j];
      }
    }
    std::vector<int32_t> order(seen.begin(), seen.end() - std::min<int64_t>(s.recent, s.kv_len));
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return paid[a] > paid[b]; });
    order.resize(std::min(order.size(), static_cast<size_t>(s.budget - s.recent)));
    for (int32_t j = std::max(0, s.kv_len - s.recent); j < s.kv_len; ++j) order.push_back(j);
    std::sort(order.begin(), order.end());
    std::vector<float> attention;
    for (const int32_t j : order) attention.push_back(static_cast<float>(paid[static_cast<size_t>(j)]));
    SetKept(stream, order, attention);
    oracle_[stream].prompt = s.kv_len;
  }

  void Step(size_t stream) {
    Oracle& o = oracle_[stream];
    o.list.push_back(batch_->sequence_of(stream).kv_len - 1);
    o.paid.push_back(0);
    for (int32_t g = 0; g < shape().group; ++g) {
      const float* q = batch_->q_of(static_cast<int64_t>(stream)) + int64_t{g} * shape().head_dim;
      const std::vector<double> pays = Pays(stream, q, o.list);
      for (size_t k = 0; k < pays.size(); ++k) o.paid[k] += pays[k];
    }
  }

  std::unique_ptr<SelectingBatch> batch_;
  std::vector<Oracle> oracle_;
  bool silent_ = false;
};

// A call on the host.
struct HittingCall {
  std::vector<SelectingSequence> views;
  std::vector<float> paid;
  std::vector<int32_t> tokens, counts;
  HeavyHittersArgs args;

  explicit HittingCall(HittingBatch& b) {
    const auto stride = static_cast<size_t>(b.most());
    for (TestSequence& s : b.batch().sequences()) views.push_back(s.view());
    paid.assign(b.num_streams() * stride, -7.0f);
    tokens.assign(b.num_streams() * stride, -9);
    counts.assign(b.num_streams(), -9);
    args.shape = b.shape().attention();
    args.pool = b.batch().pool().view();
    args.q = b.batch().q().data();
    args.q_row_stride = b.shape().q_width();
    args.sequences = views;
    args.attention = paid.data();
    args.attention_stride = static_cast<int64_t>(stride);
    args.lists = {tokens.data(), counts.data(), static_cast<int64_t>(stride)};
  }
  std::vector<int32_t> list(size_t stream) const {
    const auto begin = tokens.begin() + static_cast<int64_t>(stream) * args.lists.stride;
    return {begin, begin + counts[stream]};
  }
  std::vector<float> attention(size_t stream) const {
    const auto begin = paid.begin() + static_cast<int64_t>(stream) * args.attention_stride;
    return {begin, begin + counts[stream]};
  }
};

}  // namespace spl::kernels::testing
