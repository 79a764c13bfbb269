// Attention over lists of positions on a GPU, through the interface that the engine uses, against the reference
// backend. Skipped where there is no GPU. Keys and values that no list names are NaN, and so are their pages' other
// slots.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "kernels/backend/backend.h"
#include "kernels/backend/cuda/cuda_plugin.h"
#include "tests/kernels/cuda/floats.h"
#include "tests/kernels/support/kernel_test_util.h"
#include "tests/kernels/support/paged_kv.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr int32_t kLayers = 2, kLayer = 1;

// What one KV head sees.
struct Sees {
  VisibilityRule rule = VisibilityRule::kFull;
  std::vector<int32_t> list;
};

struct Case {
  int32_t q_heads = 8, kv_heads = 2, dim = 64;
  int32_t length = 700;
  std::vector<int32_t> positions;
  std::vector<Sees> heads;  // [kv_heads]
  int32_t last_rows = 0;
};

struct Result {
  std::vector<float> out, lse;
};

class CudaListedTest : public ::testing::TestWithParam<DType> {
 protected:
  void SetUp() override {
    auto cuda = MakeCudaBackend();
    if (!cuda.ok()) GTEST_SKIP() << cuda.status();
    cuda_ = *std::move(cuda);
  }

  std::unique_ptr<Buffer> Upload(std::span<const std::byte> bytes) {
    auto buffer = cuda_->Allocate(bytes.size()).value();
    ExpectOk(cuda_->Copy(CopyKind::kUpload, buffer->data(), bytes.data(), bytes.size()));
    return buffer;
  }
  std::vector<float> Download(const Buffer& buffer, DType dtype) {
    std::vector<std::byte> bytes(buffer.size());
    ExpectOk(cuda_->Copy(CopyKind::kDownload, bytes.data(), buffer.data(), bytes.size()));
    return ToFloats(bytes, dtype);
  }

  // A case on the device and, unless null, by the reference. Rows' queries depend on their positions alone.
  Result Run(const Case& c, uint64_t seed, Result* want) {
    const DType dtype = GetParam();
    Random random(seed);
    const int32_t num_streams = kLayers * c.kv_heads;
    TestPool host(dtype, c.dim, num_streams * ((c.length + 63) / 64) + 5);
    host.Shuffle(random);
    std::vector<TestStream> streams;
    for (int32_t i = 0; i < num_streams; ++i) {
      TestStream& s = streams.emplace_back(MakeStream(random, c.length, c.dim));
      const Sees& sees = c.heads[static_cast<size_t>(i % c.kv_heads)];
      s.visibility.rule = sees.rule;
      if (sees.rule == VisibilityRule::kBand) s.visibility.num_sinks = 5, s.visibility.window = 70;
      if (sees.rule == VisibilityRule::kList) {
        s.indices = sees.list;
        std::vector<bool> pages(static_cast<size_t>((c.length + 63) / 64)), listed(static_cast<size_t>(c.length));
        for (const int32_t j : sees.list) {
          if (j < c.length) pages[static_cast<size_t>(j / 64)] = listed[static_cast<size_t>(j)] = true;
        }
        for (int32_t j = 0; j < c.length; ++j) {
          if (listed[static_cast<size_t>(j)]) continue;
          std::fill_n(s.k.begin() + int64_t{j} * c.dim, c.dim, kNaN);
          std::fill_n(s.v.begin() + int64_t{j} * c.dim, c.dim, kNaN);
        }
        host.Place(s, [&](int32_t page) { return !pages[static_cast<size_t>(page)]; });
      } else {
        host.Place(s);
      }
    }
    std::vector<std::vector<int32_t>> tables;
    for (const TestStream& s : streams) tables.push_back(s.page_table);
    const auto memory = Upload(host.bytes());
    KvPoolView pool = host.view();
    pool.base = static_cast<std::byte*>(memory->data());

    const auto rows = static_cast<int32_t>(c.positions.size());
    const std::vector<float> all_q = random.Normals(static_cast<size_t>(c.length) * c.q_heads * c.dim);
    std::vector<float> q;
    for (const int32_t p : c.positions) {
      const auto from = all_q.begin() + int64_t{p} * c.q_heads * c.dim;
      q.insert(q.end(), from, from + int64_t{c.q_heads} * c.dim);
    }
    const std::vector<std::byte> q_bytes = Encode(q, dtype);
    const auto device_q = Upload(q_bytes);
    const std::vector<float> nan_out(q.size(), kNaN), nan_lse(static_cast<size_t>(rows * c.q_heads), kNaN);
    const auto out = Upload(Encode(nan_out, dtype)), lse = Upload(Encode(nan_lse, DType::kF32));
    std::vector<float> rounded_q = Download(*device_q, dtype);

    auto session = cuda_->NewSession({.max_rows = std::max(rows, 512),
                                      .max_sequences = 4,
                                      .num_layers = kLayers,
                                      .num_kv_heads = c.kv_heads,
                                      .max_pages_per_stream = 128});
    EXPECT_TRUE(session.ok()) << session.status();
    const std::vector<int32_t> tokens(static_cast<size_t>(rows));
    static uint64_t next_id = 1;
    const BatchSequence batch{0, rows, c.length, tables, next_id++};
    ExpectOk((*session)->Stage({tokens, c.positions, {&batch, 1}}));
    std::vector<HeadStreamView> views;
    for (int32_t h = 0; h < c.kv_heads; ++h)
      views.push_back(streams[static_cast<size_t>(kLayer * c.kv_heads + h)].view());
    const PrefillSequence sequence{0, rows, c.positions, views};
    PrefillAttentionArgs args{.shape = {c.q_heads, c.kv_heads, c.dim, 1.0f / std::sqrt(static_cast<float>(c.dim))},
                              .pool = pool,
                              .q = Activations(device_q->data(), dtype),
                              .q_row_stride = int64_t{c.q_heads} * c.dim,
                              .out = {out->data(), dtype},
                              .lse = static_cast<float*>(lse->data()),
                              .sequences = {&sequence, 1},
                              .layer = kLayer,
                              .last_rows = c.last_rows};
    for (int i = 0; i < 2; ++i)  // again, over what the first left behind
      ExpectOk(cuda_->PrefillAttention((*session)->context(), args));
    ExpectOk((*session)->Synchronize());
    Result got{Download(*out, dtype), Download(*lse, DType::kF32)};
    if (want != nullptr) {
      want->out = nan_out;
      want->lse = nan_lse;
      args.pool = host.view();
      args.q = rounded_q.data();
      args.out = want->out.data();
      args.lse = want->lse.data();
      ExpectOk(ref_->PrefillAttention({}, args));
    }
    return got;
  }

  // Rows that a call leaves alone are NaN on both sides.
  static void Compare(const Case& c, const Result& got, const Result& want, const std::string& what) {
    const auto rows = static_cast<int32_t>(c.positions.size());
    const int32_t first = c.last_rows > 0 ? std::max(rows - c.last_rows, 0) : 0;
    const auto row_out = static_cast<size_t>(c.q_heads * c.dim), row_lse = static_cast<size_t>(c.q_heads);
    for (size_t i = 0; i < static_cast<size_t>(first) * row_out; ++i) ASSERT_TRUE(std::isnan(got.out[i])) << what;
    for (size_t i = 0; i < static_cast<size_t>(first) * row_lse; ++i) ASSERT_TRUE(std::isnan(got.lse[i])) << what;
    const auto tail = [&](const std::vector<float>& all, size_t width) {
      return std::span(all).subspan(static_cast<size_t>(first) * width);
    };
    ExpectClose(tail(got.out, row_out), tail(want.out, row_out), GetParam(), what);
    ExpectClose(tail(got.lse, row_lse), tail(want.lse, row_lse), DType::kBF16, what + ", lse");
  }

  static std::vector<int32_t> Range(int32_t begin, int32_t end, int32_t step = 1) {
    std::vector<int32_t> v;
    for (int32_t p = begin; p < end; p += step) v.push_back(p);
    return v;
  }
  static std::vector<int32_t> RandomList(Random& random, int32_t begin, int32_t end, int32_t one_of) {
    std::vector<int32_t> list;
    for (int32_t p = begin; p < end; ++p) {
      if (random.Int(1, one_of) == 1) list.push_back(p);
    }
    return list;
  }
  static Sees List(std::vector<int32_t> list) { return {VisibilityRule::kList, std::move(list)}; }

  std::unique_ptr<Backend> cuda_;
  const std::unique_ptr<Backend> ref_ = MakeReferenceBackend();
};

// Dense, thin and short lists; rows in the list and others; all rows, some, and the last ones; groups of query heads.
TEST_P(CudaListedTest, AgreesWithTheDefinition) {
  Random random(2);
  for (const auto& [q_heads, kv_heads, dim] :
       std::vector<std::array<int32_t, 3>>{{8, 2, 64}, {8, 2, 128}, {4, 4, 64}, {12, 2, 128}, {4, 2, 40}}) {
    for (const int32_t one_of : {1, 3, 50}) {
      for (const int32_t last_rows : {0, 90}) {
        Case c{.q_heads = q_heads, .kv_heads = kv_heads, .dim = dim, .length = 500 + random.Int(0, 300)};
        c.positions = random.Int(0, 1) == 0 ? Range(0, std::min(c.length, 400)) : RandomList(random, 0, c.length, 3);
        c.heads.assign(static_cast<size_t>(kv_heads), List(RandomList(random, 0, c.length, one_of)));
        c.last_rows = last_rows;
        Result want;
        const Result got = Run(c, 100, &want);
        Compare(c, got, want,
                "heads " + std::to_string(q_heads) + "/" + std::to_string(kv_heads) + " of " + std::to_string(dim) +
                    ", one of " + std::to_string(one_of) + ", last " + std::to_string(last_rows));
      }
    }
  }
}

// Whole tiles of rows in front of the list, a single row that sees, and none.
TEST_P(CudaListedTest, RowsThatSeeNothingGetZeros) {
  for (const int32_t dim : {64, 128}) {
    for (const int32_t first : {1, 127, 128, 300, 399, 400}) {
      for (const int32_t last_rows : {0, 200}) {
        Case c{.dim = dim, .length = 700, .positions = Range(0, 400)};
        c.heads.assign(2, List(Range(first, 650, 2)));
        c.last_rows = last_rows;
        Result want;
        const Result got = Run(c, 7, &want);
        Compare(c, got, want, "list from " + std::to_string(first) + ", last " + std::to_string(last_rows));
      }
    }
    Case c{.dim = dim, .length = 300, .positions = Range(0, 300)};
    c.heads.assign(2, List({}));
    Result want;
    const Result got = Run(c, 8, &want);
    Compare(c, got, want, "an empty list");
  }
}

// Heads with lists of their own beside heads with equal ones, with a window, and with everything.
TEST_P(CudaListedTest, HeadsMayDiffer) {
  Random random(3);
  for (const int32_t dim : {64, 128}) {
    Case c{.q_heads = 16, .kv_heads = 8, .dim = dim, .length = 900, .positions = RandomList(random, 100, 900, 2)};
    const Sees shared = List(RandomList(random, 0, 900, 4)), own = List(RandomList(random, 400, 900, 2));
    c.heads = {{}, shared, own, {VisibilityRule::kBand, {}}, shared, List(Range(0, 900)), {}, List({})};
    for (const int32_t last_rows : {0, 50}) {
      c.last_rows = last_rows;
      Result want;
      const Result got = Run(c, 9, &want);
      Compare(c, got, want, "different heads");
    }
  }
}

// A list of everything is no list, bit by bit; and a row is the same in any slice of the rows.
TEST_P(CudaListedTest, BitsDoNotDependOnTheSlice) {
  Random random(4);
  for (const int32_t dim : {64, 128}) {
    Case c{.dim = dim, .length = 800, .positions = Range(0, 800)};
    const Result plain = [&] {
      Case full = c;
      full.heads.assign(2, {});
      return Run(full, 11, nullptr);
    }();
    c.heads.assign(2, List(Range(0, 800)));
    const Result everything = Run(c, 11, nullptr);
    EXPECT_TRUE(BitwiseEqual(everything.out, plain.out)) << dim;
    EXPECT_TRUE(BitwiseEqual(everything.lse, plain.lse)) << dim;

    c.heads.assign(2, List(RandomList(random, 150, 800, 3)));
    const Result whole = Run(c, 12, nullptr);
    const auto width = static_cast<size_t>(c.q_heads * dim);
    for (const auto& [begin, end] : std::vector<std::pair<int32_t, int32_t>>{{0, 100}, {100, 101}, {131, 640}}) {
      Case slice = c;
      slice.positions = Range(begin, end);
      const Result got = Run(slice, 12, nullptr);
      EXPECT_TRUE(BitwiseEqual(got.out, std::span(whole.out).subspan(static_cast<size_t>(begin) * width,
                                                                     static_cast<size_t>(end - begin) * width)))
          << dim << ", rows " << begin << " to " << end;
    }
  }
}

TEST_P(CudaListedTest, SaysWhatItDoesNotServe) {
  constexpr int32_t kDim = 64;
  Random random(5);
  TestPool host(GetParam(), kDim, 40);
  std::vector<TestStream> streams;
  std::vector<std::vector<int32_t>> tables;
  for (int32_t i = 0; i < kLayers; ++i) {
    streams.push_back(MakeStream(random, 300, kDim));
    streams.back().visibility.rule = VisibilityRule::kList;
    streams.back().indices = {1, 200};
    host.Place(streams.back(), [](int32_t page) { return page == 3; });
    tables.push_back(streams.back().page_table);
  }
  const auto memory = Upload(host.bytes());
  KvPoolView pool = host.view();
  pool.base = static_cast<std::byte*>(memory->data());
  const auto room = cuda_->Allocate(4 * 4 * kDim * sizeof(float)).value();
  auto session = cuda_->NewSession(
      {.max_rows = 16, .max_sequences = 4, .num_layers = kLayers, .num_kv_heads = 1, .max_pages_per_stream = 16});
  ASSERT_TRUE(session.ok());
  const std::vector<int32_t> tokens(2), positions = {100, 299};
  const BatchSequence batch{0, 2, 300, tables, 1};
  ExpectOk((*session)->Stage({tokens, positions, {&batch, 1}}));
  const HeadStreamView view = streams[0].view();
  const PrefillSequence one{0, 2, positions, {&view, 1}};
  PrefillAttentionArgs args{.shape = {4, 1, kDim, 0.125f},
                            .pool = pool,
                            .q = Activations(room->data(), GetParam()),
                            .q_row_stride = 4 * kDim,
                            .out = {room->data(), GetParam()},
                            .sequences = {&one, 1}};
  const absl::Status absent = cuda_->PrefillAttention((*session)->context(), args);
  EXPECT_EQ(absent.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(absent.message()), ::testing::HasSubstr("page 3"));
  const std::vector<PrefillSequence> two = {{0, 1, std::span(positions).first(1), {&view, 1}},
                                            {1, 2, std::span(positions).last(1), {&view, 1}}};
  args.sequences = two;
  EXPECT_EQ(cuda_->PrefillAttention((*session)->context(), args).code(), absl::StatusCode::kUnimplemented);
}

INSTANTIATE_TEST_SUITE_P(DTypes, CudaListedTest, ::testing::Values(DType::kBF16, DType::kF32),
                         [](const auto& param) { return param.param == DType::kF32 ? "f32" : "bf16"; });

}  // namespace
}  // namespace spl::kernels
