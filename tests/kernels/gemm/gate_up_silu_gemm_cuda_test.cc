// The product of gate and up with SiLU in it on a Hopper device, against double precision on the host, against itself
// bit by bit for every number of rows, and in chains of launches that overlap. Skips without such a device.
//
// Memory that must not be read or written is NaN, or checked to be NaN still: rows of x past the last, the end of the
// weight, rows of out past the last.
#include "kernels/gemm/gate_up_silu_gemm_cuda.h"

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

class GateUpSiluGemmTest : public testing::HopperStreamTest {};

struct Problem {
  Problem(int64_t max_rows, int64_t width, int64_t in)
      : width(width), in(in), random(static_cast<uint64_t>(width * 31 + in)) {
    x = FastNormals(random, max_rows * in);
    w = FastNormals(random, 2 * width * in, 1.5f / std::sqrt(static_cast<float>(in)));
    std::vector<uint16_t> padded = w;
    padded.insert(padded.end(), 4096, kNaN);
    w_device = std::make_unique<DeviceBuffer<uint16_t>>(padded);
  }

  // Rows [first, first + rows) of x; NaN lies behind them.
  std::vector<uint16_t> Run(int64_t first, int64_t rows, cudaStream_t stream) const {
    std::vector<uint16_t> part(x.begin() + first * in, x.begin() + (first + rows) * in);
    part.resize(static_cast<size_t>(in * (rows + 8)), kNaN);
    const DeviceBuffer<uint16_t> x_device(part);
    const DeviceBuffer<uint16_t> out(std::vector<uint16_t>(static_cast<size_t>((rows + 2) * width), kNaN));
    CHECK_CUDA(GateUpSiluGemm({.x = x_device.get(),
                               .weight = w_device->get(),
                               .out = out.get(),
                               .num_rows = rows,
                               .width = width,
                               .in_features = in},
                              stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    std::vector<uint16_t> values = out.Read();
    for (int64_t j = rows * width; j < (rows + 2) * width; ++j) EXPECT_EQ(values[j], kNaN) << "past the last row";
    values.resize(static_cast<size_t>(rows * width));
    return values;
  }

  double Want(int64_t row, int64_t feature) const {
    double gate = 0, up = 0;
    for (int64_t k = 0; k < in; ++k) {
      const double value = FromBits(x[row * in + k]);
      gate += value * FromBits(w[feature * in + k]);
      up += value * FromBits(w[(width + feature) * in + k]);
    }
    return gate / (1 + std::exp(-gate)) * up;
  }

  int64_t width, in;
  uint64_t random;
  std::vector<uint16_t> x, w;
  std::unique_ptr<DeviceBuffer<uint16_t>> w_device;
};

// Tiles that end in the middle, fewer steps than stages, an odd number of tiles either way, and both widths of a tile.
const std::vector<std::array<int64_t, 2>> kShapes = {{8, 8},      {112, 64},   {120, 72},   {128, 320},
                                                     {1000, 200}, {2296, 136}, {360, 4096}, {14336, 192}};

TEST_F(GateUpSiluGemmTest, IsSiluMulOfTheProduct) {
  for (const auto& [width, in] : kShapes) {
    const Problem p(700, width, in);
    for (const int64_t rows : {1, 100, 128, 129, 257, 384, 700}) {
      const std::vector<uint16_t> got = p.Run(0, rows, stream_);
      const int64_t step = std::max<int64_t>(1, rows * width * in / 10'000'000) * 2 - 1;
      double error = 0, size = 0;
      for (int64_t i = 0; i < rows * width; i += step) {
        const double want = p.Want(i / width, i % width), value = FromBits(got[i]);
        // A product of two sums in f32, rounded to bf16.
        ASSERT_NEAR(value, want, std::abs(want) / 256 + 1e-4) << width << " x " << in << ", " << rows << " rows: " << i;
        error += (value - want) * (value - want);
        size += want * want;
      }
      EXPECT_LT(std::sqrt(error / size), 2.5e-3) << width << " x " << in << ", " << rows << " rows";
    }
  }
}

TEST_F(GateUpSiluGemmTest, RowsDoNotDependOnTheOtherRows) {
  constexpr int64_t kMaxRows = 2200;  // two bands of row tiles
  for (const auto& [width, in] : kShapes) {
    const Problem p(kMaxRows, width, in);
    const std::vector<uint16_t> all = p.Run(0, kMaxRows, stream_);
    for (const int64_t rows : {1, 127, 129, 300, 512, 1024}) {
      for (const int64_t first : {int64_t{0}, int64_t{77}, kMaxRows - rows}) {
        const std::vector<uint16_t> some = p.Run(first, rows, stream_);
        EXPECT_EQ(0, std::memcmp(some.data(), all.data() + first * width, some.size() * sizeof(uint16_t)))
            << width << " x " << in << ", rows " << first << " to " << first + rows;
      }
    }
  }
}

// Products that read what the one before wrote, and write what the one before that read, launched without a pause in
// between: the same bits as one at a time, launched or replayed.
TEST_F(GateUpSiluGemmTest, OverlappingLaunchesWaitForTheirInput) {
  constexpr int64_t kWidth = 1536, kMaxRows = 300;
  constexpr int kLinks = 6;
  uint64_t random = 3;
  const DeviceBuffer<uint16_t> w(
      FastNormals(random, 2 * kWidth * kWidth, 1.3f / std::sqrt(static_cast<float>(kWidth))));
  const std::vector<uint16_t> x = FastNormals(random, kMaxRows * kWidth);
  DeviceBuffer<uint16_t> a(x), b(x);
  for (const int64_t rows : {int64_t{100}, kMaxRows}) {
    const auto link = [&](int i) {
      CHECK_CUDA(GateUpSiluGemm({.x = i % 2 == 0 ? a.get() : b.get(),
                                 .weight = w.get(),
                                 .out = i % 2 == 0 ? b.get() : a.get(),
                                 .num_rows = rows,
                                 .width = kWidth,
                                 .in_features = kWidth},
                                stream_));
    };
    a.Write(x);
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
      ASSERT_EQ(a.Read(), want) << rows << " rows, repeat " << repeat;
    }
    CHECK_CUDA(cudaGraphExecDestroy(exec));
    CHECK_CUDA(cudaGraphDestroy(graph));
  }
}

TEST_F(GateUpSiluGemmTest, SaysWhatItDoesNotServe) {
  const DeviceBuffer<uint16_t> x(std::vector<uint16_t>(4096)), w(std::vector<uint16_t>(4096)),
      out(std::vector<uint16_t>(4096));
  const auto run = [&](int64_t rows, int64_t width, int64_t in, int shift) {
    return GateUpSiluGemm({.x = x.get() + shift,
                           .weight = w.get(),
                           .out = out.get(),
                           .num_rows = rows,
                           .width = width,
                           .in_features = in},
                          stream_);
  };
  EXPECT_EQ(run(1, 16, 16, 0), cudaSuccess);
  EXPECT_EQ(run(0, 16, 16, 0), cudaSuccess);
  EXPECT_EQ(run(1, 16, 12, 0), cudaErrorNotSupported);
  EXPECT_EQ(run(1, 12, 16, 0), cudaErrorNotSupported);
  EXPECT_EQ(run(1, 16, 16, 1), cudaErrorNotSupported);
  EXPECT_EQ(run(1, 0, 16, 0), cudaErrorNotSupported);
  CHECK_CUDA(cudaStreamSynchronize(stream_));
}

}  // namespace
}  // namespace spl::kernels::cuda
