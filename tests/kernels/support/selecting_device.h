// A SelectingBatch on a device: its pool, staged steps, lists and outputs. For tests of backends that are not the host.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "kernels/backend/backend.h"
#include "kernels/backend/cuda/cuda_plugin.h"
#include "tests/kernels/support/kernel_test_util.h"
#include "tests/kernels/support/selecting_batch.h"

namespace spl::kernels::testing {

// Tests on the CUDA backend. Skipped where it cannot be loaded: the machine has no GPU.
class CudaSelecting : public ::testing::Test {
 protected:
  void SetUp() override {
    auto cuda = MakeCudaBackend();
    if (!cuda.ok()) GTEST_SKIP() << cuda.status();
    cuda_ = *std::move(cuda);
  }
  std::unique_ptr<Backend> cuda_;
};

// The outer choice of every sequence of a batch, and the pages where it keeps its lists, in those of each stream.
struct StagedOuter {
  LayerSelection step;
  int32_t budget = 0;
  int32_t list_begin = 0, list_pages = 0;
};

// The device's side of a SelectingBatch whose layer is the second of two; the first one selects nowhere.
class DeviceSide {
 public:
  static constexpr int32_t kLayers = 2, kLayer = 1;
  std::vector<HotRows> hot;  // [sequences], in device memory, or empty: staged with the next steps

  DeviceSide(const Backend& cuda, SelectingBatch& b, int64_t stride, int64_t weights_stride, DType q_dtype)
      : cuda_(cuda), b_(b), stride_(stride), weights_stride_(weights_stride), q_dtype_(q_dtype) {
    int32_t longest = 0;
    for (const TestSequence& s : b.sequences()) longest = std::max(longest, s.max_len);
    const auto sequences = static_cast<int32_t>(b.sequences().size());
    session_ = cuda.NewSession({.max_rows = sequences,
                                .max_sequences = sequences,
                                .num_layers = kLayers,
                                .num_kv_heads = b.shape().kv_heads,
                                .max_pages_per_stream = longest / kPageTokens + 1})
                   .value();
    pool_ = cuda.Allocate(b.pool().bytes().size()).value();
    ExpectOk(cuda.Copy(CopyKind::kUpload, pool_->data(), b.pool().bytes().data(), b.pool().bytes().size()));
    q_ = cuda.Allocate(b.q().size() * DTypeBytes(q_dtype)).value();
    out_ = cuda.Allocate(b.q().size() * DTypeBytes(q_dtype)).value();
    tokens_ = cuda.Allocate(b.num_streams() * stride * 4).value();
    counts_ = cuda.Allocate(b.num_streams() * 4).value();
    weights_ = cuda.Allocate(b.num_streams() * weights_stride * 4).value();
    for (const TestSequence& s : b.sequences()) {
      dims_.push_back(cuda.Allocate(kLayers * s.dims.size() * 4).value());
      tables_.emplace_back();
      compact_.emplace_back();
      for (int32_t layer = 0; layer < kLayers; ++layer) {
        for (int32_t h = 0; h < b.shape().kv_heads; ++h) {
          tables_.back().push_back(s.streams[h].page_table);
          compact_.back().emplace_back();
          if (layer != kLayer) continue;
          if (!s.list_pages.empty()) compact_.back().back() = s.list_pages[h];
          compact_.back().back().insert(compact_.back().back().end(), s.compact[h].begin(), s.compact[h].end());
        }
      }
    }
  }

  // A position that has been written on the host's side since.
  void UploadToken(size_t sequence, int32_t j) {
    const KvPoolView& host = b_.pool().view();
    const size_t row = host.head_dim * DTypeBytes(host.dtype);
    for (const TestStream& s : b_.sequences()[sequence].streams) {
      for (const std::byte* half : {host.k(s.page_table[j / kPageTokens]), host.v(s.page_table[j / kPageTokens])}) {
        const std::byte* from = half + static_cast<size_t>(j % kPageTokens) * row;
        ExpectOk(cuda_.Copy(CopyKind::kUpload, static_cast<std::byte*>(pool_->data()) + (from - host.base), from, row));
        if (host.dtype != DType::kE4M3) continue;
        const std::byte* scale = half + kPageTokens * row + j % kPageTokens;
        ExpectOk(cuda_.Copy(CopyKind::kUpload, static_cast<std::byte*>(pool_->data()) + (scale - host.base), scale, 1));
      }
    }
  }

  void Stage(std::span<const HeadVisibility> plan = {}, uint64_t plan_key = 0, const StagedOuter* outer = nullptr) {
    const std::vector<std::byte> q = Encode(b_.q(), q_dtype_);
    ExpectOk(cuda_.Copy(CopyKind::kUpload, q_->data(), q.data(), q.size()));
    std::vector<std::array<LayerSelection, kLayers>> steps(b_.sequences().size());
    std::vector<std::array<LayerSelection, kLayers>> outer_steps(b_.sequences().size());
    std::vector<SequenceSelection> selections(b_.sequences().size()), outers(b_.sequences().size());
    std::vector<BatchSequence> sequences;
    std::vector<int32_t> tokens(b_.sequences().size(), 0), positions;
    const size_t plan_size = static_cast<size_t>(kLayers) * b_.shape().kv_heads;
    for (size_t i = 0; i < b_.sequences().size(); ++i) {
      const TestSequence& s = b_.sequences()[i];
      steps[i][kLayer] = s.step;
      selections[i] = {.compact_tables = compact_[i],
                       .layers = steps[i],
                       .budget = s.budget,
                       .recent = s.recent,
                       .dims = static_cast<int32_t*>(dims_[i]->data()),
                       .list_pages = static_cast<int32_t>(s.list_pages.empty() ? 0 : s.list_pages[0].size()),
                       .first_fresh = s.first_fresh};
      if (!hot.empty()) selections[i].hot = hot[i];
      if (outer != nullptr) {
        outer_steps[i][kLayer] = outer->step;
        outers[i] = {.compact_tables = compact_[i],
                     .layers = outer_steps[i],
                     .budget = outer->budget,
                     .recent = std::min(s.recent, outer->budget)};
        selections[i].list_begin = outer->list_begin;
        selections[i].list_pages = outer->list_pages;
        selections[i].outer = &outers[i];
      }
      positions.push_back(s.kv_len - 1);
      sequences.push_back({.row_begin = static_cast<int32_t>(i),
                           .row_end = static_cast<int32_t>(i) + 1,
                           .kv_len = s.kv_len,
                           .page_tables = tables_[i],
                           .kv_id = 100 + i,
                           .plan = plan.empty() ? plan : plan.subspan(i * plan_size, plan_size),
                           .plan_key = plan_key,
                           .selection = &selections[i]});
    }
    ExpectOk(session_->Stage(
        {.tokens = tokens, .positions = positions, .sequences = sequences, .staged_plans = !plan.empty()}));
  }

  KvPoolView pool() const {
    KvPoolView view = b_.pool().view();
    view.base = static_cast<std::byte*>(pool_->data());
    return view;
  }
  TokenLists lists() const {
    return {static_cast<int32_t*>(tokens_->data()), static_cast<int32_t*>(counts_->data()), stride_};
  }
  SelectTokensArgs Args(bool with_weights = true) const {
    SelectTokensArgs a;
    a.shape = b_.shape().attention();
    a.pool = pool();
    a.num_dims = b_.shape().num_dims;
    a.q = {q_->data(), q_dtype_};
    a.q_row_stride = b_.shape().q_width();
    a.lists = lists();
    if (with_weights) {
      a.weights = static_cast<float*>(weights_->data());
      a.weights_stride = weights_stride_;
    }
    a.layer = kLayer;
    return a;
  }
  SparseAttentionArgs SparseArgs(float* lse = nullptr) const {
    SparseAttentionArgs a;
    a.shape = b_.shape().attention();
    a.pool = pool();
    a.q = {q_->data(), q_dtype_};
    a.q_row_stride = b_.shape().q_width();
    a.out = {out_->data(), q_dtype_};
    a.lse = lse;
    a.lists = lists();
    a.weights = static_cast<float*>(weights_->data());
    a.weights_stride = weights_stride_;
    a.layer = kLayer;
    return a;
  }
  DecodeAttentionArgs AttentionArgs(std::span<const HeadStreamView> streams) const {
    DecodeAttentionArgs a;
    a.shape = b_.shape().attention();
    a.pool = pool();
    a.q = {q_->data(), q_dtype_};
    a.q_row_stride = b_.shape().q_width();
    a.out = {out_->data(), q_dtype_};
    a.streams = streams;
    a.layer = kLayer;
    a.lists = lists();
    return a;
  }

  template <typename T>
  std::vector<T> Download(const Buffer& buffer) const {
    std::vector<T> values(buffer.size() / sizeof(T));
    ExpectOk(session_->Synchronize());
    ExpectOk(cuda_.Copy(CopyKind::kDownload, values.data(), buffer.data(), values.size() * sizeof(T)));
    return values;
  }
  std::vector<std::byte> Pool() const { return Download<std::byte>(*pool_); }
  // Compares the device's pool with the batch's, which has what the test wrote.
  void ExpectOnlyCompactPagesWritten() const {
    std::set<int32_t> compact;
    for (const TestSequence& s : b_.sequences()) {
      for (const auto& pages : s.compact) compact.insert(pages.begin(), pages.end());
    }
    const std::vector<std::byte> pool = Pool();
    const size_t page_bytes = b_.pool().view().page_bytes();
    for (int32_t page = 0; page < b_.pool().view().num_pages; ++page) {
      if (compact.contains(page)) continue;
      EXPECT_TRUE(std::ranges::equal(std::span(pool).subspan(page * page_bytes, page_bytes),
                                     std::span(b_.pool().bytes()).subspan(page * page_bytes, page_bytes)))
          << "page " << page;
    }
  }
  std::vector<int32_t> Tokens() const { return Download<int32_t>(*tokens_); }
  std::vector<int32_t> Counts() const { return Download<int32_t>(*counts_); }
  std::vector<float> Weights() const { return Download<float>(*weights_); }
  std::vector<float> Out() const {
    std::vector<float> values;
    if (q_dtype_ == DType::kF32) return Download<float>(*out_);
    for (const bf16 x : Download<bf16>(*out_)) values.push_back(ToFloat(x));
    return values;
  }
  std::vector<int32_t> Dims(size_t sequence) const {
    const std::vector<int32_t> all = Download<int32_t>(*dims_[sequence]);
    return {all.begin() + static_cast<int64_t>(all.size()) * kLayer / kLayers, all.end()};
  }
  void FillOut(uint8_t byte) {
    const std::vector<uint8_t> bytes(out_->size(), byte);
    ExpectOk(cuda_.Copy(CopyKind::kUpload, out_->data(), bytes.data(), bytes.size()));
  }
  void SetLists(const std::vector<int32_t>& tokens, const std::vector<int32_t>& counts) {
    ExpectOk(cuda_.Copy(CopyKind::kUpload, tokens_->data(), tokens.data(), tokens.size() * 4));
    ExpectOk(cuda_.Copy(CopyKind::kUpload, counts_->data(), counts.data(), counts.size() * 4));
  }
  Session& session() const { return *session_; }
  const KernelContext& ctx() const { return session_->context(); }

 private:
  const Backend& cuda_;
  SelectingBatch& b_;
  const int64_t stride_, weights_stride_;
  const DType q_dtype_;
  std::unique_ptr<Session> session_;
  std::unique_ptr<Buffer> pool_, q_, out_, tokens_, counts_, weights_;
  std::vector<std::unique_ptr<Buffer>> dims_;
  std::vector<std::vector<std::vector<int32_t>>> tables_, compact_;
};

}  // namespace spl::kernels::testing
