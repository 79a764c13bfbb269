// Every operation of the CUDA backend against the reference backend, through the interface that the engine uses: staged
// batches, page tables on the device, recorded steps. Skipped where there is no GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <random>

#include "kernels/backend/backend.h"
#include "kernels/backend/cuda/cuda_plugin.h"
#include "kernels/common/kv_rows.h"
#include "kernels/kv_copy/crc32c.h"
#include "tests/kernels/cuda/floats.h"
#include "tests/kernels/support/kernel_test_util.h"
#include "tests/kernels/support/paged_kv.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using ::testing::ElementsAreArray;

// One tensor on both sides. Values are rounded to `dtype` first, so that both see the same.
struct Tensor {
  std::vector<float> host;
  std::unique_ptr<Buffer> device;
  DType dtype = DType::kF32;

  Activations act() const { return {device->data(), dtype}; }
  const float* f32() const { return static_cast<const float*>(device->data()); }
};

// Types of activations and of pages.
struct Types {
  DType activations, pages;
  Types(DType both) : activations(both), pages(both) {}  // NOLINT(google-explicit-constructor)
  Types(DType a, DType p) : activations(a), pages(p) {}
  operator DType() const { return activations; }  // NOLINT(google-explicit-constructor)
};
std::string NameOf(const ::testing::TestParamInfo<Types>& info) { return std::string(DTypeName(info.param.pages)); }

class CudaBackendTest : public ::testing::TestWithParam<Types> {
 protected:
  void SetUp() override {
    auto cuda = MakeCudaBackend();
    if (!cuda.ok()) GTEST_SKIP() << cuda.status();
    cuda_ = *std::move(cuda);
    ASSERT_EQ(cuda_->activation_dtype(GetParam()), GetParam().activations);
    auto session = cuda_->NewSession(
        {.max_rows = 512, .max_sequences = 8, .num_layers = 2, .num_kv_heads = 2, .max_pages_per_stream = 16});
    ASSERT_TRUE(session.ok()) << session.status();
    session_ = *std::move(session);
  }

  Tensor Upload(std::vector<float> values, DType dtype) {
    Tensor t{.dtype = dtype};
    const std::vector<std::byte> bytes = Encode(values, dtype);
    t.host = ToFloats(bytes, dtype);
    t.device = cuda_->Allocate(bytes.size()).value();
    EXPECT_TRUE(cuda_->Copy(CopyKind::kUpload, t.device->data(), bytes.data(), bytes.size()).ok());
    return t;
  }
  Tensor Upload(std::vector<float> values) { return Upload(std::move(values), GetParam()); }
  // Poisoned, so that what an operation leaves out is seen.
  Tensor Empty(size_t count, DType dtype) {
    return Upload(std::vector<float>(count, std::numeric_limits<float>::quiet_NaN()), dtype);
  }
  Tensor Empty(size_t count) { return Empty(count, GetParam()); }
  std::unique_ptr<Buffer> Ints(const std::vector<int32_t>& values) {
    auto buffer = cuda_->Allocate(values.size() * 4).value();
    EXPECT_TRUE(cuda_->Copy(CopyKind::kUpload, buffer->data(), values.data(), values.size() * 4).ok());
    return buffer;
  }
  std::vector<float> Download(const Tensor& t) {
    std::vector<std::byte> bytes(t.device->size());
    EXPECT_TRUE(session_->Synchronize().ok());
    EXPECT_TRUE(cuda_->Copy(CopyKind::kDownload, bytes.data(), t.device->data(), bytes.size()).ok());
    return ToFloats(bytes, t.dtype);
  }
  std::vector<int32_t> Download(const Buffer& buffer) {
    std::vector<int32_t> values(buffer.size() / 4);
    EXPECT_TRUE(session_->Synchronize().ok());
    EXPECT_TRUE(cuda_->Copy(CopyKind::kDownload, values.data(), buffer.data(), buffer.size()).ok());
    return values;
  }
  const KernelContext& ctx() const { return session_->context(); }

  std::unique_ptr<Backend> cuda_;
  const std::unique_ptr<Backend> ref_ = MakeReferenceBackend();
  std::unique_ptr<Session> session_;
};

// Kernels that read or write pages; with pages of kE4M3, too.
class CudaPagesTest : public CudaBackendTest {
 protected:
  DType pages() const { return GetParam().pages; }
  // A head_dim that the tensor cores do not serve.
  int32_t OddDim() const { return pages() == DType::kE4M3 ? 48 : 40; }
  static const std::byte* HalfOf(const KvPoolView& pool, const std::byte* base, int64_t page, int half) {
    return base + static_cast<size_t>(page) * pool.page_bytes() + static_cast<size_t>(half) * pool.half_bytes();
  }
  static std::vector<float> RowOf(const KvPoolView& pool, const std::byte* base, int64_t page, int half, int32_t slot) {
    std::vector<float> row(static_cast<size_t>(pool.head_dim));
    LoadKvRow(pool.dtype, pool.head_dim, HalfOf(pool, base, page, half), slot, row.data());
    return row;
  }
};

TEST_P(CudaBackendTest, Linear) {
  Random random(1);
  for (const auto& [rows, in, out] : std::vector<std::array<int64_t, 3>>{{1, 64, 96}, {17, 128, 40}, {300, 256, 512}}) {
    const Tensor x = Upload(random.Normals(rows * in)), w = Upload(random.Normals(out * in));
    const Tensor bias = Upload(random.Normals(out), DType::kF32);
    Tensor y = Empty(rows * out);
    const std::vector<std::byte> bytes = Encode(w.host, GetParam());
    const auto packed = cuda_->PackLinear({bytes.data(), GetParam(), out, in}).value();
    ExpectOk(cuda_->Linear(ctx(), {x.act(), packed.get(), bias.f32(), y.act(), rows}));
    std::vector<float> want(rows * out);
    const auto ref_packed = ref_->PackLinear({w.host.data(), DType::kF32, out, in}).value();
    ExpectOk(ref_->Linear({}, {x.host.data(), ref_packed.get(), bias.host.data(), want.data(), rows}));
    ExpectClose(Download(y), want, GetParam(), "Linear");
  }
}

TEST_P(CudaBackendTest, DeterministicLinearDoesNotDependOnTheOtherRows) {
  auto deterministic = MakeCudaBackend({.deterministic = true}).value();
  auto session =
      deterministic->NewSession({.max_rows = 512, .max_sequences = 1, .num_layers = 1, .num_kv_heads = 1}).value();
  Random random(6);
  const int64_t rows = 500, in = 1024, out = 384;
  const Tensor x = Upload(random.Normals(rows * in));
  const std::vector<std::byte> w = Encode(random.Normals(out * in), GetParam());
  const auto packed = deterministic->PackLinear({w.data(), GetParam(), out, in}).value();
  const auto multiply = [&](int64_t count) {
    Tensor y = Empty(rows * out);
    ExpectOk(deterministic->Linear(session->context(), {x.act(), packed.get(), nullptr, y.act(), count}));
    ExpectOk(session->Synchronize());
    std::vector<float> values = Download(y);
    values.resize(static_cast<size_t>(count * out));
    return values;
  };
  const std::vector<float> all = multiply(rows);
  for (const int64_t count : {1, 2, 7, 64, 65, 300})
    EXPECT_TRUE(BitwiseEqual(multiply(count), std::span(all).first(static_cast<size_t>(count * out)))) << count;
}

// With few rows too, although engines then take Linear.
TEST_P(CudaBackendTest, LinearAdd) {
  auto deterministic = MakeCudaBackend({.deterministic = true}).value();
  Random random(8);
  const int64_t in = 768, out = 640, max_rows = 700;
  const Tensor x = Upload(random.Normals(max_rows * in));
  std::vector<float> values = random.Normals(out * in);
  for (float& v : values) v /= 16;
  const Tensor w = Upload(values);
  const std::vector<std::byte> bytes = Encode(w.host, GetParam());
  const WeightView view{bytes.data(), GetParam(), out, in};
  const auto packed = cuda_->PackLinear(view).value();
  const auto ref_packed = ref_->PackLinear({w.host.data(), DType::kF32, out, in}).value();
  for (const int64_t rows : {1, 33, 64, 100, 256, 520, 700}) {
    const std::vector<float> before = random.Normals((rows + 1) * out);
    const Tensor y = Upload(before, DType::kF32);
    std::vector<float> product(rows * out), want = before;
    ExpectOk(ref_->LinearAdd({}, {x.host.data(), ref_packed.get(), want.data(), product.data(), rows}));
    Tensor scratch = Empty(rows * out, DType::kF32);
    ExpectOk(cuda_->LinearAdd(ctx(), {x.act(), packed.get(), y.act(), scratch.act(), rows}));
    const std::vector<float> got = Download(y);
    ExpectClose(std::span(got).first(rows * out), std::span(want).first(rows * out), GetParam(),
                "LinearAdd of " + std::to_string(rows));
    EXPECT_TRUE(BitwiseEqual(std::span(got).subspan(rows * out), std::span(before).subspan(rows * out))) << rows;
    EXPECT_EQ(packed->PrefersAdd(rows), GetParam() == DType::kBF16 && rows > 32) << rows;
  }
  EXPECT_FALSE(deterministic->PackLinear(view).value()->PrefersAdd(1 << 20));
  const DType other = GetParam() == DType::kF32 ? DType::kBF16 : DType::kF32;
  Tensor y = Empty(out, DType::kF32), scratch = Empty(out, DType::kF32);
  EXPECT_EQ(cuda_->LinearAdd(ctx(), {{x.device->data(), other}, packed.get(), y.act(), scratch.act(), 1}).code(),
            absl::StatusCode::kUnimplemented);
}

// Shapes and rows for which products of bf16 have a kernel of their own on Hopper.
TEST_P(CudaBackendTest, ProductsOfSomeTensOfRows) {
  Random random(9);
  const int64_t in = 2048, max_rows = 100;
  const Tensor x = Upload(random.Normals(max_rows * in));
  for (const int64_t out : {3072, 4352}) {
    std::vector<float> values = random.Normals(out * in);
    for (float& v : values) v /= 32;
    const Tensor w = Upload(values), bias = Upload(random.Normals(out), DType::kF32);
    const std::vector<std::byte> bytes = Encode(w.host, GetParam());
    const auto packed = cuda_->PackLinear({bytes.data(), GetParam(), out, in}).value();
    const auto ref_packed = ref_->PackLinear({w.host.data(), DType::kF32, out, in}).value();
    for (const int64_t rows : {33, 100}) {
      std::vector<float> want(rows * out);
      ExpectOk(ref_->Linear({}, {x.host.data(), ref_packed.get(), bias.host.data(), want.data(), rows}));
      Tensor y = Empty(rows * out, DType::kF32), scratch = Empty(rows * out, DType::kF32);
      ExpectOk(cuda_->Linear(ctx(), {x.act(), packed.get(), bias.f32(), y.act(), rows}));
      ExpectClose(Download(y), want, GetParam(), "Linear of " + std::to_string(rows));
      for (int64_t i = 0; i < rows * out; ++i) want[i] += want[i] - bias.host[i % out];
      ExpectOk(cuda_->LinearAdd(ctx(), {x.act(), packed.get(), y.act(), scratch.act(), rows}));
      ExpectClose(Download(y), want, GetParam(), "LinearAdd of " + std::to_string(rows));
    }
  }
}

// For few rows a product and an activation, for many one kernel.
TEST_P(CudaBackendTest, LinearSiluMul) {
  auto deterministic = MakeCudaBackend({.deterministic = true}).value();
  auto session =
      deterministic->NewSession({.max_rows = 512, .max_sequences = 1, .num_layers = 1, .num_kv_heads = 1}).value();
  Random random(7);
  const int64_t in = 512, width = 384, max_rows = 300;
  const Tensor x = Upload(random.Normals(max_rows * in));
  std::vector<float> values = random.Normals(2 * width * in);
  for (float& v : values) v /= 16;
  const Tensor w = Upload(values);
  const std::vector<std::byte> bytes = Encode(w.host, GetParam());
  const WeightView view{bytes.data(), GetParam(), 2 * width, in};
  const auto packed = cuda_->PackLinear(view).value(), same = deterministic->PackLinear(view).value();
  const auto ref_packed = ref_->PackLinear({w.host.data(), DType::kF32, 2 * width, in}).value();
  Tensor gate_up = Empty(max_rows * 2 * width, DType::kF32);
  std::vector<float> first_row;
  for (const int64_t rows : {1, 40, 64, 300}) {
    std::vector<float> scratch(rows * 2 * width), want(rows * width);
    ExpectOk(ref_->LinearSiluMul({}, {x.host.data(), ref_packed.get(), scratch.data(), want.data(), rows}));
    Tensor out = Empty(rows * width), again = Empty(rows * width);
    ExpectOk(cuda_->LinearSiluMul(ctx(), {x.act(), packed.get(), gate_up.act(), out.act(), rows}));
    ExpectClose(Download(out), want, GetParam(), "LinearSiluMul of " + std::to_string(rows));
    ExpectOk(deterministic->LinearSiluMul(session->context(), {x.act(), same.get(), gate_up.act(), again.act(), rows}));
    ExpectOk(session->Synchronize());
    std::vector<float> got = Download(again);
    ExpectClose(got, want, GetParam(), "deterministic LinearSiluMul of " + std::to_string(rows));
    got.resize(static_cast<size_t>(width));
    if (first_row.empty()) first_row = got;
    EXPECT_TRUE(BitwiseEqual(got, first_row)) << rows;
  }
}

TEST_P(CudaBackendTest, RmsNormAndSiluMul) {
  Random random(2);
  for (const int64_t width : {64, 384, 4096, 8192, 20480}) {
    const int64_t rows = 5;
    Tensor residual = Upload(random.Normals(rows * width), DType::kF32);
    const Tensor delta = Upload(random.Normals(rows * width)), weight = Upload(random.Normals(width), DType::kF32);
    Tensor out = Empty(rows * width), plain = Empty(rows * width);
    std::vector<float> want_residual = residual.host, want(rows * width), want_plain(rows * width);
    ExpectOk(cuda_->RmsNorm(
        ctx(), {static_cast<float*>(residual.device->data()), {}, weight.f32(), plain.act(), rows, width, 1e-5f}));
    ExpectOk(ref_->RmsNorm({}, {want_residual.data(), {}, weight.host.data(), want_plain.data(), rows, width, 1e-5f}));
    ExpectOk(cuda_->RmsNorm(ctx(), {static_cast<float*>(residual.device->data()), delta.act(), weight.f32(), out.act(),
                                    rows, width, 1e-5f}));
    ExpectOk(ref_->RmsNorm(
        {}, {want_residual.data(), delta.host.data(), weight.host.data(), want.data(), rows, width, 1e-5f}));
    ExpectClose(Download(plain), want_plain, GetParam(), "RmsNorm");
    ExpectClose(Download(out), want, GetParam(), "RmsNorm with delta");
    ExpectClose(Download(residual), want_residual, DType::kF32, "residual");

    const Tensor gate_up = Upload(random.Normals(rows * 2 * width));
    Tensor activated = Empty(rows * width);
    std::vector<float> want_activated(rows * width);
    ExpectOk(cuda_->SiluMul(ctx(), {gate_up.act(), activated.act(), rows, width}));
    ExpectOk(ref_->SiluMul({}, {gate_up.host.data(), want_activated.data(), rows, width}));
    ExpectClose(Download(activated), want_activated, GetParam(), "SiluMul");
  }
}

TEST_P(CudaBackendTest, GatherRowsAndArgmax) {
  Random random(3);
  const Tensor table = Upload(random.Normals(100 * 64));
  const std::vector<int32_t> ids = {99, 0, 5, 5, 42};
  Tensor out = Empty(ids.size() * 64, DType::kF32);
  ExpectOk(cuda_->GatherRows(ctx(), {table.device->data(), GetParam(), 100, 64, ids, out.act()}));
  const std::vector<float> got = Download(out);
  for (size_t i = 0; i < ids.size(); ++i) {
    for (int c = 0; c < 64; ++c) ASSERT_EQ(got[i * 64 + c], table.host[ids[i] * 64 + c]);
  }
  const std::vector<int32_t> bad = {100};
  EXPECT_EQ(cuda_->GatherRows(ctx(), {table.device->data(), GetParam(), 100, 64, bad, out.act()}).code(),
            absl::StatusCode::kInvalidArgument);

  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  const Tensor logits = Upload({1, 3, 3, /**/ nan, -5, nan, /**/ nan, nan, nan, /**/ -inf, -inf, nan}, DType::kF32);
  auto best = Ints({-1, -1, -1, -1});
  ExpectOk(cuda_->Argmax(
      ctx(), {.logits = logits.f32(), .out = static_cast<int32_t*>(best->data()), .num_rows = 4, .width = 3}));
  EXPECT_THAT(Download(*best), ElementsAreArray({1, 1, 0, 0}));
  std::vector<float> wide = random.Normals(3 * 128256);
  for (int i = 0; i < 3; ++i) wide[i * 128256 + 50000 * i + 7] = wide[i * 128256 + 50000 * i + 20007] = 50;
  const Tensor wide_logits = Upload(wide, DType::kF32);
  ExpectOk(cuda_->Argmax(
      ctx(),
      {.logits = wide_logits.f32(), .out = static_cast<int32_t*>(best->data()), .num_rows = 3, .width = 128256}));
  EXPECT_THAT(Download(*best), ElementsAreArray({7, 50007, 100007, 0}));
}

// Ids below 0 are tokens that the step before has chosen, read when the rows are gathered.
TEST_P(CudaBackendTest, StagedTokensMayNameTokensOfTheStepBefore) {
  Random random(4);
  const Tensor table = Upload(random.Normals(100 * 64));
  const auto last = Ints({17, 99, 0});
  const std::vector<int32_t> tokens = {-2, 5, -1, -3, -2}, positions = {0, 1, 2, 3, 4}, want = {99, 5, 17, 0, 99};
  Tensor out = Empty(tokens.size() * 64, DType::kF32);
  ExpectOk(session_->Stage({tokens, positions, {}}));
  ExpectOk(cuda_->GatherRows(ctx(), {table.device->data(), GetParam(), 100, 64, tokens, out.act(), true,
                                     static_cast<const int32_t*>(last->data())}));
  const std::vector<float> got = Download(out);
  for (size_t i = 0; i < want.size(); ++i) {
    for (int c = 0; c < 64; ++c) ASSERT_EQ(got[i * 64 + c], table.host[want[i] * 64 + c]) << i;
  }
}

// A copy has the bytes of its moment, however late somebody looks at it, and several are under way.
TEST_P(CudaBackendTest, LaterCopiesHaveTheBytesOfTheirMoment) {
  const auto memory = Ints(std::vector<int32_t>(5000, -1));
  std::vector<std::unique_ptr<HostCopy>> copies;
  for (int i = 0; i < 5; ++i) {
    const size_t bytes = sizeof(int32_t) * static_cast<size_t>(10 + 1000 * i);
    ExpectOk(cuda_->FillRandom(ctx(), {.out = memory->data(),
                                       .dtype = DType::kF32,
                                       .count = static_cast<int64_t>(bytes / sizeof(int32_t)),
                                       .stream = static_cast<uint64_t>(i)}));
    auto copy = session_->ReadBackLater(memory->data(), bytes);
    ASSERT_TRUE(copy.ok()) << copy.status();
    copies.push_back(*std::move(copy));
  }
  copies.erase(copies.begin());  // nobody looked at this one
  for (int i = 4; i > 0; --i) {
    std::vector<float> want(static_cast<size_t>(10 + 1000 * i));
    ExpectOk(ref_->FillRandom({}, {.out = want.data(),
                                   .dtype = DType::kF32,
                                   .count = static_cast<int64_t>(want.size()),
                                   .stream = static_cast<uint64_t>(i)}));
    const auto got = copies[static_cast<size_t>(i - 1)]->Wait();
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_EQ(std::memcmp(*got, want.data(), want.size() * sizeof(float)), 0) << i;
  }
}

TEST_P(CudaBackendTest, FillRandomIsBitwiseTheDefinition) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const int64_t count = 100'003;
    std::vector<std::byte> want(count * DTypeBytes(dtype)), got(want.size());
    FillRandomArgs args{.out = want.data(), .dtype = dtype, .count = count, .stream = 77, .first_index = 5};
    ExpectOk(ref_->FillRandom({}, args));
    const auto device = cuda_->Allocate(want.size()).value();
    args.out = device->data();
    ExpectOk(cuda_->FillRandom(ctx(), args));
    ExpectOk(cuda_->Copy(CopyKind::kDownload, got.data(), device->data(), got.size()));
    EXPECT_TRUE(got == want) << DTypeName(dtype);
  }
}

// Pieces of all sizes and alignments, scattered over the device's memory, up, within it and down again.
TEST_P(CudaBackendTest, ScatteredPiecesArriveWhole) {
  std::mt19937 random(GetParam() == DType::kF32 ? 1 : 2);
  for (int round = 0; round < 6; ++round) {
    // Many small pages, a few large pieces, and what neither 16 divides.
    const size_t count = round < 3 ? 20'000 : 40;
    const size_t place = round < 3 ? 4096 : 3 << 20;
    std::vector<size_t> order(count), bytes(count);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    for (size_t& size : bytes) {
      size = 1 + random() % place;
      if (round % 3 != 0) size = std::max<size_t>(16, size / 16 * 16);
    }
    const auto first = cuda_->Allocate(count * place).value(), second = cuda_->Allocate(count * place).value();
    std::vector<std::byte> sent(count * place), got(count * place);
    for (size_t i = 0; i < sent.size(); ++i) sent[i] = static_cast<std::byte>(i * 2654435761u >> 24);
    std::vector<CopyOp> up, within, down;
    for (size_t i = 0; i < count; ++i) {
      std::byte* const there = static_cast<std::byte*>(first->data()) + order[i] * place;
      std::byte* const then = static_cast<std::byte*>(second->data()) + i * place;
      up.push_back({there, sent.data() + i * place, bytes[i]});
      within.push_back({then, there, bytes[i]});
      down.push_back({got.data() + i * place, then, bytes[i]});
    }
    ExpectOk(cuda_->Copy(CopyKind::kUpload, up));
    ExpectOk(cuda_->Copy(CopyKind::kWithin, within));
    ExpectOk(cuda_->Copy(CopyKind::kDownload, down));
    for (size_t i = 0; i < count; ++i) {
      ASSERT_EQ(std::memcmp(sent.data() + i * place, got.data() + i * place, bytes[i]), 0)
          << i << " of round " << round;
      ASSERT_TRUE(bytes[i] == place || got[i * place + bytes[i]] == std::byte{0}) << "behind " << i;
    }
  }
}

TEST_P(CudaBackendTest, MixtureOfExperts) {
  Random random(4);
  for (const auto& [rows, experts, top_k] :
       std::vector<std::array<int32_t, 3>>{{1, 8, 2}, {37, 128, 8}, {400, 16, 4}}) {
    const int64_t in = 64, out = 136, pairs = int64_t{rows} * top_k;
    std::vector<float> raw = random.Normals(rows * experts);
    for (int32_t i = 0; i + 1 < experts; i += 3) raw[i] = raw[i + 1];  // ties
    const Tensor logits = Upload(raw, DType::kF32), x = Upload(random.Normals(rows * in));
    const Tensor w = Upload(random.Normals(experts * out * in));
    for (const bool renormalize : {true, false}) {
      std::vector<int32_t> ids(pairs), offsets(experts + 1), sorted(pairs), places(pairs);
      std::vector<float> weights(pairs);
      ExpectOk(ref_->RouteExperts({}, {logits.host.data(), rows, experts, top_k, renormalize, ids.data(),
                                       weights.data(), offsets.data(), sorted.data(), places.data()}));
      auto d_ids = Ints(std::vector<int32_t>(pairs, -1)), d_offsets = Ints(std::vector<int32_t>(experts + 1, -1));
      auto d_rows = Ints(std::vector<int32_t>(pairs, -1)), d_places = Ints(std::vector<int32_t>(pairs, -1));
      Tensor d_weights = Empty(pairs, DType::kF32);
      const auto i32 = [](const auto& b) { return static_cast<int32_t*>(b->data()); };
      float* device_weights = static_cast<float*>(d_weights.device->data());
      ExpectOk(cuda_->RouteExperts(ctx(), {logits.f32(), rows, experts, top_k, renormalize, i32(d_ids), device_weights,
                                           i32(d_offsets), i32(d_rows), i32(d_places)}));
      EXPECT_THAT(Download(*d_ids), ElementsAreArray(ids));
      EXPECT_THAT(Download(*d_offsets), ElementsAreArray(offsets));
      EXPECT_THAT(Download(*d_rows), ElementsAreArray(sorted));
      EXPECT_THAT(Download(*d_places), ElementsAreArray(places));
      ExpectClose(Download(d_weights), weights, DType::kF32, "routing weights");

      const std::vector<std::byte> bytes = Encode(w.host, GetParam());
      auto memory = cuda_->Allocate(bytes.size()).value();
      ExpectOk(cuda_->Copy(CopyKind::kUpload, memory->data(), bytes.data(), bytes.size()));
      const GroupedWeightView view{nullptr, GetParam(), experts, out, in};
      const auto packed = cuda_->AdoptGrouped(std::move(memory), view).value();
      Tensor y = Empty(pairs * out), combined = Empty(rows * out);
      ExpectOk(cuda_->GroupedLinear(ctx(), {x.act(), rows, i32(d_rows), i32(d_offsets), packed.get(), y.act(), pairs}));
      ExpectOk(
          cuda_->CombineExperts(ctx(), {y.act(), i32(d_places), device_weights, combined.act(), rows, top_k, out}));
      auto ref_memory = ref_->Allocate(w.host.size() * 4).value();
      std::memcpy(ref_memory->data(), w.host.data(), w.host.size() * 4);
      const auto ref_packed =
          ref_->AdoptGrouped(std::move(ref_memory), {nullptr, DType::kF32, experts, out, in}).value();
      std::vector<float> want_y(pairs * out), want(rows * out);
      ExpectOk(ref_->GroupedLinear(
          {}, {x.host.data(), rows, sorted.data(), offsets.data(), ref_packed.get(), want_y.data(), pairs}));
      ExpectClose(Download(y), want_y, GetParam(), "GroupedLinear");
      ExpectOk(ref_->CombineExperts({}, {want_y.data(), places.data(), weights.data(), want.data(), rows, top_k, out}));
      ExpectClose(Download(combined), want, GetParam(), "CombineExperts");
    }
  }
}

// Two sequences at odd positions through the rotation, the pages and both kinds of attention, twice: the second pass
// grows the page tables, and decode steps are run first as they are, then recorded, then replayed, also with other
// visibility than when they were recorded.
TEST_P(CudaPagesTest, BatchesThroughRopePagesAndAttention) {
  Random random(5);
  for (const auto& [dim, with_norm] : std::vector<std::pair<int32_t, bool>>{{16, false}, {64, true}, {128, true}}) {
    SCOPED_TRACE(::testing::Message() << "head_dim " << dim);
    const int32_t q_heads = 4, kv_heads = 2, layers = 2, half = dim / 2, width = (q_heads + 2 * kv_heads) * dim;
    const DType dtype = GetParam();
    const int32_t num_pages = 64;
    TestPool host_pool(pages(), dim, num_pages);
    const size_t pool_bytes = host_pool.view().page_bytes() * num_pages;
    auto memory = cuda_->Allocate(pool_bytes).value();
    ExpectOk(cuda_->Copy(CopyKind::kUpload, memory->data(), host_pool.view().base, pool_bytes));
    const KvPoolView pool{static_cast<std::byte*>(memory->data()), pages(), dim, num_pages};
    std::vector<float> angles = random.Normals(1024 * half), cosines, sines;
    for (const float a : angles) {
      cosines.push_back(std::cos(a));
      sines.push_back(std::sin(a));
    }
    const Tensor cos = Upload(cosines, DType::kF32), sin = Upload(sines, DType::kF32);
    const Tensor q_norm = Upload(random.Normals(dim), DType::kF32), k_norm = Upload(random.Normals(dim), DType::kF32);

    std::vector<int32_t> free_pages(num_pages);
    std::iota(free_pages.begin(), free_pages.end(), 0);
    std::shuffle(free_pages.begin(), free_pages.end(), random.engine());
    std::vector<std::vector<int32_t>> tables[2];
    for (auto& t : tables) t.resize(layers * kv_heads);
    static uint64_t next_id = 1;
    const uint64_t ids[2] = {next_id++, next_id++};
    const auto grow = [&](int s, int32_t length) {
      for (auto& table : tables[s]) {
        while (static_cast<int32_t>(table.size()) * kPageTokens < length) {
          table.push_back(free_pages.back());
          free_pages.pop_back();
        }
      }
    };
    const HeadVisibility rules[2] = {{}, {VisibilityRule::kBand, 3, 40}};
    int32_t lengths[2] = {0, 0};
    CodeRows code_rows;
    const auto pass = [&](const std::array<int32_t, 2>& rows_of, bool decode) {
      std::vector<int32_t> tokens, positions;
      std::vector<BatchSequence> batch;
      for (int s = 0; s < 2; ++s) {
        const int32_t begin = static_cast<int32_t>(tokens.size());
        for (int32_t i = 0; i < rows_of[s]; ++i) {
          tokens.push_back(i);
          positions.push_back(lengths[s] + i);
        }
        lengths[s] += rows_of[s];
        grow(s, lengths[s]);
        batch.push_back({begin, begin + rows_of[s], lengths[s], tables[s], ids[s]});
      }
      ExpectOk(session_->Stage({tokens, positions, batch}));
      const int32_t rows = static_cast<int32_t>(tokens.size());
      for (int32_t layer = 0; layer < layers; ++layer) {
        Tensor qkv = Upload(random.Normals(rows * width));
        Tensor out = Empty(rows * q_heads * dim);
        std::vector<std::span<const int32_t>> views;
        std::vector<HeadStreamView> streams;
        for (int s = 0; s < 2; ++s) {
          for (int32_t h = 0; h < kv_heads; ++h) {
            views.push_back(tables[s][layer * kv_heads + h]);
            streams.push_back({tables[s][layer * kv_heads + h], lengths[s], rules[h]});
          }
        }
        std::vector<RopeSequence> rope;
        std::vector<PrefillSequence> prefill;
        for (int s = 0; s < 2; ++s) {
          const std::span<const int32_t> at = std::span(positions).subspan(batch[s].row_begin, rows_of[s]);
          rope.push_back({batch[s].row_begin, batch[s].row_end, at, std::span(views).subspan(s * kv_heads, kv_heads)});
          prefill.push_back(
              {batch[s].row_begin, batch[s].row_end, at, std::span(streams).subspan(s * kv_heads, kv_heads)});
        }
        const QkNorm norm = with_norm ? QkNorm{q_norm.f32(), k_norm.f32(), 1e-6f} : QkNorm{};
        const QkNorm host_norm = with_norm ? QkNorm{q_norm.host.data(), k_norm.host.data(), 1e-6f} : QkNorm{};
        ExpectOk(cuda_->RopeWriteKv(ctx(), {.qkv = qkv.act(),
                                            .num_qo_heads = q_heads,
                                            .num_kv_heads = kv_heads,
                                            .head_dim = dim,
                                            .table = {cos.f32(), sin.f32(), 1024},
                                            .pool = pool,
                                            .sequences = rope,
                                            .layer = layer,
                                            .qk_norm = norm}));
        std::vector<float> host_qkv = qkv.host;
        ExpectOk(ref_->RopeWriteKv({}, {.qkv = host_qkv.data(),
                                        .num_qo_heads = q_heads,
                                        .num_kv_heads = kv_heads,
                                        .head_dim = dim,
                                        .table = {cosines.data(), sines.data(), 1024},
                                        .pool = host_pool.view(),
                                        .sequences = rope,
                                        .qk_norm = host_norm}));
        // The rotated q of the device is what the reference attention is given, so that each step is judged alone.
        const std::vector<float> device_qkv = Download(qkv);
        std::vector<float> q_got, q_want;
        for (int32_t r = 0; r < rows; ++r) {
          q_got.insert(q_got.end(), &device_qkv[r * width], &device_qkv[r * width] + q_heads * dim);
          q_want.insert(q_want.end(), &host_qkv[r * width], &host_qkv[r * width] + q_heads * dim);
        }
        ExpectClose(q_got, q_want, dtype, "rotated q");
        std::vector<std::byte> written(pool_bytes);
        ExpectOk(cuda_->Copy(CopyKind::kDownload, written.data(), memory->data(), pool_bytes));
        for (int s = 0; s < 2; ++s) {
          for (int32_t h = 0; h < kv_heads; ++h) {
            for (int32_t p = 0; p < lengths[s]; ++p) {
              const int32_t page = tables[s][layer * kv_heads + h][p / kPageTokens];
              for (int half_page = 0; half_page < 2; ++half_page) {
                const int32_t slot = p % kPageTokens;
                if (pages() == DType::kE4M3) {
                  code_rows.Compare(dim, HalfOf(pool, written.data(), page, half_page),
                                    HalfOf(pool, host_pool.view().base, page, half_page), slot, "a row of a page");
                } else {
                  ExpectClose(RowOf(pool, written.data(), page, half_page, slot),
                              RowOf(pool, host_pool.view().base, page, half_page, slot), dtype, "a row of a page");
                }
                if (HasFailure()) return;
              }
            }
          }
        }
        std::memcpy(host_pool.view().base, written.data(), pool_bytes);
        const AttentionShape shape{q_heads, kv_heads, dim, 0.2f};
        std::vector<float> want(rows * q_heads * dim);
        if (decode) {
          const DecodeAttentionArgs args{.shape = shape,
                                         .pool = pool,
                                         .q = qkv.act(),
                                         .q_row_stride = width,
                                         .out = out.act(),
                                         .streams = streams,
                                         .layer = layer};
          const auto step = [&] { return cuda_->DecodeAttention(ctx(), args); };
          static uint64_t key = 1;
          ++key;
          ExpectOk(ref_->DecodeAttention({}, {.shape = shape,
                                              .pool = host_pool.view(),
                                              .q = device_qkv.data(),
                                              .q_row_stride = width,
                                              .out = want.data(),
                                              .streams = streams}));
          for (const char* how : {"direct", "recorded", "replayed"}) {
            ExpectOk(cuda_->Copy(CopyKind::kWithin, out.device->data(), Empty(rows * q_heads * dim).device->data(),
                                 out.device->size()));
            ExpectOk(session_->RunStep(key, step));
            ExpectClose(Download(out), want, dtype, how);
          }
          // What heads see may differ between the sequences, and a recording follows what is staged.
          const uint64_t any_key = ++key;
          for (uint64_t round = 1; round <= 6; ++round) {
            SCOPED_TRACE(::testing::Message() << "round " << round);
            std::vector<HeadVisibility> plans[2];
            std::vector<HeadStreamView> seen = streams;
            for (int s = 0; s < 2; ++s) {
              for (int32_t stream = 0; stream < layers * kv_heads; ++stream) {
                const int32_t which = static_cast<int32_t>((round / 2 + stream + 2 * s) % 3);
                plans[s].push_back(which == 0 ? HeadVisibility{}
                                              : HeadVisibility{VisibilityRule::kBand, 5 * which, 30 * which + 1});
              }
              for (int32_t h = 0; h < kv_heads; ++h) seen[s * kv_heads + h].visibility = plans[s][layer * kv_heads + h];
              batch[s].plan_key = 1 + round / 2;
              const bool known = session_->HasPlan(ids[s], batch[s].plan_key);
              EXPECT_EQ(known, round % 2 == 1 && round > 1);
              batch[s].plan = known ? std::span<const HeadVisibility>() : plans[s];
            }
            ExpectOk(
                session_->Stage({.tokens = tokens, .positions = positions, .sequences = batch, .staged_plans = true}));
            DecodeAttentionArgs any = args;
            any.streams = seen;
            any.staged_plans = true;
            ExpectOk(ref_->DecodeAttention({}, {.shape = shape,
                                                .pool = host_pool.view(),
                                                .q = device_qkv.data(),
                                                .q_row_stride = width,
                                                .out = want.data(),
                                                .streams = seen}));
            ExpectOk(cuda_->Copy(CopyKind::kWithin, out.device->data(), Empty(rows * q_heads * dim).device->data(),
                                 out.device->size()));
            ExpectOk(session_->RunStep(any_key, [&] { return cuda_->DecodeAttention(ctx(), any); }));
            ExpectClose(Download(out), want, dtype, "staged plans");
          }
        } else {
          ExpectOk(cuda_->PrefillAttention(ctx(), {.shape = shape,
                                                   .pool = pool,
                                                   .q = qkv.act(),
                                                   .q_row_stride = width,
                                                   .out = out.act(),
                                                   .sequences = prefill,
                                                   .layer = layer}));
          ExpectOk(ref_->PrefillAttention({}, {.shape = shape,
                                               .pool = host_pool.view(),
                                               .q = device_qkv.data(),
                                               .q_row_stride = width,
                                               .out = want.data(),
                                               .sequences = prefill}));
          ExpectClose(Download(out), want, dtype, "prefill attention");
        }
      }
    };
    pass({70, 129}, false);
    pass({100, 1}, false);
    pass({1, 1}, true);
    pass({1, 1}, true);
    code_rows.ExpectFewDiffer("rows of pages");
  }
}

TEST_P(CudaPagesTest, PageChecksumsAreThoseOfTheHost) {
  Random random(7);
  for (const int32_t dim : {32, 64, 128}) {
    const KvPoolView host_view{nullptr, pages(), dim, 40};
    std::vector<std::byte> bytes(host_view.page_bytes() * 40);
    for (std::byte& b : bytes) b = static_cast<std::byte>(random.Int(0, 255));
    auto memory = cuda_->Allocate(bytes.size()).value();
    ExpectOk(cuda_->Copy(CopyKind::kUpload, memory->data(), bytes.data(), bytes.size()));
    const KvPoolView pool{static_cast<std::byte*>(memory->data()), pages(), dim, 40};
    const std::vector<int32_t> asked = {39, 0, 7, 7, 20};
    std::vector<uint32_t> got(asked.size());
    ExpectOk(cuda_->PageChecksums(pool, asked, got.data()));
    for (size_t i = 0; i < asked.size(); ++i)
      EXPECT_EQ(got[i], Crc32cExtend(0, &bytes[asked[i] * pool.page_bytes()], pool.page_bytes())) << dim;
  }
}

TEST_P(CudaBackendTest, SaysWhatDoesNotFit) {
  const auto huge = cuda_->Allocate(size_t{1} << 50);
  EXPECT_EQ(huge.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(huge.status().message()), ::testing::HasSubstr("are missing"));
  EXPECT_EQ(MakeCudaBackend({.device = 99}).status().code(), absl::StatusCode::kFailedPrecondition);
  std::vector<int32_t> tokens(513, 0), positions(513, 0);
  EXPECT_EQ(session_->Stage({tokens, positions, {}}).code(), absl::StatusCode::kResourceExhausted);
}

// Runs of tokens inside one pool, some turned, some copied, on every path of the kernel.
TEST_P(CudaPagesTest, AlignCopy) {
  Random random(11);
  for (const auto& [dim, rotary, interleaved] :
       {std::tuple{128, 128, false}, {64, 64, false}, {40, 40, false}, {128, 64, false}, {64, 64, true}}) {
    constexpr int32_t kPages = 64, kStreams = 5, kRotations = 4;
    TestPool filled(pages(), dim, kPages);
    KvPoolView pool = filled.view();
    for (int32_t page = 0; page < kPages; ++page) {
      for (int32_t slot = 0; slot < kPageTokens; ++slot) {
        StoreKvRow(pages(), dim, pool.k(page), slot, random.Normals(dim).data());
        StoreKvRow(pages(), dim, pool.v(page), slot, random.Normals(dim).data());
      }
    }
    const std::vector<std::byte> initial(filled.bytes().begin(), filled.bytes().end());
    std::vector<float> cos, sin;
    for (int i = 0; i < kRotations * rotary / 2; ++i) {
      const float angle = random.Normal() * 3;
      cos.push_back(std::cos(angle));
      sin.push_back(std::sin(angle));
    }
    std::vector<AlignRun> runs;
    std::vector<int32_t> src, dst;
    for (int32_t page = kPages / 2; page + kStreams <= kPages; page += kStreams) {
      const int32_t count = random.Int(1, 64);
      runs.push_back({count, random.Int(0, 64 - count), random.Int(0, 64 - count), random.Int(-1, kRotations - 1)});
      for (int32_t s = 0; s < kStreams; ++s) {
        src.push_back(random.Int(0, kPages / 2 - 1));
        dst.push_back(page + s);
      }
    }
    AlignCopyArgs args{pool, kStreams, runs, src, dst, cos, sin, rotary, interleaved};
    std::vector<std::byte> want = initial, got(initial.size());
    args.pool.base = want.data();
    ExpectOk(ref_->AlignCopy({}, args));
    const auto memory = cuda_->Allocate(initial.size()).value();
    ExpectOk(cuda_->Copy(CopyKind::kUpload, memory->data(), initial.data(), initial.size()));
    args.pool.base = static_cast<std::byte*>(memory->data());
    ExpectOk(cuda_->AlignCopy(ctx(), args));
    ExpectOk(session_->Synchronize());
    ExpectOk(cuda_->Copy(CopyKind::kDownload, got.data(), memory->data(), got.size()));
    std::vector<float> got_values, want_values;
    CodeRows code_rows;
    for (int32_t page = 0; page < kPages; ++page) {
      for (int32_t row = 0; row < 2 * kPageTokens; ++row) {
        if (pages() == DType::kE4M3) {
          const int half = row / kPageTokens;
          code_rows.Compare(dim, HalfOf(pool, got.data(), page, half), HalfOf(pool, want.data(), page, half),
                            row % kPageTokens, "a row of a page");
          if (HasFailure()) return;
          continue;
        }
        for (auto* const to : {&got_values, &want_values}) {
          const auto& bytes = to == &got_values ? got : want;
          const std::vector<float> x = RowOf(pool, bytes.data(), page, row / kPageTokens, row % kPageTokens);
          to->insert(to->end(), x.begin(), x.end());
        }
      }
    }
    ExpectClose(got_values, want_values, GetParam(), "pages");
    code_rows.ExpectFewDiffer("pages");
    for (AlignRun& run : runs) run.rotation = AlignRun::kNoRotation;
    args.pool.base = want.data();
    ExpectOk(ref_->AlignCopy({}, args));
    args.pool.base = static_cast<std::byte*>(memory->data());
    ExpectOk(cuda_->AlignCopy(ctx(), args));
    ExpectOk(session_->Synchronize());
    ExpectOk(cuda_->Copy(CopyKind::kDownload, got.data(), memory->data(), got.size()));
    for (size_t i = 0; i < runs.size(); ++i) {  // bytes, where nothing turns
      const size_t row = static_cast<size_t>(KvRowBytes(pages(), dim)), count = runs[i].num_tokens;
      const size_t half = pool.page_bytes() * dst[i * kStreams];
      EXPECT_EQ(std::memcmp(&got[half + runs[i].dst_slot * row], &want[half + runs[i].dst_slot * row], count * row), 0);
      if (pages() != DType::kE4M3) continue;
      const size_t scales = half + kPageTokens * row + runs[i].dst_slot;
      EXPECT_EQ(std::memcmp(&got[scales], &want[scales], count), 0);
    }
  }
}

// Lines are chosen and attended to without the host; what was chosen is then read back and given to the reference.
TEST_P(CudaPagesTest, LinesAndAttentionOverThem) {
  Random random(19);
  for (const int32_t dim : {64, 128, OddDim()}) {
    const int32_t length = 900, first = 420, q_heads = 8, kv_heads = 2, layers = 2, rows = length - first, layer = 1;
    TestPool host_pool(pages(), dim, 64);
    host_pool.Shuffle(random);
    std::vector<TestStream> streams;
    std::vector<std::vector<int32_t>> tables;
    for (int32_t i = 0; i < layers * kv_heads; ++i) {
      streams.push_back(MakeStream(random, length, dim));
      host_pool.Place(streams.back());
      tables.push_back(streams.back().page_table);
    }
    const size_t pool_bytes = host_pool.view().page_bytes() * 64;
    const auto memory = cuda_->Allocate(pool_bytes).value();
    ExpectOk(cuda_->Copy(CopyKind::kUpload, memory->data(), host_pool.view().base, pool_bytes));
    KvPoolView pool = host_pool.view();
    pool.base = static_cast<std::byte*>(memory->data());
    std::vector<int32_t> tokens(rows), positions(rows);
    std::iota(positions.begin(), positions.end(), first);
    static uint64_t next_id = 5000;
    const BatchSequence batch{0, rows, length, tables, next_id++};
    ExpectOk(session_->Stage({tokens, positions, {&batch, 1}}));
    std::vector<float> peaked = random.Normals(static_cast<size_t>(rows) * q_heads * dim);
    for (float& x : peaked) x *= 4;
    const Tensor q = Upload(peaked);
    const AttentionShape shape{q_heads, kv_heads, dim, 1.0f / std::sqrt(static_cast<float>(dim))};
    std::vector<HeadStreamView> views;
    for (int32_t h = 0; h < kv_heads; ++h) views.push_back({tables[layer * kv_heads + h], length, {}});
    const PrefillSequence sequence{0, rows, positions, views};
    const std::vector<int32_t> samples = SampleRows(rows, 3);
    for (const LineOptions options : {LineOptions{.alpha = 0.8f, .max_columns = 600, .max_offsets = 500},
                                      LineOptions{.max_columns = 64, .max_offsets = 64}}) {
      const LineSizes sizes{.shape = shape,
                            .page_dtype = DerivedKeyType(pages()),
                            .num_samples = static_cast<int32_t>(samples.size()),
                            .first_position = first,
                            .num_rows = rows,
                            .max_columns = options.max_columns,
                            .max_offsets = options.max_offsets};
      const auto buffer = cuda_->Allocate(LinePlanBytes(sizes)).value();
      const LinePlan plan = PlaceLinePlan(buffer->data(), sizes);
      ExpectOk(cuda_->SelectLines(ctx(), {.shape = shape,
                                          .pool = pool,
                                          .q = q.act(),
                                          .q_row_stride = int64_t{q_heads} * dim,
                                          .rows = sequence,
                                          .layer = layer,
                                          .samples = samples,
                                          .options = options,
                                          .plan = plan}));
      std::vector<LineVisibility> lines;
      for (int32_t h = 0; h < kv_heads; ++h) lines.push_back(plan.Visibility(h));
      std::vector<HeadStreamView> seen = views;
      for (int32_t h = 0; h < kv_heads; ++h) seen[h].visibility = {.rule = VisibilityRule::kLines, .lines = &lines[h]};
      const PrefillSequence attended{0, rows, positions, seen};
      Tensor out = Empty(rows * q_heads * dim);
      ExpectOk(cuda_->PrefillAttention(ctx(), {.shape = shape,
                                               .pool = pool,
                                               .q = q.act(),
                                               .q_row_stride = int64_t{q_heads} * dim,
                                               .out = out.act(),
                                               .sequences = {&attended, 1},
                                               .layer = layer}));
      const std::vector<float> got = Download(out);
      std::vector<std::byte> bytes(buffer->size());
      ExpectOk(cuda_->Copy(CopyKind::kDownload, bytes.data(), buffer->data(), bytes.size()));
      const LinePlan read = PlaceLinePlan(bytes.data(), sizes);
      std::vector<float> exact(static_cast<size_t>(kv_heads * sizes.num_samples * sizes.weight_stride()));
      ExpectOk(ref::LineWeights({}, {.shape = shape,
                                     .pool = host_pool.view(),
                                     .q = q.host.data(),
                                     .q_row_stride = int64_t{q_heads} * dim,
                                     .rows = sequence,
                                     .samples = samples,
                                     .weights = exact.data(),
                                     .stride = sizes.weight_stride()}));
      for (int32_t h = 0; h < kv_heads; ++h) {
        lines[h] = read.Visibility(h);
        const LineResult& result = read.results[h];
        EXPECT_NEAR(result.total, 4.0 * sizes.num_samples, 1e-2);
        EXPECT_EQ(result.dense, options.max_columns == 64 ? 1 : 0);
        if (result.dense != 0) continue;
        double uncovered = 0, total = 0;
        const int32_t* columns = lines[h].columns;
        const int32_t* offsets = read.offsets + int64_t{h} * sizes.max_offsets;
        for (int32_t r = 0; r < sizes.num_samples; ++r) {
          const int32_t p = first + samples[r];
          for (int32_t j = 0; j <= p; ++j) {
            const double a = exact[(int64_t{h} * sizes.num_samples + r) * sizes.weight_stride() + j];
            total += a;
            if (!std::binary_search(columns, columns + result.num_columns, j) &&
                !std::binary_search(offsets, offsets + result.num_offsets, p - j))
              uncovered += a;
          }
        }
        EXPECT_LE(uncovered, result.uncovered + 1e-4 * total);
        EXPECT_LE(result.uncovered, (1 - options.alpha) * total + 1e-4 * total);
      }
      std::vector<float> want(got.size());
      ExpectOk(ref_->PrefillAttention({}, {.shape = shape,
                                           .pool = host_pool.view(),
                                           .q = q.host.data(),
                                           .q_row_stride = int64_t{q_heads} * dim,
                                           .out = want.data(),
                                           .sequences = {&attended, 1}}));
      ExpectClose(got, want, GetParam(), "attention over lines");
    }
  }
}

// Rows of a pass are blended with what was in their place before; the others stay.
TEST_P(CudaPagesTest, FuseRows) {
  Random random(21);
  for (const int32_t dim : {64, 128, OddDim()}) {
    const int32_t length = 300, kv_heads = 2, layers = 2, layer = 1, rows = 100, num_pages = 32;
    TestPool before(pages(), dim, num_pages), after(pages(), dim, num_pages);
    std::vector<std::vector<int32_t>> tables;
    std::vector<std::span<const int32_t>> views;
    for (int32_t i = 0; i < layers * kv_heads; ++i) {
      TestStream old_stream = MakeStream(random, length, dim), stream = MakeStream(random, length, dim);
      if (i % 2 == 0) std::copy_n(old_stream.k.begin(), 50 * dim, stream.k.begin());  // equal ones
      before.Place(old_stream);
      after.Place(stream);
      ASSERT_EQ(stream.page_table, old_stream.page_table);
      tables.push_back(stream.page_table);
    }
    for (int32_t h = 0; h < kv_heads; ++h) views.push_back(tables[layer * kv_heads + h]);
    std::vector<int32_t> tokens(rows), positions, ids;
    for (int32_t r = 0; r < rows; ++r) positions.push_back(1 + 2 * r);
    for (int32_t r = 0; r < rows; r += random.Int(1, 3)) ids.push_back(r);
    static uint64_t next_id = 5000;
    const BatchSequence batch{0, rows, length, tables, next_id++};
    ExpectOk(session_->Stage({tokens, positions, {&batch, 1}}));
    const size_t bytes = before.view().page_bytes() * num_pages;
    const auto memory = cuda_->Allocate(bytes).value();
    const auto saved =
        cuda_->Allocate(FusedRowsBytes(pages(), dim, static_cast<int64_t>(ids.size()) * 2 * kv_heads)).value();
    FuseRowsArgs args{.pool = before.view(),
                      .num_kv_heads = kv_heads,
                      .rows = {0, rows, positions, views},
                      .layer = layer,
                      .row_ids = ids};
    std::vector<std::byte> host_saved(saved->size());
    args.saved = host_saved.data();
    ExpectOk(ref_->FuseRows({}, args));
    args.step = FuseStep::kBlend;
    args.pool = after.view();
    const std::vector<std::byte> fresh(after.view().base, after.view().base + bytes);
    ExpectOk(ref_->FuseRows({}, args));

    args.saved = saved->data();
    args.pool.base = static_cast<std::byte*>(memory->data());
    args.step = FuseStep::kSave;
    ExpectOk(cuda_->Copy(CopyKind::kUpload, memory->data(), before.view().base, bytes));
    ExpectOk(cuda_->FuseRows(ctx(), args));
    ExpectOk(session_->Synchronize());
    ExpectOk(cuda_->Copy(CopyKind::kUpload, memory->data(), fresh.data(), bytes));
    args.step = FuseStep::kBlend;
    ExpectOk(cuda_->FuseRows(ctx(), args));
    ExpectOk(session_->Synchronize());
    std::vector<std::byte> got(bytes);
    ExpectOk(cuda_->Copy(CopyKind::kDownload, got.data(), memory->data(), bytes));
    CodeRows code_rows;
    for (int32_t i = 0; i < layers * kv_heads; ++i) {
      for (int32_t j = 0; j < length; ++j) {
        for (int half = 0; half < 2; ++half) {
          const int32_t page = tables[i][j / kPageTokens], slot = j % kPageTokens;
          const auto row_of = [&](const std::byte* base) { return RowOf(after.view(), base, page, half, slot); };
          const std::vector<float> a = row_of(got.data()), b = row_of(after.view().base);
          const bool blended =
              i / kv_heads == layer && j % 2 == 1 && j < 2 * rows && std::binary_search(ids.begin(), ids.end(), j / 2);
          if (!blended || (i % 2 == 0 && half == 0 && j < 50)) {
            ASSERT_EQ(a, b) << "stream " << i << ", position " << j;
          } else if (pages() == DType::kE4M3) {
            code_rows.Compare(dim, HalfOf(after.view(), got.data(), page, half),
                              HalfOf(after.view(), after.view().base, page, half), slot, "fused rows");
          } else {
            ExpectClose(a, b, GetParam(), "fused rows");
          }
        }
      }
    }
    code_rows.ExpectFewDiffer("fused rows");
  }
}

TEST_P(CudaPagesTest, ColumnScoresAndValueDeviation) {
  Random random(12);
  for (const int32_t dim : {64, 128, OddDim()}) {
    const int32_t length = 700, q_heads = 8, kv_heads = 2, layers = 2, rows = 333;
    TestPool host_pool(pages(), dim, 64);
    host_pool.Shuffle(random);
    std::vector<TestStream> streams;
    std::vector<std::vector<int32_t>> tables;
    for (int32_t i = 0; i < layers * kv_heads; ++i) {
      streams.push_back(MakeStream(random, length, dim));
      host_pool.Place(streams.back());
      tables.push_back(streams.back().page_table);
    }
    const size_t pool_bytes = host_pool.view().page_bytes() * 64;
    const auto memory = cuda_->Allocate(pool_bytes).value();
    ExpectOk(cuda_->Copy(CopyKind::kUpload, memory->data(), host_pool.view().base, pool_bytes));
    KvPoolView pool = host_pool.view();
    pool.base = static_cast<std::byte*>(memory->data());
    std::vector<int32_t> tokens(rows), positions, probes;
    for (int32_t r = 0; r < rows; ++r) positions.push_back(5 + 2 * r);
    for (int32_t r = 0; r < rows; r += random.Int(1, 3)) probes.push_back(r);
    static uint64_t next_id = 1000;
    const BatchSequence batch{0, rows, length, tables, next_id++};
    ExpectOk(session_->Stage({tokens, positions, {&batch, 1}}));
    const Tensor q = Upload(random.Normals(static_cast<size_t>(rows) * q_heads * dim));
    const AttentionShape shape{q_heads, kv_heads, dim, 1.0f / std::sqrt(static_cast<float>(dim))};
    for (const HeadVisibility& rule : {HeadVisibility{}, HeadVisibility{VisibilityRule::kBand, 3, 90, {}}}) {
      const int32_t layer = 1;
      std::vector<HeadStreamView> views;
      for (int32_t h = 0; h < kv_heads; ++h) views.push_back({tables[layer * kv_heads + h], length, rule});
      const PrefillSequence sequence{0, rows, positions, views};
      Tensor out = Empty(rows * q_heads * dim), lse = Empty(rows * q_heads, DType::kF32);
      ExpectOk(cuda_->PrefillAttention(ctx(), {.shape = shape,
                                               .pool = pool,
                                               .q = q.act(),
                                               .q_row_stride = int64_t{q_heads} * dim,
                                               .out = out.act(),
                                               .lse = static_cast<float*>(lse.device->data()),
                                               .sequences = {&sequence, 1},
                                               .layer = layer}));
      const std::vector<float> host_lse = Download(lse);
      const std::vector<PositionRange> columns = {{0, 70}, {71, 128}, {200, 650}};
      const size_t count = 70 + 57 + 450;
      Tensor scores = Upload(std::vector<float>(count, 0.5f), DType::kF32);
      std::vector<float> want(count, 0.5f);
      ColumnScoresArgs args{.shape = shape,
                            .pool = pool,
                            .q = q.act(),
                            .q_row_stride = int64_t{q_heads} * dim,
                            .lse = lse.f32(),
                            .rows = sequence,
                            .layer = layer,
                            .probes = probes,
                            .columns = columns,
                            .scores = static_cast<float*>(scores.device->data())};
      ExpectOk(cuda_->ColumnScores(ctx(), args));
      args.pool = host_pool.view();
      args.q = q.host.data();
      args.lse = host_lse.data();
      args.scores = want.data();
      ExpectOk(ref_->ColumnScores({}, args));
      // ex2.approx is good to 2e-7 and sums are f32; scores of all heads add up.
      const std::vector<float> got = Download(scores);
      double error = 0, norm = 0;
      for (size_t i = 0; i < count; ++i) {
        error += std::pow(double{got[i]} - want[i], 2);
        norm += std::pow(double{want[i]}, 2);
      }
      EXPECT_LE(std::sqrt(error / norm), GetParam() == DType::kF32 ? 1e-5 : 1e-4) << dim;
      const std::vector<int32_t> one_head = {1};
      args.kv_heads = one_head;
      std::fill(want.begin(), want.end(), 0.0f);
      ExpectOk(ref_->ColumnScores({}, args));
      args.pool = pool;
      args.q = q.act();
      args.lse = lse.f32();
      Tensor again = Upload(std::vector<float>(count, 0.0f), DType::kF32);
      args.scores = static_cast<float*>(again.device->data());
      ExpectOk(cuda_->ColumnScores(ctx(), args));
      ExpectClose(Download(again), want, DType::kBF16, "one head");
    }
    const Tensor qkv = Upload(random.Normals(static_cast<size_t>(rows) * (q_heads + 2 * kv_heads) * dim), DType::kF32);
    std::vector<std::span<const int32_t>> spans;
    for (int32_t h = 0; h < kv_heads; ++h) spans.emplace_back(tables[kv_heads + h]);
    Tensor deviation = Empty(200, DType::kF32);
    std::vector<float> want(200);
    ValueDeviationArgs args{.qkv = qkv.act(),
                            .num_qo_heads = q_heads,
                            .num_kv_heads = kv_heads,
                            .head_dim = dim,
                            .pool = pool,
                            .rows = {50, 250, std::span(positions).subspan(50, 200), spans},
                            .layer = 1,
                            .scores = static_cast<float*>(deviation.device->data())};
    ExpectOk(cuda_->ValueDeviation(ctx(), args));
    args.qkv = qkv.host.data();
    args.pool = host_pool.view();
    args.scores = want.data();
    ExpectOk(ref_->ValueDeviation({}, args));
    ExpectClose(Download(deviation), want, DType::kF32, "deviation");
  }
}

TEST_P(CudaBackendTest, RowNormsAndScatterRows) {
  Random random(16);
  for (const int64_t rows : {1, 63, 700}) {
    for (const int64_t width : {4, 100, 4096}) {
      std::vector<float> want(static_cast<size_t>(rows));
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        const Tensor x = Upload(random.Normals(static_cast<size_t>(rows * width)), dtype);
        ExpectOk(ref_->RowNorms({}, {x.host.data(), rows, width, want.data()}));
        const Tensor out = Empty(rows, DType::kF32);
        ExpectOk(cuda_->RowNorms(ctx(), {x.act(), rows, width, static_cast<float*>(out.device->data())}));
        ExpectClose(Download(out), want, DType::kF32, "row norms");
      }
      std::vector<int32_t> ids;
      for (int32_t row = 0; row < rows; ++row) {
        if (random.Int(0, 2) == 0) ids.push_back(row);
      }
      const Tensor packed =
          Upload(random.Normals(std::max<size_t>(1, ids.size() * static_cast<size_t>(width))), DType::kF32);
      const Tensor out = Upload(std::vector<float>(static_cast<size_t>(rows * width), -1.0f), DType::kF32);
      std::vector<float> scattered(static_cast<size_t>(rows * width));
      ExpectOk(ref_->ScatterRows({}, {packed.host.data(), ids, rows, width, scattered.data()}));
      ExpectOk(cuda_->ScatterRows(ctx(), {packed.f32(), ids, rows, width, static_cast<float*>(out.device->data())}));
      EXPECT_THAT(Download(out), ElementsAreArray(scattered));
      if (HasFailure()) return;
    }
  }
}

TEST_P(CudaBackendTest, PoolScores) {
  Random random(15);
  for (const int64_t count : {1, 5, 255, 256, 257, 32769}) {
    const std::vector<float> values = random.Normals(static_cast<size_t>(count));
    const Tensor scores = Upload(values, DType::kF32);
    for (const int32_t radius : {0, 1, 4, 64}) {
      std::vector<float> want(values.size());
      ExpectOk(ref_->PoolScores({}, {values.data(), count, radius, want.data()}));
      const Tensor out = Upload(std::vector<float>(values.size(), -1.0f), DType::kF32);
      ExpectOk(cuda_->PoolScores(ctx(), {scores.f32(), count, radius, static_cast<float*>(out.device->data())}));
      EXPECT_THAT(Download(out), ElementsAreArray(want)) << count << ", " << radius;
      if (HasFailure()) return;
    }
  }
}

TEST_P(CudaBackendTest, TopK) {
  Random random(13);
  for (const int64_t count : {1, 5, 1000, 32768, 32769, 100'000, 1 << 20}) {
    std::vector<float> values = random.Normals(static_cast<size_t>(count));
    for (const bool ties : {false, true}) {
      if (ties) {
        for (float& v : values) v = static_cast<float>(random.Int(-2, 2));
        values[0] = std::numeric_limits<float>::quiet_NaN();
      }
      const Tensor scores = Upload(values, DType::kF32);
      for (const int64_t k : {int64_t{1}, std::min<int64_t>(count, 1638), count}) {
        std::vector<int32_t> want(static_cast<size_t>(k));
        ExpectOk(ref_->TopK({}, {values.data(), count, k, want.data()}));
        const auto out = Ints(std::vector<int32_t>(static_cast<size_t>(k), -1));
        ExpectOk(cuda_->TopK(ctx(), {scores.f32(), count, k, static_cast<int32_t*>(out->data())}));
        EXPECT_THAT(Download(*out), ElementsAreArray(want)) << count << ", " << k;
        if (HasFailure()) return;
      }
    }
  }
}

// Digits that every value has, that no two share, and a k that ends exactly where a digit does.
TEST_P(CudaBackendTest, TopKOfUnusualDigits) {
  Random random(14);
  for (const int64_t count : {4095, 32768, 40'000}) {
    const auto n = static_cast<size_t>(count);
    std::vector<float> near(n), any(n), steps(n);
    for (size_t i = 0; i < n; ++i) {
      near[i] = std::bit_cast<float>(0x3f800000u + static_cast<uint32_t>(random.Int(0, 700)));  // one first digit
      const auto bits =
          static_cast<uint32_t>(random.Int(0, 0xffff)) << 16 | static_cast<uint32_t>(random.Int(0, 0xffff));
      any[i] = std::bit_cast<float>(bits);  // all of them, NaN and infinity too
      steps[i] = i % 4 == 0 ? 2.0f : i % 4 == 1 ? -0.0f : 0.0f;
    }
    for (const std::vector<float>& values : {near, any, steps}) {
      const Tensor scores = Upload(values, DType::kF32);
      for (const int64_t k : {(count + 3) / 4 - 1, (count + 3) / 4, (count + 3) / 4 + 1, count - 1}) {
        std::vector<int32_t> want(static_cast<size_t>(k));
        ExpectOk(ref_->TopK({}, {values.data(), count, k, want.data()}));
        const auto out = Ints(std::vector<int32_t>(static_cast<size_t>(k), -1));
        ExpectOk(cuda_->TopK(ctx(), {scores.f32(), count, k, static_cast<int32_t*>(out->data())}));
        EXPECT_THAT(Download(*out), ElementsAreArray(want)) << count << ", " << k;
        if (HasFailure()) return;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, CudaBackendTest, ::testing::Values(Types(DType::kF32), Types(DType::kBF16)), NameOf);
INSTANTIATE_TEST_SUITE_P(Types, CudaPagesTest,
                         ::testing::Values(Types(DType::kF32), Types(DType::kBF16), Types(DType::kBF16, DType::kE4M3)),
                         NameOf);

TEST(CudaPluginTest, IsABackendOrSaysInOneLineWhyNot) {
  const auto backend = MakeCudaBackend();
  if (backend.ok()) {
    EXPECT_EQ((*backend)->name(), "cuda");
    EXPECT_FALSE((*backend)->host_memory());
    return;
  }
  const std::string message(backend.status().message());
  EXPECT_FALSE(message.empty());
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
}

}  // namespace
}  // namespace spl::kernels
