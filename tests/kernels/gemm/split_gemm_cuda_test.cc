// Products in which the blocks of a cluster share the columns of a tile, on a Hopper device: against double precision
// on the host, against themselves bit by bit for every number of rows, and in chains of launches that overlap, on two
// streams at once too. Skips without such a device.
//
// Memory that must not be read or written is NaN, or checked to be NaN still: rows of x past the last, the end of the
// weight, rows of y past the last.
#include "kernels/gemm/split_gemm_cuda.h"

#include <array>
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

constexpr uint16_t kNaN = testing::kNaNBf16;
constexpr uint32_t kNaNBits = 0x7fc0beef;

std::vector<float> Floats(const std::vector<uint16_t>& v) {
  std::vector<float> f;
  for (const uint16_t x : v) f.push_back(FromBits(x));
  return f;
}

class SplitGemmTest : public testing::HopperStreamTest {};

struct Problem {
  Problem(int64_t max_rows, int64_t out, int64_t in) : out(out), in(in), random(static_cast<uint64_t>(out * 31 + in)) {
    x = FastNormals(random, max_rows * in);
    w = FastNormals(random, out * in, 1.0f / std::sqrt(static_cast<float>(in)));
    residual = Floats(FastNormals(random, max_rows * out));
    bias = Floats(FastNormals(random, out));
    std::vector<uint16_t> padded = w;
    padded.insert(padded.end(), 4096, kNaN);
    w_device = std::make_unique<DeviceBuffer<uint16_t>>(padded);
    bias_device = std::make_unique<DeviceBuffer<float>>(bias);
  }
  // Everything but memory of the call; y is the residual if it is added to.
  SplitGemmArgs Args(bool add, bool with_bias) const {
    return {.weight = w_device->get(),
            .bias = with_bias ? bias_device->get() : nullptr,
            .add = add,
            .out_features = out,
            .in_features = in};
  }
  double Want(int64_t row, int64_t feature, bool add, bool with_bias) const {
    double sum = with_bias ? bias[feature] : 0.0;
    for (int64_t k = 0; k < in; ++k)
      sum += static_cast<double>(FromBits(x[row * in + k])) * FromBits(w[feature * in + k]);
    return sum + (add ? residual[row * out + feature] : 0.0);
  }

  int64_t out, in;
  uint64_t random;
  std::vector<uint16_t> x, w;
  std::vector<float> residual, bias;
  std::unique_ptr<DeviceBuffer<uint16_t>> w_device;
  std::unique_ptr<DeviceBuffer<float>> bias_device;
};

// Rows [first, first + rows) of y; NaN lies behind those of x and y.
std::vector<float> Multiply(const Problem& p, int64_t first, int64_t rows, SplitGemmArgs a, int splits,
                            cudaStream_t stream) {
  std::vector<uint16_t> part(p.x.begin() + first * p.in, p.x.begin() + (first + rows) * p.in);
  part.resize(static_cast<size_t>(p.in * (rows + 8)), kNaN);
  float nan = 0;
  std::memcpy(&nan, &kNaNBits, sizeof nan);
  std::vector<float> before(static_cast<size_t>((rows + 2) * p.out), nan);
  if (a.add) std::copy_n(p.residual.begin() + first * p.out, rows * p.out, before.begin());
  const DeviceBuffer<uint16_t> x(part);
  const DeviceBuffer<float> y(before);
  a.x = x.get();
  a.y = y.get();
  a.num_rows = rows;
  CHECK_CUDA(SplitGemm(a, splits, stream));
  CHECK_CUDA(cudaStreamSynchronize(stream));
  std::vector<float> values = y.Read();
  EXPECT_EQ(0, std::memcmp(values.data() + rows * p.out, before.data() + rows * p.out, 2 * p.out * sizeof(float)))
      << "past the last row";
  values.resize(static_cast<size_t>(rows * p.out));
  return values;
}

bool Same(const std::vector<float>& a, const float* b) {
  return std::memcmp(a.data(), b, a.size() * sizeof(float)) == 0;
}

// Tiles that end in the middle, fewer steps than stages, than blocks and none, an odd number of features.
const std::vector<std::array<int64_t, 2>> kShapes = {{8, 8},      {120, 72},  {257, 320},  {640, 200},
                                                     {1000, 136}, {384, 512}, {512, 4096}, {6144, 192}};
constexpr int kSplits[] = {2, 3};

TEST_F(SplitGemmTest, IsTheProduct) {
  for (const auto& [out, in] : kShapes) {
    const Problem p(300, out, in);
    for (const int splits : kSplits) {
      for (const int64_t rows : {1, 63, 64, 65, 96, 97, 128, 129, 256, 300}) {
        const bool add = rows % 2 == 0, with_bias = rows % 3 == 0;
        const std::vector<float> got = Multiply(p, 0, rows, p.Args(add, with_bias), splits, stream_);
        const int64_t step = std::max<int64_t>(1, rows * out * in / 1'000'000) * 2 - 1;
        double error = 0, size = 0;
        for (int64_t i = 0; i < rows * out; i += step) {
          const double want = p.Want(i / out, i % out, add, with_bias);
          ASSERT_NEAR(got[i], want, 3e-5) << out << " x " << in << ", " << rows << " rows: " << i;
          error += (got[i] - want) * (got[i] - want);
          size += want * want;
        }
        // Tensor cores cut off what a sum has no room for: half of 2^-23 of it on average for 16 columns, and here
        // there are at most 128 times 16 in a block.
        EXPECT_LT(std::sqrt(error / size), 7.6e-6) << out << " x " << in << ", " << rows << " rows";
      }
    }
  }
}

TEST_F(SplitGemmTest, RowsDoNotDependOnTheOtherRows) {
  constexpr int64_t kMaxRows = 8192;
  for (const auto& [out, in] : kShapes) {
    if (out * in > 200'000) continue;
    const Problem p(kMaxRows, out, in);
    for (const int splits : kSplits) {
      for (const bool add : {false, true}) {
        const std::vector<float> all = Multiply(p, 0, kMaxRows, p.Args(add, false), splits, stream_);
        for (const int64_t rows : {1, 33, 64, 65, 96, 127, 129, 200}) {
          for (const int64_t first : {int64_t{0}, int64_t{77}, kMaxRows - rows}) {
            const std::vector<float> some = Multiply(p, first, rows, p.Args(add, false), splits, stream_);
            EXPECT_TRUE(Same(some, all.data() + first * out))
                << out << " x " << in << ", rows " << first << " to " << first + rows;
          }
        }
      }
    }
  }
}

// Products that add to what the ones before added to, launched without a pause in between, on two streams at once: the
// same bits as one at a time, launched or replayed.
TEST_F(SplitGemmTest, OverlappingLaunchesWaitForEachOther) {
  constexpr int64_t kOut = 4096, kIn = 512, kMaxRows = 300;
  constexpr int kLinks = 12;
  const Problem p(kMaxRows, kOut, kIn);
  const DeviceBuffer<uint16_t> x(p.x);
  cudaStream_t other = nullptr;
  CHECK_CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  DeviceBuffer<float> y(p.residual), other_y(p.residual);
  for (const int64_t rows : {int64_t{40}, int64_t{96}, int64_t{200}, kMaxRows}) {
    const int splits = rows == 200 ? 2 : 3;
    const auto link = [&](bool second) {
      SplitGemmArgs a = p.Args(true, false);
      a.x = x.get();
      a.y = second ? other_y.get() : y.get();
      a.num_rows = rows;
      CHECK_CUDA(SplitGemm(a, splits, second ? other : stream_));
    };
    y.Write(p.residual);
    for (int i = 0; i < kLinks; ++i) {
      link(false);
      CHECK_CUDA(cudaStreamSynchronize(stream_));
    }
    const std::vector<float> want = y.Read();
    EXPECT_NE(want, p.residual);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    CHECK_CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < kLinks; ++i) link(false);
    CHECK_CUDA(cudaStreamEndCapture(stream_, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    for (int repeat = 0; repeat < 20; ++repeat) {
      y.Write(p.residual);
      other_y.Write(p.residual);
      if (repeat >= 10) CHECK_CUDA(cudaGraphLaunch(exec, stream_));
      for (int i = 0; i < kLinks; ++i) {
        if (repeat < 10) link(false);
        link(true);
      }
      CHECK_CUDA(cudaStreamSynchronize(stream_));
      CHECK_CUDA(cudaStreamSynchronize(other));
      ASSERT_EQ(y.Read(), want) << rows << " rows, repeat " << repeat;
      ASSERT_EQ(other_y.Read(), want) << rows << " rows, repeat " << repeat << ", the other stream";
    }
    CHECK_CUDA(cudaGraphExecDestroy(exec));
    CHECK_CUDA(cudaGraphDestroy(graph));
  }
  CHECK_CUDA(cudaStreamDestroy(other));
}

// cuBLASLt has the others: of fewer blocks than SMs, or of so many rows that x is read for too long.
TEST(PrefersSplitGemm, ShapesThatWereMeasured) {
  for (const int64_t rows : {33, 64, 96}) {
    EXPECT_TRUE(PrefersSplitGemm(rows, 4096, 4096)) << rows;
    EXPECT_TRUE(PrefersSplitGemm(rows, 4096, 14336)) << rows;
    EXPECT_TRUE(PrefersSplitGemm(rows, 6144, 4096)) << rows;
    EXPECT_FALSE(PrefersSplitGemm(rows, 2048, 2048)) << rows;
    EXPECT_FALSE(PrefersSplitGemm(rows, 28672, 4096)) << rows;
    EXPECT_FALSE(PrefersSplitGemm(rows, 4096, 1024)) << rows;
  }
  EXPECT_FALSE(PrefersSplitGemm(32, 4096, 4096));
  EXPECT_TRUE(PrefersSplitGemm(128, 4096, 4096));
  EXPECT_FALSE(PrefersSplitGemm(97, 6144, 4096));
  EXPECT_FALSE(PrefersSplitGemm(129, 4096, 4096));
}

TEST_F(SplitGemmTest, SaysWhatItDoesNotServe) {
  const DeviceBuffer<uint16_t> x(std::vector<uint16_t>(4096)), w(std::vector<uint16_t>(4096));
  const DeviceBuffer<float> y(std::vector<float>(4096));
  const auto run = [&](int64_t rows, int64_t out, int64_t in, int shift, int splits = 2) {
    return SplitGemm({.x = x.get() + shift,
                      .weight = w.get(),
                      .y = y.get(),
                      .num_rows = rows,
                      .out_features = out,
                      .in_features = in},
                     splits, stream_);
  };
  EXPECT_EQ(run(1, 16, 16, 0), cudaSuccess);
  EXPECT_EQ(run(0, 16, 16, 0), cudaSuccess);
  EXPECT_EQ(run(1, 15, 16, 0), cudaSuccess);
  EXPECT_EQ(run(1, 16, 12, 0), cudaErrorNotSupported);
  EXPECT_EQ(run(1, 16, 16, 1), cudaErrorNotSupported);
  EXPECT_EQ(run(1, 0, 16, 0), cudaErrorNotSupported);
  EXPECT_EQ(run(1, 16, 16, 0, 4), cudaErrorNotSupported);
  CHECK_CUDA(cudaStreamSynchronize(stream_));
}

}  // namespace
}  // namespace spl::kernels::cuda
