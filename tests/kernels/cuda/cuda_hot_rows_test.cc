// Steps of sequences with pages in host memory on the CUDA backend: the bits of the same steps with all pages in the
// pool, and tables and slots as the reference has them. Recorded from the second step on. Skipped where no GPU serves
// it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/backend/backend.h"
#include "kernels/selection/sparcas/refill_hot_rows.h"
#include "tests/kernels/support/hot_buffer.h"
#include "tests/kernels/support/selecting_device.h"
#include "tests/kernels/support/sparse_batch.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

using CudaHotRowsTest = CudaSelecting;

// The tables of a TestHotBuffer in device memory, as those of the second of two layers.
class DeviceHot {
 public:
  DeviceHot(const Backend& cuda, TestHotBuffer& host) : cuda_(cuda), host_(host), of_host_(host.rows()) {
    ExpectOk(cuda.PinHost(host.memory().data(), host.memory().size()));
    const auto make = [&](size_t bytes) { return cuda.Allocate(DeviceSide::kLayers * bytes).value(); };
    host_pages_ = make(host.host_pages_.size() * sizeof(void*));
    slot_pages_ = make(host.slot_pages_.size() * sizeof(int32_t));
    slot_of_ = make(host.slot_of_.size() * sizeof(uint16_t));
    position_of_ = make(host.position_of_.size() * sizeof(int32_t));
    listed_at_ = make(host.listed_at_.size() * sizeof(int32_t));
    counts_ = cuda.Allocate(sizeof(host.counts_)).value();
    Upload(*slot_pages_, host.slot_pages_);
    UploadHostPages();
  }
  ~DeviceHot() { cuda_.UnpinHost(host_.memory().data()); }
  void UploadHostPages() { Upload(*host_pages_, host_.host_pages_); }

  HotRows rows() const {
    return {of_host_.num_slots,
            of_host_.max_pages,
            static_cast<const std::byte* const*>(host_pages_->data()),
            static_cast<const int32_t*>(slot_pages_->data()),
            static_cast<uint16_t*>(slot_of_->data()),
            static_cast<int32_t*>(position_of_->data()),
            static_cast<int32_t*>(listed_at_->data()),
            static_cast<uint64_t*>(counts_->data())};
  }
  void ExpectEqual(const std::string& what) {
    EXPECT_EQ(Download(*slot_of_, host_.slot_of_), host_.slot_of_) << what;
    EXPECT_EQ(Download(*position_of_, host_.position_of_), host_.position_of_) << what;
    EXPECT_EQ(Download(*listed_at_, host_.listed_at_), host_.listed_at_) << what;
    uint64_t counts[2];
    ExpectOk(cuda_.Copy(CopyKind::kDownload, counts, counts_->data(), sizeof(counts)));
    EXPECT_EQ(counts[0], host_.counts_[0]) << what;
    EXPECT_EQ(counts[1], host_.counts_[1]) << what;
  }

 private:
  template <typename T>
  void Upload(Buffer& to, const std::vector<T>& values) {
    const size_t bytes = values.size() * sizeof(T);
    ExpectOk(cuda_.Copy(CopyKind::kUpload, static_cast<std::byte*>(to.data()) + DeviceSide::kLayer * bytes,
                        values.data(), bytes));
  }
  template <typename T>
  std::vector<T> Download(const Buffer& from, const std::vector<T>& like) {
    std::vector<T> values(like.size());
    const size_t bytes = values.size() * sizeof(T);
    ExpectOk(cuda_.Copy(CopyKind::kDownload, values.data(),
                        static_cast<const std::byte*>(from.data()) + DeviceSide::kLayer * bytes, bytes));
    return values;
  }

  const Backend& cuda_;
  TestHotBuffer& host_;
  const HotRows of_host_;
  std::unique_ptr<Buffer> host_pages_, slot_pages_, slot_of_, position_of_, listed_at_, counts_;
};

struct Case {
  SelectingShape shape;
  std::vector<std::pair<int32_t, int32_t>> lengths;  // the last sequence never moves
  int32_t budget, slots;
  int steps;
  Keys keys = Keys::kNormal;
};

void RunCase(const Backend& cuda, const Case& c, uint64_t seed) {
  Random of_one(seed), of_other(seed), steps(seed + 1), moves(seed + 2);
  SelectingBatch whole(of_one, c.shape, c.lengths, PackedPageTokens(c.shape)),
      moved(of_other, c.shape, c.lengths, PackedPageTokens(c.shape));
  for (SelectingBatch* b : {&whole, &moved}) {
    Random random(seed + 3);
    for (size_t stream = 0; stream < b->num_streams(); ++stream) ShapeKeys(random, c.shape, c.keys, b->stream(stream));
    b->Write();
    for (TestSequence& s : b->sequences()) s.recent = 64;
  }
  int64_t longest = 0;
  for (const auto& [kv_len, max_len] : c.lengths) longest = std::max<int64_t>(longest, max_len);
  std::vector<std::unique_ptr<TestHotBuffer>> hot;
  for (size_t i = 0; i + 1 < c.lengths.size(); ++i)
    hot.push_back(std::make_unique<TestHotBuffer>(moved, moved.sequences()[i], c.slots));
  const DType dtype = DerivedKeyType(c.shape.dtype);
  DeviceSide a(cuda, whole, c.budget, longest, dtype), b(cuda, moved, c.budget, longest, dtype);
  std::vector<std::unique_ptr<DeviceHot>> device;
  for (const auto& of_sequence : hot) {
    device.push_back(std::make_unique<DeviceHot>(cuda, *of_sequence));
    b.hot.push_back(device.back()->rows());
  }
  b.hot.emplace_back();
  const size_t lse_bytes = whole.num_streams() * static_cast<size_t>(c.shape.group) * sizeof(float);
  const auto lse_a = cuda.Allocate(lse_bytes).value(), lse_b = cuda.Allocate(lse_bytes).value();
  const size_t page_bytes = moved.pool().view().page_bytes();
  const std::vector<std::byte> nan(page_bytes, std::byte{0xff});
  for (int step = 0; step < c.steps; ++step) {
    const std::string what = "seed " + std::to_string(seed) + ", step " + std::to_string(step);
    for (size_t i = 0; i < c.lengths.size(); ++i) {
      TestSequence &s = whole.sequences()[i], &t = moved.sequences()[i];
      s.step.selects = steps.Int(0, 5) > 0;
      s.step.refresh |= steps.Int(0, 3) == 0;
      s.budget = steps.Int(64, c.budget);
      t.budget = s.budget, t.step = s.step;
    }
    for (float& x : whole.q()) x = ToFloat(ToBf16(steps.Normal()));
    moved.q() = whole.q();
    a.Stage();
    a.FillOut(0xab);
    ExpectOk(a.session().RunStep(
        1, [&] { return cuda.SparseAttention(a.ctx(), a.SparseArgs(static_cast<float*>(lse_a->data()))); }));
    b.Stage();
    b.FillOut(0xab);
    ExpectOk(b.session().RunStep(1, [&]() -> absl::Status {
      const SparseAttentionArgs args = b.SparseArgs(static_cast<float*>(lse_b->data()));
      if (absl::Status s = cuda.SparseAttention(b.ctx(), args); !s.ok()) return s;
      if (absl::Status s = cuda.RefillHotRows(
              b.ctx(), {.pool = args.pool, .num_kv_heads = c.shape.kv_heads, .lists = args.lists, .layer = args.layer});
          !s.ok())
        return s;
      return cuda.AttendHotRows(b.ctx(), {.shape = args.shape,
                                          .pool = args.pool,
                                          .q = args.q,
                                          .q_row_stride = args.q_row_stride,
                                          .out = args.out,
                                          .lse = args.lse,
                                          .lists = args.lists,
                                          .layer = args.layer});
    }));
    std::vector<int32_t> tokens = b.Tokens(), counts = b.Counts();
    const std::vector<int32_t> want_tokens = a.Tokens(), want_counts = a.Counts();
    const std::vector<float> got_lse = b.Download<float>(*lse_b), want_lse = a.Download<float>(*lse_a);
    for (size_t stream = 0; stream < whole.num_streams(); ++stream) {
      if (!whole.sequence_of(stream).step.selects) continue;
      ASSERT_EQ(counts[stream], want_counts[stream]) << what << ", stream " << stream;
      const auto list = [&](const std::vector<int32_t>& all) {
        return std::span(all).subspan(stream * static_cast<size_t>(c.budget), static_cast<size_t>(counts[stream]));
      };
      ASSERT_TRUE(std::ranges::equal(list(tokens), list(want_tokens))) << what << ", stream " << stream;
      const auto group = static_cast<size_t>(c.shape.group);
      EXPECT_TRUE(BitwiseEqual(std::span(got_lse).subspan(stream * group, group),
                               std::span(want_lse).subspan(stream * group, group)))
          << what << ", stream " << stream;
    }
    ASSERT_TRUE(BitwiseEqual(b.Out(), a.Out())) << what;
    // The same refill by the reference, in the host's pool.
    std::vector<SelectingSequence> views;
    for (size_t i = 0; i < c.lengths.size(); ++i) {
      views.push_back(moved.sequences()[i].view());
      if (i < hot.size()) views.back().hot = hot[i]->rows();
    }
    ExpectOk(ref::RefillHotRows({}, {.pool = moved.pool().view(),
                                     .num_kv_heads = c.shape.kv_heads,
                                     .sequences = views,
                                     .lists = {tokens.data(), counts.data(), c.budget}}));
    const std::vector<std::byte> pool = b.Pool();
    for (size_t i = 0; i < hot.size(); ++i) {
      device[i]->ExpectEqual(what + ", sequence " + std::to_string(i));
      for (const int32_t page : hot[i]->slot_pages_)
        EXPECT_EQ(
            std::memcmp(pool.data() + static_cast<size_t>(page) * page_bytes, moved.pool().view().k(page), page_bytes),
            0)
            << what << ", sequence " << i << ", slots of page " << page;
    }
    if (::testing::Test::HasFailure()) return;
    for (size_t i = 0; i < c.lengths.size(); ++i) {
      TestSequence &s = whole.sequences()[i], &t = moved.sequences()[i];
      if (s.step.selects) s.Advance(), t.Advance();
      for (int n = steps.Int(1, 4); n > 0 && s.kv_len < s.max_len; --n) {
        whole.Append(i), moved.Append(i);
        a.UploadToken(i, s.kv_len - 1), b.UploadToken(i, t.kv_len - 1);
      }
      if (i >= hot.size() || step % 2 != 0) continue;
      const size_t before = hot[i]->left().size();
      hot[i]->MoveSome(moves);
      device[i]->UploadHostPages();
      for (size_t n = before; n < hot[i]->left().size(); ++n)
        ExpectOk(cuda.Copy(CopyKind::kUpload, b.pool().k(hot[i]->left()[n]), nan.data(), page_bytes));
    }
  }
}

TEST_F(CudaHotRowsTest, StepsHaveTheBitsOfWholeSequences) {
  uint64_t seed = 2100;
  const std::vector<std::pair<int32_t, int32_t>> lengths = {{700, 900}, {256, 400}, {2100, 2230}, {500, 600}};
  RunCase(*cuda_, {SparseShape(2, 4, 128), lengths, 200, 256, 16}, ++seed);
  RunCase(*cuda_, {SparseShape(1, 1, 64), lengths, 128, 128, 16}, ++seed);
  RunCase(*cuda_, {SparseShape(2, 8, 128), lengths, 192, 192, 10}, ++seed);
  RunCase(*cuda_, {SparseShape(3, 5, 64), lengths, 100, 128, 10}, ++seed);
  for (const Keys keys : {Keys::kSinks, Keys::kHeavyTail, Keys::kEqual, Keys::kZero})
    RunCase(*cuda_, {SparseShape(2, 4, 128), lengths, 200, 256, 6, keys}, ++seed);
}

TEST_F(CudaHotRowsTest, PagesOfE4M3) {
  uint64_t seed = 2130;
  const std::vector<std::pair<int32_t, int32_t>> lengths = {{700, 900}, {256, 400}, {2100, 2230}, {500, 600}};
  RunCase(*cuda_, {SparseShape(2, 4, 128, DType::kE4M3), lengths, 200, 256, 16}, ++seed);
  RunCase(*cuda_, {SparseShape(3, 5, 64, DType::kE4M3), lengths, 128, 128, 10}, ++seed);
}

// Buffers and lists of the size that is served, more slots than threads, and clusters of both sizes.
TEST_F(CudaHotRowsTest, LongContexts) {
  uint64_t seed = 2150;
  RunCase(*cuda_, {SparseShape(1, 4, 128), {{16384, 16400}, {9000, 9020}, {8191, 8200}}, 2048, 4096, 8}, ++seed);
  RunCase(*cuda_, {SparseShape(8, 4, 128), {{6000, 6020}, {5000, 5020}, {4500, 4600}}, 1000, 1024, 5}, ++seed);
  RunCase(*cuda_, {SparseShape(1, 4, 128), {{70001, 70020}, {300, 320}}, 3000, 3008, 4, Keys::kHeavyTail}, ++seed);
}

}  // namespace
}  // namespace spl::kernels
