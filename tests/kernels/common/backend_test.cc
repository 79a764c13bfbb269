#include "kernels/backend/backend.h"

#include <cstdint>
#include <cstring>
#include <iostream>
#include <string>
#include <vector>

#include "tests/kernels/support/kernel_test_util.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

TEST(CpuFeatures, NamesRoundTrip) {
  for (const CpuIsa isa : kCpuIsas) EXPECT_EQ(ParseCpuIsa(CpuIsaName(isa)), isa);
  EXPECT_EQ(ParseCpuIsa("avx1024"), std::nullopt);
  EXPECT_EQ(CpuHasBf16Gemm(), DetectCpuIsa() >= CpuIsa::kAvx512Bf16);
}

// ./dev test shows this line: which variants a run of the tests covered.
TEST(CpuFeatures, SaysWhichVariantsTheTestsRun) {
  std::string names;
  for (const auto& isas : {MachineIsas(), MachineBf16Isas()}) {
    for (const CpuIsa isa : isas) names += std::string(" ") + std::string(CpuIsaName(isa));
  }
  std::cout << "CPU variants:" << names << std::endl;
  EXPECT_FALSE(MachineIsas().empty());
}

TEST(Backend, BuffersAreZeroedAndAligned) {
  for (const auto& backend : {MakeCpuBackend(), MakeReferenceBackend()}) {
    for (size_t bytes : {size_t{0}, size_t{1}, size_t{64}, size_t{4097}, size_t{3} << 20}) {
      const auto buffer = backend->Allocate(bytes);
      ASSERT_TRUE(buffer.ok()) << buffer.status();
      EXPECT_EQ((*buffer)->size(), bytes);
      EXPECT_EQ(reinterpret_cast<uintptr_t>((*buffer)->data()) % 64, 0u);
      const auto* p = static_cast<const unsigned char*>((*buffer)->data());
      for (size_t i = 0; i < bytes; ++i) ASSERT_EQ(p[i], 0);
      std::memset((*buffer)->data(), 1, bytes);
    }
    EXPECT_EQ(backend->Allocate(SIZE_MAX / 2).status().code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(backend->Allocate(SIZE_MAX).status().code(), absl::StatusCode::kResourceExhausted);
  }
}

// One decoder layer's worth of calls through the interface: the CPU backend against the reference backend.
TEST(Backend, CpuEqualsReferenceThroughALayer) {
  Random random(95);
  TestContext t(DetectCpuIsa());
  constexpr int32_t kRows = 70, kHidden = 48, kQo = 4, kKv = 2, kDim = 16, kFfn = 40;
  const std::vector<float> hidden = random.Normals(kRows * kHidden), norm = random.Normals(kHidden);
  const std::vector<float> w_qkv = random.Normals((kQo + 2 * kKv) * kDim * kHidden),
                           w_o = random.Normals(kHidden * kQo * kDim);
  const std::vector<float> w_up = random.Normals(2 * kFfn * kHidden), w_down = random.Normals(kHidden * kFfn);
  std::vector<float> cos(kRows * kDim / 2), sin(cos.size());
  for (size_t i = 0; i < cos.size(); ++i) {
    cos[i] = std::cos(0.1f * static_cast<float>(i));
    sin[i] = std::sin(0.1f * static_cast<float>(i));
  }
  const std::vector<std::vector<int32_t>> tables = {{3, 0}, {1, 2}};
  std::vector<int32_t> positions(kRows);
  for (int32_t i = 0; i < kRows; ++i) positions[i] = i;

  const auto run = [&](const Backend& b) {
    std::vector<float> residual = hidden, normed(kRows * kHidden), qkv(kRows * (kQo + 2 * kKv) * kDim),
                       attended(kRows * kQo * kDim);
    std::vector<float> delta(kRows * kHidden), gate_up(kRows * 2 * kFfn), act(kRows * kFfn), out(kRows * kHidden);
    const auto linear = [&](const std::vector<float>& w, int64_t n, int64_t k, const float* x, float* y) {
      const auto packed = b.PackLinear({w.data(), DType::kF32, n, k});
      EXPECT_TRUE(packed.ok()) << packed.status();
      const absl::Status s = b.Linear(t.ctx, {x, packed->get(), nullptr, y, kRows});
      EXPECT_TRUE(s.ok()) << s;
    };
    const auto buffer = b.Allocate(4 * 2 * kPageTokens * kDim * 4);
    const KvPoolView pool{static_cast<std::byte*>((*buffer)->data()), DType::kF32, kDim, 4};
    EXPECT_TRUE(b.RmsNorm(t.ctx, {residual.data(), nullptr, norm.data(), normed.data(), kRows, kHidden, 1e-5f}).ok());
    linear(w_qkv, (kQo + 2 * kKv) * kDim, kHidden, normed.data(), qkv.data());
    const std::vector<std::span<const int32_t>> spans(tables.begin(), tables.end());
    const RopeSequence rope{0, kRows, positions, spans};
    EXPECT_TRUE(
        b.RopeWriteKv(t.ctx, {qkv.data(), kQo, kKv, kDim, {cos.data(), sin.data(), kRows}, pool, {&rope, 1}}).ok());
    const std::vector<HeadStreamView> heads = {{tables[0], kRows, {}}, {tables[1], kRows, {}}};
    const PrefillSequence sequence{0, kRows, positions, heads};
    PrefillAttentionArgs attention;
    attention.shape = {kQo, kKv, kDim, 0.25f};
    attention.pool = pool;
    attention.q = qkv.data();
    attention.q_row_stride = (kQo + 2 * kKv) * kDim;
    attention.out = attended.data();
    attention.sequences = {&sequence, 1};
    EXPECT_TRUE(b.PrefillAttention(t.ctx, attention).ok());
    linear(w_o, kHidden, kQo * kDim, attended.data(), delta.data());
    EXPECT_TRUE(
        b.RmsNorm(t.ctx, {residual.data(), delta.data(), norm.data(), normed.data(), kRows, kHidden, 1e-5f}).ok());
    linear(w_up, 2 * kFfn, kHidden, normed.data(), gate_up.data());
    EXPECT_TRUE(b.SiluMul(t.ctx, {gate_up.data(), act.data(), kRows, kFfn}).ok());
    linear(w_down, kHidden, kFfn, act.data(), out.data());
    return out;
  };
  const std::vector<float> want = run(*MakeReferenceBackend());
  const std::vector<float> got = run(*MakeCpuBackend({GemmCompute::kF32}));
  double error = 0, size = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += std::pow(static_cast<double>(got[i]) - want[i], 2);
    size += std::pow(static_cast<double>(want[i]), 2);
  }
  EXPECT_LE(std::sqrt(error / size), 1e-4);  // seven operations, each within 1e-5, with the softmax sharpening them
}

TEST(Backend, DescribesItself) {
  EXPECT_EQ(MakeCpuBackend()->name(), "cpu");
  EXPECT_EQ(MakeReferenceBackend()->name(), "ref");
  EXPECT_NE(MakeCpuBackend()->description().find(CpuIsaName(DetectCpuIsa())), std::string::npos);
}

}  // namespace
}  // namespace spl::kernels
