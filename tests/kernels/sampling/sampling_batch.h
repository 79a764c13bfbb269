// Rows to be sampled and what became of them, for the tests of every variant.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <vector>

#include "kernels/sampling/philox.h"
#include "kernels/sampling/sample_tokens.h"
#include "tests/kernels/support/kernel_test_util.h"

namespace spl::kernels::testing {

struct SamplingOutput {
  std::vector<SampledRow> rows;
  std::vector<TopToken> top;  // [rows, top_stride]
  std::vector<int32_t> tokens;
};

struct SamplingBatch {
  int64_t width = 0;
  std::vector<float> logits;  // [num_logit_rows, width]
  std::vector<SampleRow> rows;
  std::deque<std::vector<TokenEdit>> edits;  // of rows
  std::deque<std::vector<uint32_t>> masks;

  int32_t top_stride() const {
    int32_t stride = 0;
    for (const SampleRow& row : rows) stride = std::max(stride, row.num_top);
    return stride;
  }
  SampleTokensArgs Args(SamplingOutput& out) const {
    const auto stride = static_cast<size_t>(top_stride());
    out.rows.assign(rows.size(), SampledRow{.token = -7});
    out.top.assign(rows.size() * stride, TopToken{-7, -7});
    out.tokens.assign(rows.size(), -7);
    return {.logits = logits.data(),
            .num_logit_rows = static_cast<int64_t>(logits.size()) / width,
            .width = width,
            .rows = rows,
            .tokens = out.tokens.data(),
            .out = out.rows.data(),
            .top = out.top.data(),
            .top_stride = top_stride()};
  }
};

template <typename Op>
SamplingOutput RunSampling(const SamplingBatch& batch, Op op, const KernelContext& ctx = {}) {
  SamplingOutput out;
  ExpectOk(op(ctx, batch.Args(out)));
  return out;
}

inline std::string Describe(const SamplingBatch& batch, size_t i) {
  const SampleRow& row = batch.rows[i];
  std::ostringstream text;
  text << "row " << i << " of " << batch.width << " logits: temperature " << row.temperature << ", top_k " << row.top_k
       << ", top_p " << row.top_p << ", min_p " << row.min_p << ", penalties " << row.repetition_penalty << " "
       << row.presence_penalty << " " << row.frequency_penalty << ", " << row.edits.size() << " edits, mask of "
       << row.mask.size() << ", num_top " << row.num_top;
  return text.str();
}

// Bit for bit.
inline void ExpectSame(const SamplingBatch& batch, const SamplingOutput& a, const SamplingOutput& b) {
  const auto same = [](float x, float y) { return std::memcmp(&x, &y, sizeof(x)) == 0; };
  const auto stride = static_cast<size_t>(batch.top_stride());
  for (size_t i = 0; i < batch.rows.size(); ++i) {
    ASSERT_EQ(a.rows[i].token, b.rows[i].token) << Describe(batch, i);
    ASSERT_EQ(b.tokens[i], b.rows[i].token) << Describe(batch, i);
    ASSERT_TRUE(same(a.rows[i].logit, b.rows[i].logit)) << Describe(batch, i);
    ASSERT_EQ(a.rows[i].total, b.rows[i].total) << Describe(batch, i);
    ASSERT_TRUE(same(a.rows[i].max_logit, b.rows[i].max_logit)) << Describe(batch, i);
    for (size_t n = 0; static_cast<int32_t>(n) < batch.rows[i].num_top; ++n) {
      ASSERT_EQ(a.top[i * stride + n].token, b.top[i * stride + n].token) << Describe(batch, i) << ", place " << n;
      ASSERT_TRUE(same(a.top[i * stride + n].logit, b.top[i * stride + n].logit))
          << Describe(batch, i) << ", place " << n;
    }
  }
}

template <typename... T>
float OneOf(Random& random, T... values) {
  const float all[] = {static_cast<float>(values)...};
  return all[random.Int(0, sizeof...(values) - 1)];
}

// Logits of every kind: flat, peaked, in steps so that many are equal, not finite.
inline void AppendLogits(Random& random, SamplingBatch& batch) {
  constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();
  const size_t begin = batch.logits.size(), width = static_cast<size_t>(batch.width);
  const float spread = OneOf(random, 0, 0.01, 1, 1, 3, 3, 30, 1e30), step = OneOf(random, 0, 0, 0, 0.5);
  const float offset = OneOf(random, 0, 0, -20, 1000);
  for (size_t i = 0; i < width; ++i) {
    float x = offset + spread * random.Normal();
    if (step > 0) x = std::round(x / step) * step;
    batch.logits.push_back(x);
  }
  const int32_t odd = random.Int(0, 9);
  for (int32_t n = 0; n < 5 && odd < 3; ++n)
    batch.logits[begin + static_cast<size_t>(random.Int(0, static_cast<int32_t>(width) - 1))] = odd == 0   ? kNan
                                                                                                : odd == 1 ? -kInf
                                                                                                           : 0.0f;
  if (odd == 3 && random.Int(0, 9) == 0)
    batch.logits[begin + static_cast<size_t>(random.Int(0, static_cast<int32_t>(width) - 1))] = kInf;
  if (odd == 4 && random.Int(0, 9) == 0)
    std::fill_n(batch.logits.begin() + static_cast<std::ptrdiff_t>(begin), width, OneOf(random, kNan, -kInf, 0));
  if (odd == 5 && random.Int(0, 3) == 0)  // few numbers
    for (size_t i = 0; i < width; ++i) {
      if (random.Int(0, static_cast<int32_t>(width)) > 4) batch.logits[begin + i] = kNan;
    }
}

inline std::vector<TokenEdit> RandomEdits(Random& random, int64_t width, int32_t most) {
  std::map<int32_t, TokenEdit> edits;
  const int32_t num = random.Int(1, most);
  for (int32_t n = 0; n < num; ++n) {
    const int32_t token = random.Int(-1, static_cast<int32_t>(width));  // two of them have no logit
    edits[token] = {.token = token,
                    .bias = OneOf(random, 0, 0, -100, 100, 1.25),
                    .count = static_cast<int32_t>(OneOf(random, 0, 1, 2, 7)),
                    .flags = static_cast<uint32_t>(random.Int(0, 3))};
  }
  std::vector<TokenEdit> list;
  for (const auto& [token, edit] : edits) list.push_back(edit);
  std::shuffle(list.begin(), list.end(), random.engine());
  return list;
}

// A row of any parameters for the last logits.
inline void AppendRow(Random& random, SamplingBatch& batch) {
  SampleRow row{.logits_row = static_cast<int32_t>(static_cast<int64_t>(batch.logits.size()) / batch.width) - 1,
                .temperature = OneOf(random, 0, 0.01, 0.7, 1, 1, 2, 100, 1e-30),
                .top_k = static_cast<int32_t>(OneOf(random, 0, 0, 1, 5, 50, 600, 3000, 200'000)),
                .top_p = OneOf(random, 1, 1, 0.999999, 0.99, 0.9, 0.5, 0.01, 1e-30),
                .min_p = OneOf(random, 0, 0, 0, 0.05, 1, 1e-9),
                .random = SamplingRandom(random.engine()(), 1, random.engine()())};
  if (random.Int(0, 3) == 0) row.num_top = static_cast<int32_t>(OneOf(random, 0, 1, 5, 20, 100));
  if (random.Int(0, 2) == 0) {
    row.repetition_penalty = OneOf(random, 1, 1.3, 0.8);
    row.presence_penalty = OneOf(random, 0, 0.5, -0.7);
    row.frequency_penalty = OneOf(random, 0, 0.3, -0.2);
    row.bans_ends = random.Int(0, 1) == 1;
    row.edits = batch.edits.emplace_back(RandomEdits(random, batch.width, random.Int(1, 3000)));
  }
  if (random.Int(0, 5) == 0) {
    std::vector<uint32_t>& mask = batch.masks.emplace_back(static_cast<size_t>((batch.width + 31) / 32));
    const float share = OneOf(random, 0, 0.01, 0.5, 1);
    for (uint32_t& word : mask) {
      for (int bit = 0; bit < 32; ++bit)
        word |= static_cast<uint32_t>(static_cast<float>(random.Int(0, 999)) < 1000 * share) << bit;
    }
    row.mask = mask;
  }
  batch.rows.push_back(row);
}

inline SamplingBatch RandomSampling(Random& random, int64_t width, int num_logit_rows, int rows_each) {
  SamplingBatch batch{.width = width};
  for (int i = 0; i < num_logit_rows; ++i) {
    AppendLogits(random, batch);
    for (int n = 0; n < rows_each; ++n) AppendRow(random, batch);
  }
  std::shuffle(batch.rows.begin(), batch.rows.end(), random.engine());
  return batch;
}

}  // namespace spl::kernels::testing
