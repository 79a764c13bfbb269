// Rotation and page write on the CUDA backend: in f32 against the reference, and every other type of row, q and page
// bit by bit as what f32 gave, rounded once. Head sizes and counts of heads that fill warps, and ones that do not.
// Skips without a CUDA device.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "kernels/backend/backend.h"
#include "kernels/backend/cuda/cuda_plugin.h"
#include "kernels/common/kv_rows.h"
#include "tests/kernels/support/kernel_test_util.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

constexpr int32_t kMaxPositions = 300;
constexpr std::byte kUntouched{0x11};

// Rows of two sequences at odd positions, turned by other ones where `angles` are set.
struct Problem {
  Problem(Random& random, int32_t qo, int32_t kv, int32_t d, bool with_norm, bool with_angles)
      : qo(qo), kv(kv), d(d), with_norm(with_norm), norms{random.Normals(d), random.Normals(d)} {
    for (const float angle : random.Normals(kMaxPositions * d / 2)) {
      cos.push_back(std::cos(angle));
      sin.push_back(std::sin(angle));
    }
    std::vector<int32_t> pages(num_pages());
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), random.engine());
    for (int32_t i = 0; i < 2 * kv; ++i) tables[i / kv].emplace_back(pages.begin() + i * 5, pages.begin() + i * 5 + 5);
    for (const int32_t position : positions) {
      if (with_angles) angles.push_back((position * 7 + 3) % kMaxPositions);
    }
    for (const float x : random.Normals(static_cast<size_t>(num_rows()) * width()))
      qkv.push_back(ToFloat(ToBf16(std::ldexp(x, random.Int(-3, 3)))));
  }
  int32_t num_pages() const { return 2 * kv * 5; }
  int32_t num_rows() const { return static_cast<int32_t>(positions.size()); }
  int32_t width() const { return (qo + 2 * kv) * d; }
  int32_t sequence(int32_t row) const { return row < kFirst ? 0 : 1; }

  static constexpr int32_t kFirst = 7;  // rows of the first sequence
  std::vector<int32_t> positions{0, 1, 63, 64, 65, 200, 299, 5, 6, 7, 128}, angles;
  int32_t qo, kv, d;
  bool with_norm;
  std::vector<float> norms[2], cos, sin, qkv;
  std::vector<std::vector<int32_t>> tables[2];
};

struct Types {
  DType qkv, q_out, pages;  // q_out kE4M3: none
};
constexpr DType kInPlace = DType::kE4M3;

struct Outcome {
  std::vector<float> q;  // [num_rows, qo * d]
  std::vector<std::byte> pool;
};

std::vector<bf16> Rounded(const std::vector<float>& from) {
  std::vector<bf16> to;
  for (const float x : from) to.push_back(ToBf16(x));
  return to;
}

class CudaRopeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto cuda = MakeCudaBackend();
    if (!cuda.ok()) GTEST_SKIP() << cuda.status();
    cuda_ = *std::move(cuda);
  }

  template <typename T>
  std::unique_ptr<Buffer> Upload(const std::vector<T>& from) const {
    auto buffer = cuda_->Allocate(from.size() * sizeof(T)).value();
    ExpectOk(cuda_->Copy(CopyKind::kUpload, buffer->data(), from.data(), from.size() * sizeof(T)));
    return buffer;
  }
  std::vector<float> Floats(const void* from, DType dtype, size_t num) const {
    std::vector<float> floats(num);
    std::vector<bf16> rounded(num);
    void* const to = dtype == DType::kF32 ? static_cast<void*>(floats.data()) : rounded.data();
    ExpectOk(cuda_->Copy(CopyKind::kDownload, to, from, num * DTypeBytes(dtype)));
    for (size_t i = 0; i < num && dtype != DType::kF32; ++i) floats[i] = ToFloat(rounded[i]);
    return floats;
  }

  RopeWriteKvArgs Args(const Problem& p, const Types& types, std::byte* pool) const {
    RopeWriteKvArgs a;
    a.num_qo_heads = p.qo;
    a.num_kv_heads = p.kv;
    a.head_dim = p.d;
    a.pool = {pool, types.pages, p.d, p.num_pages()};
    return a;
  }

  Outcome Run(const Problem& p, const Types& types) const {
    const auto session = cuda_
                             ->NewSession({.max_rows = p.num_rows(),
                                           .max_sequences = 2,
                                           .num_layers = 1,
                                           .num_kv_heads = p.kv,
                                           .max_pages_per_stream = 5})
                             .value();
    const std::vector<int32_t> tokens(p.positions.size(), 0);
    static uint64_t next_id = 1;
    const std::vector<BatchSequence> batch = {{0, Problem::kFirst, 300, p.tables[0], next_id++},
                                              {Problem::kFirst, p.num_rows(), 129, p.tables[1], next_id++}};
    ExpectOk(session->Stage({.tokens = tokens, .positions = p.positions, .sequences = batch, .angles = p.angles}));
    const auto cos = Upload(p.cos), sin = Upload(p.sin), q_norm = Upload(p.norms[0]), k_norm = Upload(p.norms[1]);
    const auto qkv = types.qkv == DType::kF32 ? Upload(p.qkv) : Upload(Rounded(p.qkv));
    Outcome out;
    out.pool.assign(KvPageBytes(types.pages, p.d) * static_cast<size_t>(p.num_pages()), kUntouched);
    const auto pool = Upload(out.pool);
    const size_t num_q = static_cast<size_t>(p.num_rows() * p.qo * p.d);
    const auto q_out = cuda_->Allocate(num_q * sizeof(float)).value();
    RopeWriteKvArgs a = Args(p, types, static_cast<std::byte*>(pool->data()));
    a.qkv = {qkv->data(), types.qkv};
    a.table = {static_cast<float*>(cos->data()), static_cast<float*>(sin->data()), kMaxPositions};
    if (p.with_norm) a.qk_norm = {static_cast<float*>(q_norm->data()), static_cast<float*>(k_norm->data()), 1e-6f};
    if (types.q_out != kInPlace) a.q_out = {q_out->data(), types.q_out};
    ExpectOk(cuda_->RopeWriteKv(session->context(), a));
    ExpectOk(session->Synchronize());
    ExpectOk(cuda_->Copy(CopyKind::kDownload, out.pool.data(), pool->data(), out.pool.size()));
    const size_t width = static_cast<size_t>(p.width()), of_q = static_cast<size_t>(p.qo * p.d);
    const std::vector<float> rows = Floats(qkv->data(), types.qkv, width * p.positions.size());
    for (size_t row = 0; row < p.positions.size(); ++row) {
      const auto begin = rows.begin() + static_cast<int64_t>(row * width),
                 from = p.qkv.begin() + (begin - rows.begin());
      out.q.insert(out.q.end(), begin, begin + static_cast<int64_t>(of_q));
      const size_t kept = types.q_out == kInPlace ? of_q : 0;
      EXPECT_TRUE(std::equal(begin + static_cast<int64_t>(kept), begin + static_cast<int64_t>(width),
                             from + static_cast<int64_t>(kept)))
          << "row " << row << ": what stays in qkv";
    }
    if (types.q_out != kInPlace) out.q = Floats(q_out->data(), types.q_out, num_q);
    return out;
  }

  Outcome Reference(const Problem& p) const {
    Outcome out{{}, std::vector<std::byte>(KvPageBytes(DType::kF32, p.d) * p.num_pages(), kUntouched)};
    std::vector<float> qkv = p.qkv;
    std::vector<std::span<const int32_t>> views;
    for (const auto& of_sequence : p.tables) views.insert(views.end(), of_sequence.begin(), of_sequence.end());
    std::vector<RopeSequence> sequences;
    for (int32_t s = 0; s < 2; ++s) {
      const int32_t begin = s == 0 ? 0 : Problem::kFirst, end = s == 0 ? Problem::kFirst : p.num_rows();
      const auto part = [&](const std::vector<int32_t>& of_rows) {
        return of_rows.empty() ? std::span<const int32_t>() : std::span(of_rows).subspan(begin, end - begin);
      };
      sequences.push_back({begin, end, part(p.positions), std::span(views).subspan(s * p.kv, p.kv), part(p.angles)});
    }
    RopeWriteKvArgs a = Args(p, {DType::kF32, kInPlace, DType::kF32}, out.pool.data());
    a.qkv = qkv.data();
    a.table = {p.cos.data(), p.sin.data(), kMaxPositions};
    a.sequences = sequences;
    if (p.with_norm) a.qk_norm = {p.norms[0].data(), p.norms[1].data(), 1e-6f};
    ExpectOk(ref::RopeWriteKv({}, a));
    for (int32_t row = 0; row < p.num_rows(); ++row)
      out.q.insert(out.q.end(), qkv.begin() + row * p.width(), qkv.begin() + row * p.width() + p.qo * p.d);
    return out;
  }

  // The pool of f32 with every row that was written rounded to `dtype`.
  static std::vector<std::byte> RoundedPool(const Problem& p, std::vector<std::byte>& floats, DType dtype) {
    std::vector<std::byte> to(KvPageBytes(dtype, p.d) * static_cast<size_t>(p.num_pages()), kUntouched);
    const KvPoolView from_pool{floats.data(), DType::kF32, p.d, p.num_pages()};
    const KvPoolView to_pool{to.data(), dtype, p.d, p.num_pages()};
    for (int32_t row = 0; row < p.num_rows(); ++row) {
      for (int32_t head = 0; head < p.kv; ++head) {
        const int32_t position = p.positions[row], slot = position % kPageTokens;
        const int32_t page = p.tables[p.sequence(row)][head][position / kPageTokens];
        if (page == kNoPage) continue;
        for (const bool is_v : {false, true}) {
          const std::byte* const from = is_v ? from_pool.v(page) : from_pool.k(page);
          StoreKvRow(dtype, p.d, is_v ? to_pool.v(page) : to_pool.k(page), slot,
                     reinterpret_cast<const float*>(from) + slot * p.d);
        }
      }
    }
    return to;
  }

  std::unique_ptr<Backend> cuda_;
};

std::vector<float> PoolFloats(const std::vector<std::byte>& pool) {
  std::vector<float> floats(pool.size() / sizeof(float));
  std::memcpy(floats.data(), pool.data(), pool.size());
  return floats;
}

constexpr std::pair<int32_t, int32_t> kHeadCounts[] = {{1, 1}, {5, 5}, {4, 2}, {28, 4}, {32, 8}, {40, 8}};

TEST_F(CudaRopeTest, EveryHeadSizeIsTheReference) {
  Random random(91);
  for (const int32_t d : {8, 16, 40, 64, 80, 96, 128, 160, 248, 256}) {
    for (const auto& [qo, kv] : kHeadCounts) {
      for (const bool with_norm : {false, true}) {
        SCOPED_TRACE(::testing::Message() << "head_dim " << d << ", heads " << qo << " and " << kv << with_norm);
        const Problem p(random, qo, kv, d, with_norm, (d + qo) % 3 == 0);
        const Outcome want = Reference(p), got = Run(p, {DType::kF32, kInPlace, DType::kF32});
        ExpectClose(got.q, want.q, DType::kF32, "q");
        ExpectClose(PoolFloats(got.pool), PoolFloats(want.pool), DType::kF32, "pages");
        if (HasFailure()) return;
      }
    }
  }
}

TEST_F(CudaRopeTest, OtherTypesAreRoundedOnce) {
  Random random(92);
  for (const int32_t d : {8, 64, 80, 128, 256}) {
    for (const auto& [qo, kv] : kHeadCounts) {
      const Problem p(random, qo, kv, d, (d + qo) % 2 == 0, false);
      Outcome floats = Run(p, {DType::kF32, kInPlace, DType::kF32});
      std::vector<float> q_rounded;
      for (const float x : floats.q) q_rounded.push_back(ToFloat(ToBf16(x)));
      for (const DType pages : {DType::kF32, DType::kBF16, DType::kE4M3}) {
        const std::vector<std::byte> pool = RoundedPool(p, floats.pool, pages);
        for (const Types& types : {Types{DType::kF32, kInPlace, pages}, Types{DType::kF32, DType::kF32, pages},
                                   Types{DType::kF32, DType::kBF16, pages}, Types{DType::kBF16, kInPlace, pages},
                                   Types{DType::kBF16, DType::kBF16, pages}}) {
          SCOPED_TRACE(::testing::Message()
                       << "head_dim " << d << ", heads " << qo << " and " << kv << ", types " << DTypeName(types.qkv)
                       << " " << DTypeName(types.q_out) << " " << DTypeName(pages));
          const Outcome got = Run(p, types);
          const DType q = types.q_out == kInPlace ? types.qkv : types.q_out;
          EXPECT_TRUE(BitwiseEqual(got.q, q == DType::kF32 ? floats.q : q_rounded));
          EXPECT_EQ(got.pool, pool);
          if (HasFailure()) return;
        }
      }
    }
  }
}

// A row on a page that is not there writes nothing, and neither the heads beside it nor its q notice.
TEST_F(CudaRopeTest, MissingPagesAreLeftOut) {
  Random random(93);
  for (const int32_t d : {40, 64, 128}) {
    Problem p(random, 8, 4, d, false, false);
    Outcome all = Run(p, {DType::kF32, kInPlace, DType::kF32});
    p.tables[0][1][1] = p.tables[0][2][0] = p.tables[1][3][2] = kNoPage;
    for (const DType pages : {DType::kF32, DType::kBF16, DType::kE4M3}) {
      const Outcome got = Run(p, {DType::kF32, kInPlace, pages});
      EXPECT_TRUE(BitwiseEqual(got.q, all.q));
      EXPECT_EQ(got.pool, RoundedPool(p, all.pool, pages)) << "head_dim " << d << ", pages " << DTypeName(pages);
    }
  }
}

}  // namespace
}  // namespace spl::kernels
