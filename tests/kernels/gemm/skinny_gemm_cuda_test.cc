// The products of few rows on a CUDA device against a double-precision sum on the host, against themselves bit by bit
// for every number of rows, and in chains of launches that overlap. Needs a CUDA device; skips without one.
//
// Memory that must not be read or written is NaN, or checked to be NaN still: rows of x past the last, the end of W,
// rows of y past the last.
#include "kernels/gemm/skinny_gemm_cuda.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "tests/kernels/support/cuda_stream_test.h"

namespace spl::kernels::cuda {
namespace {

using testing::DeviceBuffer;
using testing::FastNormals;
using testing::FromBits;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

class SkinnyGemmTest : public testing::CudaStreamTest {};

struct Problem {
  Problem(int64_t out, int64_t in, bool with_bias) : out(out), in(in), random(static_cast<uint64_t>(out * 31 + in)) {
    x = FastNormals(random, static_cast<size_t>(kMaxSkinnyRows * in));
    w = FastNormals(random, static_cast<size_t>(out * in));
    if (with_bias) {
      for (const uint16_t b : FastNormals(random, static_cast<size_t>(out))) bias.push_back(FromBits(b));
    }
    std::vector<uint16_t> padded = w;
    padded.insert(padded.end(), 4096, testing::kNaNBf16);
    w_device = std::make_unique<DeviceBuffer<uint16_t>>(padded);
    if (with_bias) bias_device = std::make_unique<DeviceBuffer<float>>(bias);
  }

  // Rows [first, first + rows) of x; what lies behind them is NaN.
  std::vector<float> Multiply(int64_t first, int64_t rows, cudaStream_t stream) {
    std::vector<uint16_t> part(x.begin() + first * in, x.begin() + (first + rows) * in);
    part.resize(static_cast<size_t>(in * (rows + 8)), testing::kNaNBf16);
    const DeviceBuffer<uint16_t> x_device(part);
    const DeviceBuffer<float> y(std::vector<float>(static_cast<size_t>((rows + 1) * out), kNaN));
    CHECK_CUDA(SkinnyGemm({.x = x_device.get(),
                           .w = w_device->get(),
                           .bias = bias_device ? bias_device->get() : nullptr,
                           .y = y.get(),
                           .num_rows = rows,
                           .out_features = out,
                           .in_features = in},
                          stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    std::vector<float> values = y.Read();
    for (int64_t j = 0; j < out; ++j) EXPECT_TRUE(std::isnan(values[rows * out + j])) << "written past the last row";
    values.resize(static_cast<size_t>(rows * out));
    return values;
  }

  // Largest error of y[row, every step-th feature] in units of the f32 rounding of a sum of that size.
  double WorstError(const std::vector<float>& y, int64_t first, int64_t rows, int64_t step) const {
    double worst = 0;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t j = 0; j < out; j += step) {
        double sum = bias.empty() ? 0 : bias[j], size = std::abs(sum);
        for (int64_t k = 0; k < in; ++k) {
          const double p = double{FromBits(x[(first + r) * in + k])} * FromBits(w[j * in + k]);
          sum += p;
          size += std::abs(p);
        }
        const double error = std::abs(y[r * out + j] - sum) / (size * 0x1p-24);
        worst = std::isfinite(error) ? std::max(worst, error) : INFINITY;
      }
    }
    return worst;
  }

  int64_t out, in;
  uint64_t random;
  std::vector<uint16_t> x, w;
  std::vector<float> bias;
  std::unique_ptr<DeviceBuffer<uint16_t>> w_device;
  std::unique_ptr<DeviceBuffer<float>> bias_device;
};

// Odd sizes, tiles that end in the middle, fewer chunks than warps, shards, and the shapes of an 8B model.
const std::vector<std::pair<int64_t, int64_t>> kShapes = {
    {1, 8},     {16, 64},    {40, 72},     {17, 520},   {384, 1024},  {1024, 384},   {131, 4104},
    {768, 512}, {4096, 512}, {4096, 1792}, {768, 4096}, {6144, 4096}, {4096, 14336}, {28672, 4096}};

TEST_F(SkinnyGemmTest, IsTheProduct) {
  for (const auto& [out, in] : kShapes) {
    Problem p(out, in, out % 2 == 0);
    for (const int64_t rows : {1, 3, 8, 9, 13, 16, 17, 24, 25, 32}) {
      const int64_t step = std::max<int64_t>(1, out * in * rows / 20'000'000);
      // Sums in f32 in any order stay far below the worst case of `in` roundings; tensor cores truncate, about two.
      EXPECT_LT(p.WorstError(p.Multiply(0, rows, stream_), 0, rows, step), 4 + 2 * std::sqrt(static_cast<double>(in)))
          << out << " x " << in << ", " << rows << " rows";
    }
  }
}

TEST_F(SkinnyGemmTest, RowsDoNotDependOnTheOtherRows) {
  for (const auto& [out, in] : kShapes) {
    Problem p(out, in, false);
    const std::vector<float> all = p.Multiply(0, kMaxSkinnyRows, stream_);
    for (const int64_t rows : {1, 2, 7, 8, 9, 11, 17, 23, 25}) {
      for (const int64_t first : {int64_t{0}, int64_t{5}, kMaxSkinnyRows - rows}) {
        if (first + rows > kMaxSkinnyRows) continue;
        const std::vector<float> some = p.Multiply(first, rows, stream_);
        for (size_t i = 0; i < some.size(); ++i) {
          ASSERT_EQ(some[i], all[static_cast<size_t>(first * out) + i])
              << out << " x " << in << ", rows " << first << " to " << first + rows << ": row "
              << i / static_cast<size_t>(out) << ", feature " << i % static_cast<size_t>(out);
        }
      }
    }
  }
}

// Products that read what the one before wrote, and write what the one before that read, launched without a pause in
// between: the same bits as one at a time, launched or replayed.
TEST_F(SkinnyGemmTest, OverlappingLaunchesWaitForTheirInput) {
  constexpr int64_t kWidth = 2048, kRows = 5;
  constexpr int kLinks = 40;
  uint64_t random = 3;
  const DeviceBuffer<uint16_t> w(FastNormals(random, kWidth * kWidth, 1 / std::sqrt(static_cast<float>(kWidth))));
  const std::vector<uint16_t> x = FastNormals(random, kRows * kWidth);
  DeviceBuffer<uint16_t> a(x), b(x);
  const auto link = [&](int i) {
    CHECK_CUDA(SkinnyGemm({.x = i % 2 == 0 ? a.get() : b.get(),
                           .w = w.get(),
                           .y = i % 2 == 0 ? b.get() : a.get(),
                           .y_dtype = DType::kBF16,
                           .num_rows = kRows,
                           .out_features = kWidth,
                           .in_features = kWidth},
                          stream_));
  };
  for (int i = 0; i < kLinks; ++i) {
    link(i);
    CHECK_CUDA(cudaStreamSynchronize(stream_));
  }
  const std::vector<uint16_t> want = a.Read();
  EXPECT_NE(want, x);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  CHECK_CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < kLinks; ++i) link(i);
  CHECK_CUDA(cudaStreamEndCapture(stream_, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (int repeat = 0; repeat < 20; ++repeat) {
    a.Write(x);
    if (repeat < 10) {
      for (int i = 0; i < kLinks; ++i) link(i);
    } else {
      CHECK_CUDA(cudaGraphLaunch(exec, stream_));
    }
    CHECK_CUDA(cudaStreamSynchronize(stream_));
    ASSERT_EQ(a.Read(), want) << "repeat " << repeat;
  }
  CHECK_CUDA(cudaGraphExecDestroy(exec));
  CHECK_CUDA(cudaGraphDestroy(graph));
}

TEST_F(SkinnyGemmTest, SaysWhatItDoesNotServe) {
  const DeviceBuffer<uint16_t> x(std::vector<uint16_t>(4096)), w(std::vector<uint16_t>(4096));
  const DeviceBuffer<float> y(std::vector<float>(4096));
  const auto run = [&](int64_t rows, int64_t out, int64_t in, int shift) {
    return SkinnyGemm(
        {.x = x.get() + shift, .w = w.get(), .y = y.get(), .num_rows = rows, .out_features = out, .in_features = in},
        stream_);
  };
  EXPECT_EQ(run(1, 16, 16, 0), cudaSuccess);
  EXPECT_EQ(run(0, 16, 16, 0), cudaSuccess);
  EXPECT_EQ(run(kMaxSkinnyRows + 1, 16, 16, 0), cudaErrorNotSupported);
  EXPECT_EQ(run(1, 16, 12, 0), cudaErrorNotSupported);
  EXPECT_EQ(run(1, 16, 16, 1), cudaErrorNotSupported);
  EXPECT_EQ(run(1, 0, 16, 0), cudaErrorNotSupported);
  CHECK_CUDA(cudaStreamSynchronize(stream_));
}

}  // namespace
}  // namespace spl::kernels::cuda
