// The CUDA attention launchers against a double-precision oracle on the host, against each other at long context, and
// against themselves bit by bit. Needs a CUDA device; skips without one.
//
// Every case poisons what must not be read: slots past the written length, pages that no table lists, table entries of
// pages that no row sees (they lead to a page of NaN, or nowhere), the outputs, and the gaps of the fused q buffer.
#include "kernels/attention/attention_cuda.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/attention/widen_pages_cuda.h"
#include "kernels/common/e4m3_rows.h"
#include "kernels/common/tolerance.h"
#include "tests/kernels/support/cuda_test_util.h"

namespace spl::kernels::cuda {
namespace {

using testing::DeviceBuffer;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct SequenceSpec {
  int32_t kv_len = 0;
  std::vector<int32_t> positions;  // prefill rows; decode ignores them
};

DType test_pages = DType::kBF16;  // type of the pages of a Spec that names none

struct Spec {
  AttentionHeads heads;
  DType kv_dtype = test_pages;
  DType dtype = DType::kBF16;
  HeadRules rules;
  std::vector<SequenceSpec> sequences;
  uint32_t data_seed = 1;    // of q, K and V: a function of (sequence id, position, head), not of the layout
  uint32_t layout_seed = 1;  // of the physical pages
  std::vector<int> ids;      // of the sequences, for the data; empty: 0, 1, ...
  float magnitude = 1.0f;    // of q: larger is a sharper softmax
  int32_t last_rows = 0;     // of prefill
};

HeadRule Full() { return {}; }
HeadRule BandRule(int32_t sinks, int32_t window) { return {VisibilityRule::kBand, sinks, window}; }

AttentionHeads Heads(int qo, int kv, int dim) { return {qo, kv, dim, 1.0f / std::sqrt(static_cast<float>(dim))}; }

std::vector<int32_t> Range(int32_t begin, int32_t end) {
  std::vector<int32_t> v(end - begin);
  std::iota(v.begin(), v.end(), begin);
  return v;
}

// Uniform in [-1, 1), from a hash: any element can be had without the others.
float Element(uint32_t seed, uint64_t a, uint64_t b) {
  uint64_t x = seed * 0x9e3779b97f4a7c15ull ^ (a * 0xbf58476d1ce4e5b9ull) ^ (b * 0x94d049bb133111ebull);
  x ^= x >> 31;
  x *= 0xd6e8feb86659fd93ull;
  x ^= x >> 32;
  x *= 0xd6e8feb86659fd93ull;
  x ^= x >> 29;
  return static_cast<float>(static_cast<int64_t>(x >> 40)) / (1 << 23) - 1.0f;
}

float Round(float x, DType dtype) { return dtype == DType::kBF16 ? ToFloat(ToBf16(x)) : x; }

bool Sees(const HeadRule& r, int32_t p, int32_t j) {
  return j <= p && (r.rule == VisibilityRule::kFull || j < r.num_sinks || j > int64_t{p} - r.window);
}

class Problem {
 public:
  explicit Problem(Spec spec, bool decode) : spec_(std::move(spec)), decode_(decode) {
    const int num_sequences = static_cast<int>(spec_.sequences.size());
    if (spec_.ids.empty()) {
      spec_.ids.resize(num_sequences);
      std::iota(spec_.ids.begin(), spec_.ids.end(), 0);
    }
    if (decode_) {
      for (SequenceSpec& s : spec_.sequences) s.positions = {s.kv_len - 1};
    }
    row_begin_ = {0};
    for (const SequenceSpec& s : spec_.sequences) {
      positions_.insert(positions_.end(), s.positions.begin(), s.positions.end());
      row_begin_.push_back(static_cast<int32_t>(positions_.size()));
      max_kv_len_ = std::max(max_kv_len_, s.kv_len);
    }
    BuildPages();
    const AttentionHeads& h = spec_.heads;
    q_stride_ = (h.num_qo_heads + 2 * h.num_kv_heads) * h.head_dim;
  }

  int num_rows() const { return static_cast<int>(positions_.size()); }
  const Spec& spec() const { return spec_; }
  int32_t max_kv_len() const { return max_kv_len_; }

  float Q(int sequence, int32_t position, int head, int c) const {
    return Round(spec_.magnitude *
                     Element(spec_.data_seed + 7, spec_.ids[sequence] * 100000007ull + position, head * 1000ull + c),
                 spec_.dtype);
  }
  float Kv(int which, int sequence, int32_t position, int head, int c) const {
    if (spec_.kv_dtype == DType::kE4M3)
      return kE4M3Values[Code(which, sequence, position, head, c)] *
             RowScaleValue(Scale(which, sequence, position, head));
    return Round(Element(spec_.data_seed + which, spec_.ids[sequence] * 100000007ull + position, head * 1000ull + c),
                 spec_.kv_dtype);
  }
  // Codes of e4m3: any but NaN. Scales make the largest of them 0.11 to 0.88, or tiny.
  uint8_t Code(int which, int sequence, int32_t position, int head, int c) const {
    const float x = Element(spec_.data_seed + which, spec_.ids[sequence] * 100000007ull + position, head * 1000ull + c);
    return static_cast<uint8_t>((x < 0 ? 0x80 : 0) | std::min(static_cast<int>(std::fabs(x) * 0x7f), 0x7e));
  }
  uint8_t Scale(int which, int sequence, int32_t position, int head) const {
    const float x = Element(spec_.data_seed + which + 50, spec_.ids[sequence] * 100000007ull + position, head);
    return x > 0.95f ? kMinRowScale : static_cast<uint8_t>(118 - static_cast<int>(4 * std::fabs(x)));
  }

  struct Result {
    std::vector<float> out;      // [rows, Hq, d]
    std::vector<float> lse;      // [rows, Hq]
    std::vector<std::byte> raw;  // out as written, for bitwise comparison
  };

  // bucket: decode's max_kv_len when not the longest length.
  Result Run(Variant variant, int32_t bucket = 0) {
    const AttentionHeads& h = spec_.heads;
    const size_t outs = static_cast<size_t>(num_rows()) * h.num_qo_heads * h.head_dim;
    if (!on_device_) Upload();
    DeviceBuffer<std::byte> out(outs * DTypeBytes(spec_.dtype));
    DeviceBuffer<float> lse(static_cast<size_t>(num_rows()) * h.num_qo_heads);
    out.Fill(0xff);  // NaN
    lse.Fill(0xff);
    PagedBatch batch;
    batch.page_tables = tables_device_->get() + kTableSlack;
    batch.table_offset = offsets_device_->get();
    batch.head_stride = head_stride_;
    batch.kv_len = kv_len_device_->get();
    batch.pool = {pool_device_->get(), spec_.kv_dtype, h.head_dim, num_pages_};
    batch.num_sequences = static_cast<int32_t>(spec_.sequences.size());
    const int32_t max_kv_len = bucket != 0 ? bucket : max_kv_len_;
    const size_t workspace_bytes =
        decode_ ? DecodeWorkspaceBytes(h, batch.num_sequences, max_kv_len, 0, spec_.kv_dtype) : PrefillWorkspaceBytes();
    DeviceBuffer<std::byte> workspace(workspace_bytes);
    workspace.Fill(0);
    // Twice: the first launch must leave the workspace as the second needs it.
    for (int i = 0; i < 2; ++i) {
      if (decode_) {
        DecodeArgs a{h,         spec_.rules, batch,     max_kv_len,     spec_.dtype, q_device_->get(),
                     q_stride_, out.get(),   lse.get(), workspace.get()};
        CHECK_CUDA(DecodeAttention(a, nullptr, variant));
      } else {
        const PagedBatch seen = spec_.kv_dtype == DType::kE4M3 ? Widened(batch) : batch;
        PrefillArgs a{h,
                      spec_.rules,
                      seen,
                      row_begin_device_->get(),
                      positions_device_->get(),
                      num_rows(),
                      max_kv_len,
                      spec_.dtype,
                      q_device_->get(),
                      q_stride_,
                      out.get(),
                      lse.get(),
                      workspace.get(),
                      spec_.last_rows};
        a.early = spec_.kv_dtype != DType::kE4M3;  // a kernel has written the tables of widened pages
        CHECK_CUDA(PrefillAttention(a, nullptr, variant));
      }
    }
    CHECK_CUDA(cudaDeviceSynchronize());
    Result r;
    r.raw = out.Read();
    r.lse = lse.Read();
    r.out.resize(outs);
    for (size_t i = 0; i < outs; ++i) {
      if (spec_.dtype == DType::kF32) {
        std::memcpy(&r.out[i], r.raw.data() + 4 * i, 4);
      } else {
        bf16 x;
        std::memcpy(&x, r.raw.data() + 2 * i, 2);
        r.out[i] = ToFloat(x);
      }
    }
    return r;
  }

  // Decode captured once, then replayed with each of these lengths (of every sequence) in device memory, against plain
  // launches with the same lengths: bit for bit.
  void ExpectReplaysEqualLaunches(Variant variant, int32_t bucket, const std::vector<int32_t>& lengths) {
    const AttentionHeads& h = spec_.heads;
    Upload();
    const size_t bytes = static_cast<size_t>(num_rows()) * h.num_qo_heads * h.head_dim * DTypeBytes(spec_.dtype);
    DeviceBuffer<std::byte> out(bytes), workspace(DecodeWorkspaceBytes(h, num_rows(), bucket, 0, spec_.kv_dtype));
    workspace.Fill(0);
    PagedBatch batch{tables_device_->get() + kTableSlack,
                     offsets_device_->get(),
                     head_stride_,
                     kv_len_device_->get(),
                     {pool_device_->get(), spec_.kv_dtype, h.head_dim, num_pages_},
                     num_rows()};
    const DecodeArgs a{h,         spec_.rules, batch,   bucket,         spec_.dtype, q_device_->get(),
                       q_stride_, out.get(),   nullptr, workspace.get()};
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK_CUDA(cudaStreamCreate(&stream));
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    CHECK_CUDA(DecodeAttention(a, stream, variant));
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    std::vector<std::byte> previous;
    for (const int32_t length : lengths) {
      const std::vector<int32_t> all(num_rows(), length);
      CHECK_CUDA(cudaMemcpy(kv_len_device_->get(), all.data(), 4 * all.size(), cudaMemcpyHostToDevice));
      out.Fill(0xff);
      CHECK_CUDA(cudaGraphLaunch(exec, stream));
      CHECK_CUDA(cudaStreamSynchronize(stream));
      const std::vector<std::byte> replayed = out.Read();
      out.Fill(0xff);
      CHECK_CUDA(DecodeAttention(a, stream, variant));
      CHECK_CUDA(cudaStreamSynchronize(stream));
      EXPECT_TRUE(replayed == out.Read()) << length;
      EXPECT_FALSE(replayed == previous) << "the length made no difference";
      previous = replayed;
    }
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }

  // One (row, head) in double precision; returns lse.
  double Oracle(int sequence, int32_t position, int head, double* out) const {
    const AttentionHeads& h = spec_.heads;
    const int kv_head = head / (h.num_qo_heads / h.num_kv_heads);
    std::vector<double> scores;
    std::vector<int32_t> seen;
    std::vector<float> q(h.head_dim);
    for (int c = 0; c < h.head_dim; ++c) q[c] = Q(sequence, position, head, c);
    double max = -std::numeric_limits<double>::infinity();
    for (int32_t j = 0; j <= position; ++j) {
      if (!Sees(spec_.rules.head[kv_head], position, j)) continue;
      double dot = 0;
      for (int c = 0; c < h.head_dim; ++c) dot += static_cast<double>(q[c]) * Kv(1, sequence, j, kv_head, c);
      scores.push_back(dot * h.sm_scale);
      seen.push_back(j);
      max = std::max(max, scores.back());
    }
    std::fill(out, out + h.head_dim, 0.0);
    double total = 0;
    for (size_t i = 0; i < seen.size(); ++i) {
      const double w = std::exp(scores[i] - max);
      total += w;
      for (int c = 0; c < h.head_dim; ++c) out[c] += w * Kv(2, sequence, seen[i], kv_head, c);
    }
    for (int c = 0; c < h.head_dim; ++c) out[c] /= total;
    return max + std::log(total);
  }

  // A sample of rows (all when few), every head, against the oracle.
  void ExpectNearOracle(const Result& r, int sample = 24) const {
    const AttentionHeads& h = spec_.heads;
    std::mt19937 rng(spec_.data_seed);
    double diff = 0, norm = 0, max_diff = 0, max_ref = 0, lse_diff = 0, lse_norm = 0;
    for (size_t s = 0; s < spec_.sequences.size(); ++s) {
      const int rows = row_begin_[s + 1] - row_begin_[s];
      std::vector<int> chosen(rows);
      std::iota(chosen.begin(), chosen.end(), 0);
      if (rows > sample) {
        std::shuffle(chosen.begin() + 1, chosen.end() - 1, rng);
        chosen[sample - 1] = rows - 1;
        chosen.resize(sample);
      }
      for (const int i : chosen) {
        const int64_t row = row_begin_[s] + i;
        for (int head = 0; head < h.num_qo_heads; ++head) {
          std::vector<double> ref(h.head_dim);
          const double lse = Oracle(static_cast<int>(s), positions_[row], head, ref.data());
          const int64_t at = row * h.num_qo_heads + head;
          for (int c = 0; c < h.head_dim; ++c) {
            const double d = r.out[at * h.head_dim + c] - ref[c];
            diff += d * d;
            norm += ref[c] * ref[c];
            max_diff = std::isnan(d) ? INFINITY : std::max(max_diff, std::abs(d));
            max_ref = std::max(max_ref, std::abs(ref[c]));
          }
          lse_diff += (r.lse[at] - lse) * (r.lse[at] - lse);
          lse_norm += lse * lse;
        }
      }
    }
    const Tolerance t =
        ToleranceFor(spec_.dtype == DType::kF32 && spec_.kv_dtype == DType::kF32 ? DType::kF32 : DType::kBF16);
    EXPECT_LE(std::sqrt(diff), t.relative_l2 * std::sqrt(norm));
    EXPECT_LE(max_diff, t.max_abs_of_max_ref * max_ref);
    // Scores are f32 whatever the output is rounded to.
    EXPECT_LE(std::sqrt(lse_diff), ToleranceFor(DType::kF32).relative_l2 * std::max(std::sqrt(lse_norm), 1.0));
  }

 private:
  static constexpr int kTableSlack = 5;  // entries in front of the first table: offsets must be honoured

  // Pages of codes in bf16, as prefill reads them.
  PagedBatch Widened(const PagedBatch& batch) {
    std::vector<WidenSequence> sequences;
    WidenArgs a{.batch = batch, .num_kv_heads = spec_.heads.num_kv_heads, .rules = spec_.rules};
    for (const SequenceSpec& s : spec_.sequences) {
      const int32_t pages = s.positions.empty() ? 0 : s.positions.back() / kPageTokens + 1;
      sequences.push_back({a.total_pages, pages, s.positions.empty() ? 0 : s.positions.front()});
      a.total_pages += int64_t{a.num_kv_heads} * pages;
      a.table_stride = std::max(a.table_stride, pages);
    }
    const size_t tables = sequences.size() * static_cast<size_t>(a.num_kv_heads) * static_cast<size_t>(a.table_stride);
    wide_sequences_ = std::make_unique<DeviceBuffer<WidenSequence>>(sequences);
    wide_offsets_ = std::make_unique<DeviceBuffer<int64_t>>(sequences.size());
    wide_tables_ = std::make_unique<DeviceBuffer<int32_t>>(tables);
    wide_pages_ = std::make_unique<DeviceBuffer<std::byte>>(static_cast<size_t>(a.total_pages) *
                                                            KvPageBytes(DType::kBF16, spec_.heads.head_dim));
    wide_pages_->Fill(0xff);
    a.sequences = wide_sequences_->get();
    a.table_offset = wide_offsets_->get();
    a.tables = wide_tables_->get();
    a.pages = wide_pages_->get();
    CHECK_CUDA(WidenPages(a, nullptr));
    PagedBatch wide = batch;
    wide.page_tables = a.tables;
    wide.table_offset = a.table_offset;
    wide.head_stride = a.table_stride;
    wide.pool = {wide_pages_->get(), DType::kBF16, spec_.heads.head_dim, static_cast<int32_t>(a.total_pages)};
    return wide;
  }

  void BuildPages() {
    const AttentionHeads& h = spec_.heads;
    std::mt19937 rng(spec_.layout_seed);
    head_stride_ = (max_kv_len_ + kPageTokens - 1) / kPageTokens + 3;
    const int num_sequences = static_cast<int>(spec_.sequences.size());
    tables_.assign(kTableSlack + (head_stride_ * h.num_kv_heads + 2) * num_sequences, -12345);
    struct Use {
      int64_t entry;
      int sequence, head, page;
    };
    std::vector<Use> uses;
    std::vector<int64_t> traps;
    for (int s = 0; s < num_sequences; ++s) {
      offsets_.push_back((head_stride_ * h.num_kv_heads + 2) * s + 1);
      kv_len_.push_back(spec_.sequences[s].kv_len);
      const std::vector<int32_t>& rows = spec_.sequences[s].positions;
      for (int head = 0; head < h.num_kv_heads; ++head) {
        const HeadRule& rule = spec_.rules.head[head];
        for (int page = 0; page * kPageTokens < kv_len_[s]; ++page) {
          const int64_t entry = kTableSlack + offsets_[s] + head * head_stride_ + page;
          const int32_t begin = page * kPageTokens, end = begin + kPageTokens;
          bool seen = false;
          // The first row at or past each end of the page decides; rows are sorted.
          for (auto row = std::lower_bound(rows.begin(), rows.end(), begin); row != rows.end() && !seen; ++row) {
            seen = Sees(rule, *row, begin) || Sees(rule, *row, std::min(*row, end - 1));
            if (!seen && rule.rule == VisibilityRule::kBand && begin >= rule.num_sinks) break;
          }
          if (seen) {
            uses.push_back({entry, s, head, page});
          } else {
            traps.push_back(entry);
          }
        }
      }
    }
    constexpr int kTrapPages = 2;
    num_pages_ = static_cast<int32_t>(uses.size()) + kTrapPages + 3;
    std::vector<int32_t> physical(num_pages_);
    std::iota(physical.begin(), physical.end(), 0);
    std::shuffle(physical.begin(), physical.end(), rng);
    const size_t half = static_cast<size_t>(kPageTokens) * h.head_dim;
    pool_.assign(num_pages_ * KvPageBytes(spec_.kv_dtype, h.head_dim), std::byte{0xff});  // NaN in all types
    const KvPoolView pool{pool_.data(), spec_.kv_dtype, h.head_dim, num_pages_};
    for (size_t i = 0; i < uses.size(); ++i) {
      const Use& u = uses[i];
      tables_[u.entry] = physical[i];
      for (int slot = 0; slot < kPageTokens; ++slot) {
        const int32_t position = u.page * kPageTokens + slot;
        if (position >= kv_len_[u.sequence]) break;
        for (int which = 0; which < 2; ++which) {
          if (spec_.kv_dtype == DType::kE4M3) {
            std::byte* const to = which == 0 ? pool.k(physical[i]) : pool.v(physical[i]);
            pool.scales(to)[slot] = Scale(1 + which, u.sequence, position, u.head);
            for (int c = 0; c < h.head_dim; ++c)
              to[slot * h.head_dim + c] = std::byte{Code(1 + which, u.sequence, position, u.head, c)};
            continue;
          }
          for (int c = 0; c < h.head_dim; ++c) {
            Put((physical[i] * 2 + which) * half + slot * h.head_dim + c,
                Kv(1 + which, u.sequence, position, u.head, c));
          }
        }
      }
    }
    for (const int64_t entry : traps) tables_[entry] = rng() % 2 == 0 ? kNoPage : physical[uses.size() + rng() % 2];
  }

  void Put(size_t at, float x) {
    if (spec_.kv_dtype == DType::kF32) {
      std::memcpy(pool_.data() + 4 * at, &x, 4);
    } else {
      const bf16 b = ToBf16(x);
      std::memcpy(pool_.data() + 2 * at, &b, 2);
    }
  }

  void Upload() {
    const AttentionHeads& h = spec_.heads;
    std::vector<std::byte> q(static_cast<size_t>(num_rows()) * q_stride_ * DTypeBytes(spec_.dtype), std::byte{0xff});
    for (size_t s = 0; s < spec_.sequences.size(); ++s) {
      for (int64_t row = row_begin_[s]; row < row_begin_[s + 1]; ++row) {
        for (int head = 0; head < h.num_qo_heads; ++head) {
          for (int c = 0; c < h.head_dim; ++c) {
            const float x = Q(static_cast<int>(s), positions_[row], head, c);
            const size_t at = row * q_stride_ + head * h.head_dim + c;
            if (spec_.dtype == DType::kF32) {
              std::memcpy(q.data() + 4 * at, &x, 4);
            } else {
              const bf16 b = ToBf16(x);
              std::memcpy(q.data() + 2 * at, &b, 2);
            }
          }
        }
      }
    }
    q_device_ = std::make_unique<DeviceBuffer<std::byte>>(q);
    pool_device_ = std::make_unique<DeviceBuffer<std::byte>>(pool_);
    tables_device_ = std::make_unique<DeviceBuffer<int32_t>>(tables_);
    offsets_device_ = std::make_unique<DeviceBuffer<int64_t>>(offsets_);
    kv_len_device_ = std::make_unique<DeviceBuffer<int32_t>>(kv_len_);
    row_begin_device_ = std::make_unique<DeviceBuffer<int32_t>>(row_begin_);
    positions_device_ = std::make_unique<DeviceBuffer<int32_t>>(positions_);
    on_device_ = true;
  }

  Spec spec_;
  bool decode_;
  int32_t max_kv_len_ = 0, num_pages_ = 0;
  int64_t head_stride_ = 0, q_stride_ = 0;
  std::vector<int32_t> row_begin_, positions_, tables_, kv_len_;
  std::vector<int64_t> offsets_;
  std::vector<std::byte> pool_;
  bool on_device_ = false;
  std::unique_ptr<DeviceBuffer<std::byte>> q_device_, pool_device_;
  std::unique_ptr<DeviceBuffer<int32_t>> tables_device_, kv_len_device_, row_begin_device_, positions_device_;
  std::unique_ptr<DeviceBuffer<int64_t>> offsets_device_;
  std::unique_ptr<DeviceBuffer<WidenSequence>> wide_sequences_;
  std::unique_ptr<DeviceBuffer<int64_t>> wide_offsets_;
  std::unique_ptr<DeviceBuffer<int32_t>> wide_tables_;
  std::unique_ptr<DeviceBuffer<std::byte>> wide_pages_;
};

void ExpectClose(const Problem::Result& a, const Problem::Result& b, DType dtype) {
  ASSERT_EQ(a.out.size(), b.out.size());
  double diff = 0, norm = 0, max_diff = 0, max_ref = 0;
  for (size_t i = 0; i < a.out.size(); ++i) {
    const double d = a.out[i] - b.out[i];
    diff += d * d;
    norm += b.out[i] * b.out[i];
    max_diff = std::isnan(d) ? INFINITY : std::max(max_diff, std::abs(d));
    max_ref = std::max<double>(max_ref, std::abs(b.out[i]));
  }
  const Tolerance t = ToleranceFor(dtype);
  EXPECT_LE(std::sqrt(diff), t.relative_l2 * std::sqrt(norm));
  EXPECT_LE(max_diff, t.max_abs_of_max_ref * max_ref);
}

bool SameBits(const Problem::Result& a, const Problem::Result& b) {
  return a.raw == b.raw && std::memcmp(a.lse.data(), b.lse.data(), 4 * a.lse.size()) == 0;
}

// Rows [first, first + n) of a result.
Problem::Result Rows(const Problem& p, const Problem::Result& r, int first, int n) {
  const AttentionHeads& h = p.spec().heads;
  const size_t row = static_cast<size_t>(h.num_qo_heads) * h.head_dim;
  const size_t bytes = row * DTypeBytes(p.spec().dtype);
  Problem::Result out;
  out.raw.assign(r.raw.begin() + first * bytes, r.raw.begin() + (first + n) * bytes);
  out.lse.assign(r.lse.begin() + first * h.num_qo_heads, r.lse.begin() + (first + n) * h.num_qo_heads);
  return out;
}

std::string VariantName(Variant v) {
  switch (v) {
    case Variant::kGeneric:
      return "Generic";
    case Variant::kMma:
      return "Mma";
    case Variant::kSm90:
      return "Sm90";
    case Variant::kAuto:
      break;
  }
  return "Auto";
}

// A variant, and the type of the pages.
struct Case {
  Variant variant;
  DType pages = DType::kBF16;
  operator Variant() const { return variant; }  // NOLINT(google-explicit-constructor): a case runs its variant
};
std::string CaseName(const ::testing::TestParamInfo<Case>& i) {
  return VariantName(i.param) + (i.param.pages == DType::kE4M3 ? "Fp8" : "");
}

class CudaAttention : public ::testing::TestWithParam<Case> {
 protected:
  void TearDown() override { test_pages = DType::kBF16; }
  void SetUp() override {
    test_pages = GetParam().pages;
    int count = 0, major = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) GTEST_SKIP() << "no CUDA device";
    CHECK_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    if (GetParam() == Variant::kSm90 && major != 9) GTEST_SKIP() << "needs compute capability 9.0";
  }
};
class CudaPrefill : public CudaAttention {};
class CudaDecode : public CudaAttention {};

// All four heads differ; windows and sinks meet page and tile edges.
HeadRules MixedRules() {
  HeadRules r;
  r.head[0] = Full();
  r.head[1] = BandRule(4, 64);
  r.head[2] = BandRule(70, 1);
  r.head[3] = BandRule(0, 200);
  return r;
}

TEST_P(CudaPrefill, MatchesOracleOnSingleSequences) {
  for (const int dim : {64, 128}) {
    for (const int32_t len : {1, 17, 63, 64, 65, 127, 128, 129, 300, 1000, 2048}) {
      SCOPED_TRACE("dim " + std::to_string(dim) + " len " + std::to_string(len));
      Spec s;
      s.heads = Heads(8, 4, dim);
      s.rules = MixedRules();
      s.sequences = {{len, Range(0, len)}};
      s.data_seed = len;
      s.layout_seed = len + 1;
      s.magnitude = len % 2 == 0 ? 1.0f : 8.0f;
      Problem p(s, false);
      p.ExpectNearOracle(p.Run(GetParam()));
    }
  }
}

TEST_P(CudaPrefill, MatchesOracleOnRandomLayouts) {
  for (uint32_t seed = 1; seed <= 12; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 rng(seed);
    const auto pick = [&](int n) { return static_cast<int32_t>(rng() % n); };
    Spec s;
    const int kv_heads = 1 + pick(4), group = 1 << pick(4);
    s.heads = Heads(kv_heads * group, kv_heads, seed % 2 ? 128 : 64);
    for (int h = 0; h < kv_heads; ++h) {
      s.rules.head[h] = pick(3) == 0 ? Full() : BandRule(pick(2) ? pick(300) : 0, 1 + pick(pick(2) ? 400 : 3));
    }
    const int sequences = 1 + pick(6);
    for (int i = 0; i < sequences; ++i) {
      SequenceSpec q;
      q.kv_len = 1 + pick(i % 2 ? 1500 : 200);
      for (int32_t j = 0; j < q.kv_len; ++j) {
        // Whole prompts, tails, and sparse rows; sometimes none at all.
        const int kind = (seed + i) % 4;
        if (kind == 0 || (kind == 1 && j >= q.kv_len / 2) || (kind == 2 && rng() % 16 == 0)) q.positions.push_back(j);
      }
      s.sequences.push_back(q);
    }
    s.sequences.push_back({200, {0, 3, 64, 199}});
    s.data_seed = seed * 31;
    s.layout_seed = seed * 17;
    Problem p(s, false);
    const Problem::Result r = p.Run(GetParam());
    p.ExpectNearOracle(r, 12);
    if (GetParam() != Variant::kGeneric) ExpectClose(r, p.Run(Variant::kGeneric), DType::kBF16);
  }
}

TEST_P(CudaPrefill, BitsDoNotDependOnPagesRunsChunksOrMates) {
  Spec s;
  s.heads = Heads(8, 4, 128);
  s.rules = MixedRules();
  s.sequences = {{700, Range(0, 700)}, {333, Range(100, 333)}, {65, Range(0, 65)}};
  Problem whole(s, false);
  const Problem::Result expected = whole.Run(GetParam());
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(SameBits(expected, whole.Run(GetParam()))) << "run " << i;

  Spec shuffled = s;
  shuffled.layout_seed = 99;
  EXPECT_TRUE(SameBits(expected, Problem(shuffled, false).Run(GetParam())));

  Spec alone = s;
  alone.sequences = {s.sequences[1]};
  alone.ids = {1};
  Problem alone_problem(alone, false);
  EXPECT_TRUE(SameBits(Rows(whole, expected, 700, 233), alone_problem.Run(GetParam())));

  for (const int32_t chunk : {64, 100, 300}) {
    for (int32_t begin = 0; begin < 700; begin += chunk) {
      const int32_t end = std::min(begin + chunk, 700);
      Spec part = s;
      part.sequences = {{end, Range(begin, end)}};  // later positions are not written yet: poisoned
      Problem p(part, false);
      EXPECT_TRUE(SameBits(Rows(whole, expected, begin, end - begin), p.Run(GetParam()))) << begin << ".." << end;
    }
  }

  Spec sparse = s;
  sparse.sequences = {{700, {5, 70, 71, 200, 511, 512, 699}}};
  Problem sparse_problem(sparse, false);
  const Problem::Result rows = sparse_problem.Run(GetParam());
  for (size_t i = 0; i < sparse.sequences[0].positions.size(); ++i) {
    const int32_t position = sparse.sequences[0].positions[i];
    EXPECT_TRUE(SameBits(Rows(whole, expected, position, 1), Rows(sparse_problem, rows, static_cast<int>(i), 1)))
        << "position " << position;
  }
}

// Only the last rows, with the bits that they have among all; the others' results are not touched.
TEST_P(CudaPrefill, LastRowsHaveTheBitsOfAllRows) {
  Spec s;
  s.heads = Heads(8, 4, 128);
  s.rules = MixedRules();
  s.sequences = {{700, Range(0, 700)}, {333, Range(100, 333)}, {65, Range(0, 65)}};
  Problem whole(s, false);
  const Problem::Result expected = whole.Run(GetParam());
  for (const int32_t last : {1, 64, 128, 200, 900}) {
    Spec some = s;
    some.last_rows = last;
    Problem problem(some, false);
    const Problem::Result got = problem.Run(GetParam());
    int end = 0;
    for (const SequenceSpec& sequence : s.sequences) {
      const int count = static_cast<int>(sequence.positions.size());
      end += count;
      const int n = std::min(last, count);
      EXPECT_TRUE(SameBits(Rows(whole, expected, end - n, n), Rows(problem, got, end - n, n))) << last;
      if (n < count) {
        EXPECT_FALSE(SameBits(Rows(whole, expected, end - n - 1, 1), Rows(problem, got, end - n - 1, 1))) << last;
      }
    }
  }
}

TEST_P(CudaPrefill, WideBandEqualsFull) {
  Spec s;
  s.heads = Heads(4, 2, 128);
  s.sequences = {{500, Range(0, 500)}};
  const Problem::Result full = Problem(s, false).Run(GetParam());
  for (const HeadRule rule : {BandRule(0, 500), BandRule(30, 600), BandRule(600, 1), BandRule(250, 250)}) {
    for (int h = 0; h < 2; ++h) s.rules.head[h] = rule;
    EXPECT_TRUE(SameBits(full, Problem(s, false).Run(GetParam()))) << rule.num_sinks << " " << rule.window;
  }
}

TEST_P(CudaPrefill, AgreesWithGenericAt32K) {
  if (GetParam() == Variant::kGeneric) GTEST_SKIP();
  std::mt19937 rng(5);
  Spec s;
  s.heads = Heads(4, 2, 128);
  s.rules.head[1] = BandRule(64, 256);
  SequenceSpec q{32768, Range(32768 - 160, 32768)};
  std::vector<int32_t> sparse;
  for (int i = 0; i < 300; ++i) sparse.push_back(static_cast<int32_t>(rng() % (32768 - 160)));
  std::sort(sparse.begin(), sparse.end());
  sparse.erase(std::unique(sparse.begin(), sparse.end()), sparse.end());
  q.positions.insert(q.positions.begin(), sparse.begin(), sparse.end());
  s.sequences = {q};
  s.magnitude = 6;
  Problem p(s, false);
  ExpectClose(p.Run(GetParam()), p.Run(Variant::kGeneric), DType::kBF16);
}

TEST_P(CudaPrefill, HeadCountsAndQueueOrder) {
  // Many more tiles than multiprocessors, unequal sequences, every row compared with the generic variant.
  Spec s;
  s.heads = Heads(16, 8, 64);
  for (int h = 0; h < 8; h += 2) s.rules.head[h] = BandRule(17 * h, 33 + h);
  for (int i = 0; i < 40; ++i) s.sequences.push_back({1 + i * 37 % 700, Range(0, 1 + i * 37 % 700)});
  Problem p(s, false);
  const Problem::Result r = p.Run(GetParam());
  ExpectClose(r, p.Run(Variant::kGeneric), DType::kBF16);
}

INSTANTIATE_TEST_SUITE_P(Variants, CudaPrefill,
                         ::testing::Values(Case{Variant::kGeneric}, Case{Variant::kMma}, Case{Variant::kSm90},
                                           Case{Variant::kMma, DType::kE4M3}, Case{Variant::kSm90, DType::kE4M3}),
                         CaseName);

TEST_P(CudaDecode, MatchesOracleOnLengths) {
  for (const int dim : {64, 128}) {
    for (const int group : {1, 4, 8, 16}) {
      SCOPED_TRACE("dim " + std::to_string(dim) + " group " + std::to_string(group));
      Spec s;
      s.heads = Heads(4 * group, 4, dim);
      s.rules = MixedRules();
      for (const int32_t len : {1, 17, 63, 64, 65, 511, 512, 513, 576, 1100, 2048}) s.sequences.push_back({len, {}});
      s.data_seed = dim + group;
      s.magnitude = group % 8 == 0 ? 8.0f : 1.0f;
      Problem p(s, true);
      const Problem::Result r = p.Run(GetParam());
      p.ExpectNearOracle(r);
      if (GetParam() != Variant::kGeneric) ExpectClose(r, p.Run(Variant::kGeneric), DType::kBF16);
    }
  }
}

TEST_P(CudaDecode, MatchesOracleOnRandomRules) {
  for (uint32_t seed = 1; seed <= 12; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 rng(seed);
    const auto pick = [&](int n) { return static_cast<int32_t>(rng() % n); };
    Spec s;
    const int kv_heads = 1 + pick(8), group = 1 + pick(kMaxDecodeGroup);
    s.heads = Heads(kv_heads * group, kv_heads, seed % 2 ? 128 : 64);
    for (int h = 0; h < kv_heads; ++h) {
      s.rules.head[h] = pick(3) == 0 ? Full() : BandRule(pick(2) ? pick(900) : 0, 1 + pick(pick(2) ? 900 : 3));
    }
    for (int i = 0; i < 5; ++i) s.sequences.push_back({1 + pick(2048), {}});
    s.data_seed = seed;
    s.layout_seed = seed;
    Problem p(s, true);
    p.ExpectNearOracle(p.Run(GetParam()));
  }
}

TEST_P(CudaDecode, BitsDoNotDependOnPagesRunsBucketOrMates) {
  Spec s;
  s.heads = Heads(16, 4, 128);
  s.rules = MixedRules();
  s.sequences = {{3000, {}}, {1, {}}, {9777, {}}, {2048, {}}};
  Problem all(s, true);
  const Problem::Result expected = all.Run(GetParam());
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(SameBits(expected, all.Run(GetParam()))) << "run " << i;
  EXPECT_TRUE(SameBits(expected, all.Run(GetParam(), 65536)));
  Spec shuffled = s;
  shuffled.layout_seed = 4;
  EXPECT_TRUE(SameBits(expected, Problem(shuffled, true).Run(GetParam())));
  for (int i = 0; i < 4; ++i) {
    Spec one = s;
    one.sequences = {s.sequences[i]};
    one.ids = {i};
    EXPECT_TRUE(SameBits(Rows(all, expected, i, 1), Problem(one, true).Run(GetParam(), 4096 << (2 * i)))) << i;
  }
}

// More splits than fit the device at once, of long and short sequences.
TEST_P(CudaDecode, ManySplitsHaveTheBitsOfALoneSequence) {
  for (const auto& [dim, group] : std::vector<std::pair<int, int>>{{128, 4}, {64, 12}}) {
    SCOPED_TRACE("dim " + std::to_string(dim) + " group " + std::to_string(group));
    Spec s;
    s.heads = Heads(4 * group, 4, dim);
    s.rules.head[2] = BandRule(70, 2500);
    for (int i = 0; i < 16; ++i) s.sequences.push_back({i % 4 == 3 ? 1 + 600 * (i / 4) : 4100 - 11 * i, {}});
    Problem all(s, true);
    const Problem::Result expected = all.Run(GetParam());
    for (int i = 0; i < 5; ++i) EXPECT_TRUE(SameBits(expected, all.Run(GetParam()))) << "run " << i;
    EXPECT_TRUE(SameBits(expected, all.Run(GetParam(), 16384)));
    for (const int i : {0, 1, 3, 6, 11, 14}) {
      Spec one = s;
      one.sequences = {s.sequences[i]};
      one.ids = {i};
      EXPECT_TRUE(SameBits(Rows(all, expected, i, 1), Problem(one, true).Run(GetParam()))) << i;
    }
  }
}

TEST_P(CudaDecode, WideBandEqualsFull) {
  Spec s;
  s.heads = Heads(8, 2, 128);
  s.sequences = {{1300, {}}, {64, {}}};
  const Problem::Result full = Problem(s, true).Run(GetParam());
  for (const HeadRule rule : {BandRule(0, 1300), BandRule(30, 2000), BandRule(2000, 1), BandRule(650, 650)}) {
    for (int h = 0; h < 2; ++h) s.rules.head[h] = rule;
    EXPECT_TRUE(SameBits(full, Problem(s, true).Run(GetParam()))) << rule.num_sinks << " " << rule.window;
  }
}

TEST_P(CudaDecode, GraphReplaysFollowTheLengths) {
  Spec s;
  s.heads = Heads(8, 2, 128);  // all heads kFull: every page up to kv_len is listed
  s.sequences = {{9000, {}}, {9000, {}}};
  Problem p(s, true);
  p.ExpectReplaysEqualLaunches(GetParam(), 16384, {1, 511, 512, 513, 4000, 8192, 8193, 9000});
}

TEST_P(CudaDecode, EmptySequenceGivesZeros) {
  Spec s;
  s.heads = Heads(8, 2, 64);
  s.sequences = {{0, {}}, {100, {}}};
  const Problem::Result r = Problem(s, true).Run(GetParam());
  for (int i = 0; i < 8 * 64; ++i) EXPECT_EQ(r.out[i], 0.0f);
  for (int i = 0; i < 8; ++i) EXPECT_EQ(r.lse[i], -INFINITY);
  for (int i = 8; i < 16; ++i) EXPECT_TRUE(std::isfinite(r.lse[i]));
}

TEST_P(CudaDecode, AgreesWithGenericAtLongContext) {
  if (GetParam() == Variant::kGeneric) GTEST_SKIP();
  Spec s;
  s.heads = Heads(32, 2, 128);
  s.rules.head[1] = BandRule(64, 5000);
  s.sequences = {{32768, {}}, {70001, {}}};  // decode's split length differs
  s.magnitude = 6;
  Problem p(s, true);
  ExpectClose(p.Run(GetParam()), p.Run(Variant::kGeneric), DType::kBF16);
}

INSTANTIATE_TEST_SUITE_P(Variants, CudaDecode,
                         ::testing::Values(Case{Variant::kGeneric}, Case{Variant::kMma},
                                           Case{Variant::kGeneric, DType::kE4M3}, Case{Variant::kMma, DType::kE4M3}),
                         CaseName);

class CudaGeneric : public CudaAttention {};

TEST_P(CudaGeneric, ServesEveryTypeAndWidth) {
  for (const int dim : {8, 24, 72, 96, 192, 256}) {
    for (const DType kv : {DType::kF32, DType::kBF16, DType::kE4M3}) {
      for (const DType q : {DType::kF32, DType::kBF16}) {
        SCOPED_TRACE("dim " + std::to_string(dim));
        Spec s;
        s.heads = Heads(6, 2, dim);
        s.rules.head[1] = BandRule(9, 40);
        s.kv_dtype = kv;
        s.dtype = q;
        s.sequences = {{150, Range(0, 150)}, {70, Range(33, 70)}};
        if (kv != DType::kE4M3 || dim % 16 == 0) {
          Problem prefill(s, false);
          prefill.ExpectNearOracle(prefill.Run(Variant::kAuto));
        }
        Problem decode(s, true);
        decode.ExpectNearOracle(decode.Run(Variant::kAuto));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Variants, CudaGeneric, ::testing::Values(Case{Variant::kAuto}), CaseName);

// Refusals are told before anything runs; no device memory is touched.
TEST(CudaAttentionErrors, SaysWhatItDoesNotServe) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) GTEST_SKIP() << "no CUDA device";
  static std::byte memory[256];
  DecodeArgs d;
  d.heads = Heads(8, 2, 96);
  d.batch.page_tables = reinterpret_cast<int32_t*>(memory);
  d.batch.table_offset = reinterpret_cast<int64_t*>(memory);
  d.batch.kv_len = reinterpret_cast<int32_t*>(memory);
  d.batch.pool = {memory, DType::kBF16, 96, 1};
  d.batch.num_sequences = 1;
  d.max_kv_len = 100;
  d.q = d.out = d.workspace = memory;
  d.q_row_stride = 8 * 96;
  EXPECT_EQ(DecodeAttention(d, nullptr, Variant::kMma), cudaErrorNotSupported);
  EXPECT_EQ(DecodeAttention(d, nullptr, Variant::kSm90), cudaErrorNotSupported);
  DecodeArgs bad = d;
  bad.q_row_stride = 8 * 96 - 1;
  EXPECT_EQ(DecodeAttention(bad, nullptr), cudaErrorInvalidValue);
  bad = d;
  bad.heads.num_qo_heads = 7;
  EXPECT_EQ(DecodeAttention(bad, nullptr), cudaErrorInvalidValue);
  bad = d;
  bad.rules.head[1].rule = VisibilityRule::kList;
  EXPECT_EQ(DecodeAttention(bad, nullptr), cudaErrorNotSupported);
  bad = d;
  bad.rules.head[1] = BandRule(4, 0);
  EXPECT_EQ(DecodeAttention(bad, nullptr), cudaErrorInvalidValue);
  bad = d;
  bad.batch.pool.dtype = DType::kF16;
  EXPECT_EQ(DecodeAttention(bad, nullptr), cudaErrorNotSupported);
  PrefillArgs f;
  f.heads = d.heads;
  f.batch = d.batch;
  f.num_rows = 1;
  f.q = f.out = f.workspace = memory;
  f.q_row_stride = 8 * 96;
  EXPECT_EQ(PrefillAttention(f, nullptr), cudaErrorInvalidValue);  // no positions
  f.row_begin = f.positions = reinterpret_cast<int32_t*>(memory);
  EXPECT_EQ(PrefillAttention(f, nullptr, Variant::kSm90), cudaErrorNotSupported);
  EXPECT_EQ(PrefillAttention(f, nullptr, Variant::kMma), cudaErrorNotSupported);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

}  // namespace
}  // namespace spl::kernels::cuda
