// gemm_cuda_bench [part of a shape's name]
// gemm_cuda_bench fp8|tilings|int4|adds [part of a shape's name]
//
// Times products of few rows: the skinny GEMM beside cuBLASLt's choice. With fp8: products with an FP8 weight (a scale
// per channel, and per 128 columns) beside cuBLASLt's with the same weight in bf16; with tilings: each tiling of sm_90;
// with int4: products with an int4 weight (groups of 128 and of 32 columns) beside the FP8 one; with adds: cuBLASLt's
// product in bf16, the same added to y, and the split one with two and three blocks.
// "alone" is the median of event-timed launches, each on another copy of the weight, so that none is in the L2 cache;
// "chain" is a recorded graph of launches over all copies, per product, as launches that overlap do in a decode step.
// Random data.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "kernels/cuda/check_cuda.h"
#include "kernels/cuda/cuda_memory.h"
#include "kernels/gemm/fp8_gemm_cuda.h"
#include "kernels/gemm/gemm_cuda.h"
#include "kernels/gemm/int4_gemm_cuda.h"
#include "kernels/gemm/skinny_gemm_cuda.h"
#include "kernels/gemm/split_gemm_cuda.h"

namespace spl::kernels::cuda {
namespace {

struct Shape {
  const char* name;
  int64_t out, in;
};

constexpr size_t kWorkspaceBytes = 64 << 20;
constexpr size_t kResidentBytes = size_t{1} << 30;  // bytes of all copies of a weight: many times the L2 cache

constexpr Fp8Tiling kTilings[] = {{16, 1},  {16, 2},  {16, 4},  {16, 8},  {32, 1}, {32, 2}, {32, 4},
                                  {32, 8},  {64, 0},  {64, 1},  {64, 2},  {64, 4}, {64, 8}, {128, 0},
                                  {128, 1}, {128, 2}, {128, 4}, {128, 8}, {256, 0}};

std::unique_ptr<Buffer> RandomBf16(int64_t count) {
  static const std::vector<uint16_t> values = [] {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<uint16_t> v(size_t{1} << 22);
    for (uint16_t& x : v) {
      const float f = normal(random);
      uint32_t bits;
      std::memcpy(&bits, &f, 4);
      x = static_cast<uint16_t>(bits >> 16);
    }
    return v;
  }();
  auto buffer = AllocateDevice(static_cast<size_t>(count) * 2).value();
  for (int64_t done = 0; done < count;) {
    const int64_t n = std::min<int64_t>(count - done, static_cast<int64_t>(values.size()));
    CHECK_CUDA(cudaMemcpy(static_cast<uint16_t*>(buffer->data()) + done, values.data(), static_cast<size_t>(n) * 2,
                          cudaMemcpyHostToDevice));
    done += n;
  }
  return buffer;
}

// Codes of small normal values: bytes with an exponent of 3 to 10 of 15.
std::unique_ptr<Buffer> RandomCodes(int64_t count) {
  std::vector<uint8_t> codes(static_cast<size_t>(count));
  std::mt19937 random(2);
  for (uint8_t& code : codes) {
    const uint32_t bits = random();
    code = static_cast<uint8_t>((bits & 0x87) | (3 + (bits >> 8) % 8) << 3);
  }
  auto buffer = AllocateDevice(codes.size()).value();
  CHECK_CUDA(cudaMemcpy(buffer->data(), codes.data(), codes.size(), cudaMemcpyHostToDevice));
  CHECK_CUDA(ArrangeFp8Codes(buffer->data(), count, nullptr));
  return buffer;
}

float Median(std::vector<float> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

class Bench {
 public:
  Bench() : plans_(false) {
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    if (cublasLtCreate(&handle_) != CUBLAS_STATUS_SUCCESS) std::exit(1);
    workspace_ = AllocateDevice(kWorkspaceBytes).value();
    for (cudaEvent_t& event : events_) CHECK_CUDA(cudaEventCreate(&event));
  }

  void Run(const Shape& s, const std::vector<int64_t>& row_counts) {
    const size_t bytes = static_cast<size_t>(s.out * s.in) * 2;
    const size_t copies = std::clamp<size_t>(kResidentBytes / bytes, 2, 64);
    std::vector<std::unique_ptr<DeviceWeight>> weights;
    for (size_t i = 0; i < copies; ++i)
      weights.push_back(std::make_unique<DeviceWeight>(RandomBf16(s.out * s.in), DType::kBF16, s.out, s.in));
    for (const int64_t rows : row_counts) {
      const auto x = RandomBf16(rows * s.in);
      const auto y = AllocateDevice(static_cast<size_t>(rows * s.out) * 4).value();
      const auto cublas = [&](size_t i) {
        const LinearArgs args{.x = {x->data(), DType::kBF16},
                              .weight = weights[i].get(),
                              .y = {y->data(), DType::kF32},
                              .num_rows = rows};
        const absl::Status status = plans_.Multiply({handle_, workspace_->data(), kWorkspaceBytes, stream_}, args);
        if (!status.ok()) std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
      };
      const auto skinny = [&](size_t i) {
        CHECK_CUDA(SkinnyGemm({.x = x->data(),
                               .w = weights[i]->data(),
                               .y = y->data(),
                               .num_rows = rows,
                               .out_features = s.out,
                               .in_features = s.in},
                              stream_));
      };
      const double moved =
          static_cast<double>(bytes) + 2.0 * static_cast<double>(rows * s.in) + 4.0 * static_cast<double>(rows * s.out);
      const float t[4] = {Alone(skinny, copies), Chain(skinny, copies), Alone(cublas, copies), Chain(cublas, copies)};
      std::printf(
          "%-16s rows %2ld  skinny alone %7.2f us %5.2f TB/s  chain %7.2f us %5.2f TB/s | cublasLt %7.2f  %7.2f us\n",
          s.name, rows, t[0], moved / t[0] * 1e-6, t[1], moved / t[1] * 1e-6, t[2], t[3]);
      std::fflush(stdout);
    }
  }

  // Prints products that are written to y or added to it.
  void RunAdds(const Shape& s, const std::vector<int64_t>& row_counts) {
    const size_t copies = std::clamp<size_t>(kResidentBytes / static_cast<size_t>(s.out * s.in * 2), 2, 16);
    std::vector<std::unique_ptr<DeviceWeight>> weights;
    for (size_t i = 0; i < copies; ++i)
      weights.push_back(std::make_unique<DeviceWeight>(RandomBf16(s.out * s.in), DType::kBF16, s.out, s.in));
    for (const int64_t rows : row_counts) {
      const auto x = RandomBf16(rows * s.in);
      const auto y = AllocateDevice(static_cast<size_t>(rows * s.out) * 4).value();
      CHECK_CUDA(cudaMemset(y->data(), 0, y->size()));
      const auto cublas = [&](bool add) {
        return Chain(
            [&](size_t i) {
              const LinearArgs args{.x = {x->data(), DType::kBF16},
                                    .weight = weights[i].get(),
                                    .y = {y->data(), DType::kF32},
                                    .num_rows = rows};
              const absl::Status status =
                  plans_.Multiply({handle_, workspace_->data(), kWorkspaceBytes, stream_}, args, add);
              if (!status.ok()) std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
            },
            copies);
      };
      const auto split = [&](int splits) {
        return Chain(
            [&](size_t i) {
              CHECK_CUDA(SplitGemm({.x = x->data(),
                                    .weight = weights[i]->data(),
                                    .y = static_cast<float*>(y->data()),
                                    .add = true,
                                    .num_rows = rows,
                                    .out_features = s.out,
                                    .in_features = s.in},
                                   splits, stream_));
            },
            copies);
      };
      std::printf("%-12s rows %5ld  cuBLASLt %8.2f us | added %8.2f | split in two %8.2f | in three %8.2f\n", s.name,
                  rows, cublas(false), cublas(true), split(2), split(3));
      std::fflush(stdout);
    }
  }

  // Prints the products of one FP8 weight: each of `tilings`, or the one that is chosen.
  void RunFp8(const Shape& s, const std::vector<int64_t>& row_counts, std::span<const Fp8Tiling> tilings) {
    const size_t copies = std::clamp<size_t>(kResidentBytes / static_cast<size_t>(s.out * s.in), 2, 16);
    std::vector<std::unique_ptr<Buffer>> codes;
    std::vector<std::unique_ptr<DeviceWeight>> weights;
    for (size_t i = 0; i < copies; ++i) {
      codes.push_back(RandomCodes(s.out * s.in));
      weights.push_back(std::make_unique<DeviceWeight>(RandomBf16(s.out * s.in), DType::kBF16, s.out, s.in));
    }
    const std::vector<float> ones(static_cast<size_t>(s.out * ((s.in + kFp8Group - 1) / kFp8Group)), 1.0f);
    auto scales = AllocateDevice(ones.size() * 4).value();
    CHECK_CUDA(cudaMemcpy(scales->data(), ones.data(), ones.size() * 4, cudaMemcpyHostToDevice));
    for (const int64_t rows : row_counts) {
      const auto x = RandomBf16(rows * s.in);
      const auto y = AllocateDevice(static_cast<size_t>(rows * s.out) * 2).value();
      const auto of = [&](const std::function<cudaError_t(const Fp8GemmArgs&)>& product, int64_t scale_group) {
        Fp8GemmArgs args{.x = x->data(),
                         .scales = static_cast<const float*>(scales->data()),
                         .scale_group = scale_group,
                         .y = y->data(),
                         .y_dtype = DType::kBF16,
                         .num_rows = rows,
                         .out_features = s.out,
                         .in_features = s.in};
        return Chain(
            [&](size_t i) {
              args.codes = static_cast<const uint8_t*>(codes[i]->data());
              CHECK_CUDA(product(args));
            },
            copies);
      };
      std::printf("%-12s rows %5ld ", s.name, rows);
      for (const auto& [tile_rows, split] : tilings) {
        if ((tile_rows > 2 * rows && tile_rows > 16) || 4 * tile_rows < rows) continue;
        const Fp8Tiling tiling{tile_rows, split};
        const auto tiled = [&](const Fp8GemmArgs& a) { return TiledFp8GemmSm90(a, tiling, stream_); };
        std::printf("| %d/%d %.1f", tile_rows, split, of(tiled, 0));
        if (tile_rows <= 128) std::printf(" %.1f", of(tiled, kFp8Group));
      }
      if (!tilings.empty()) {
        std::printf("\n");
        continue;
      }
      const auto chosen = [&](const Fp8GemmArgs& a) { return Fp8Gemm(a, stream_); };
      const float channels = of(chosen, 0), blocks = of(chosen, kFp8Group);
      const float one_order = of([&](const Fp8GemmArgs& a) { return TiledFp8Gemm(a, stream_); }, 0);
      const float streamed = rows > 64 ? 0 : of([&](const Fp8GemmArgs& a) { return SkinnyFp8Gemm(a, stream_); }, 0);
      const float cublas = Chain(
          [&](size_t i) {
            const LinearArgs args{.x = {x->data(), DType::kBF16},
                                  .weight = weights[i].get(),
                                  .y = {y->data(), DType::kBF16},
                                  .num_rows = rows};
            const absl::Status status = plans_.Multiply({handle_, workspace_->data(), kWorkspaceBytes, stream_}, args);
            if (!status.ok()) std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
          },
          copies);
      const double operations = 2.0 * static_cast<double>(rows * s.out) * static_cast<double>(s.in);
      const double bytes = static_cast<double>(s.out * s.in);
      std::printf(
          " %8.2f us %5.0f TFLOP/s %5.2f TB/s | by blocks %8.2f | streamed %8.2f | deterministic %8.2f | bf16 cuBLASLt "
          "%8.2f, ratio %5.2f\n",
          channels, operations / channels * 1e-6, bytes / channels * 1e-6, blocks, streamed, one_order, cublas,
          channels / cublas);
      std::fflush(stdout);
    }
  }

  // Prints the products of one int4 weight, and the one that is chosen for the same weight in FP8.
  void RunInt4(const Shape& s, const std::vector<int64_t>& row_counts) {
    const size_t copies = std::clamp<size_t>(2 * kResidentBytes / static_cast<size_t>(s.out * s.in), 2, 32);
    std::vector<std::unique_ptr<Buffer>> codes, fp8;
    for (size_t i = 0; i < copies; ++i) {
      codes.push_back(RandomBf16(s.out * s.in / 4));  // any bytes
      fp8.push_back(RandomCodes(s.out * s.in));
    }
    const auto groups = static_cast<size_t>(s.out * ((s.in + 31) / 32));
    const std::vector<float> ones(groups, 1.0f);
    const std::vector<uint8_t> eights(groups, uint8_t{8});
    const auto scales = AllocateDevice(groups * 4).value(), zeros = AllocateDevice(groups).value();
    CHECK_CUDA(cudaMemcpy(scales->data(), ones.data(), groups * 4, cudaMemcpyHostToDevice));
    CHECK_CUDA(cudaMemcpy(zeros->data(), eights.data(), groups, cudaMemcpyHostToDevice));
    for (const int64_t rows : row_counts) {
      const auto x = RandomBf16(rows * s.in);
      const auto y = AllocateDevice(static_cast<size_t>(rows * s.out) * 2).value();
      const auto of = [&](int64_t scale_group, const std::function<cudaError_t(const Int4GemmArgs&)>& product) {
        Int4GemmArgs args{.x = x->data(),
                          .scales = static_cast<const float*>(scales->data()),
                          .zeros = static_cast<const uint8_t*>(zeros->data()),
                          .scale_group = scale_group,
                          .y = y->data(),
                          .y_dtype = DType::kBF16,
                          .num_rows = rows,
                          .out_features = s.out,
                          .in_features = s.in,
                          .workspace = workspace_->data(),
                          .workspace_bytes = kWorkspaceBytes};
        return Chain(
            [&](size_t i) {
              args.codes = static_cast<const uint8_t*>(codes[i]->data());
              CHECK_CUDA(product(args));
            },
            copies);
      };
      const auto chosen = [&](const Int4GemmArgs& a) { return Int4Gemm(a, false, stream_); };
      const auto one_order = [&](const Int4GemmArgs& a) { return Int4Gemm(a, true, stream_); };
      const auto streamed = [&](const Int4GemmArgs& a) { return SkinnyInt4Gemm(a, stream_); };
      Fp8GemmArgs fp8_args{.x = x->data(),
                           .scales = static_cast<const float*>(scales->data()),
                           .y = y->data(),
                           .y_dtype = DType::kBF16,
                           .num_rows = rows,
                           .out_features = s.out,
                           .in_features = s.in};
      const float in_fp8 = Chain(
          [&](size_t i) {
            fp8_args.codes = static_cast<const uint8_t*>(fp8[i]->data());
            CHECK_CUDA(Fp8Gemm(fp8_args, stream_));
          },
          copies);
      const float time = of(128, chosen);
      const double bytes = static_cast<double>(s.out * s.in) * (0.5 + 5.0 / 128);
      std::printf(
          "%-12s rows %5ld  %8.2f us %5.2f TB/s | streamed %8.2f | groups of 32 %8.2f | deterministic %8.2f | fp8 "
          "%8.2f, ratio %5.2f\n",
          s.name, rows, time, bytes / time * 1e-6, rows <= 256 ? of(128, streamed) : 0.0f, of(32, chosen),
          of(128, one_order), in_fp8, time / in_fp8);
      std::fflush(stdout);
    }
  }

 private:
  float Alone(const std::function<void(size_t)>& launch, size_t copies) {
    std::vector<float> us;
    for (int i = 0; i < 24; ++i) {
      CHECK_CUDA(cudaEventRecord(events_[0], stream_));
      launch(static_cast<size_t>(i) % copies);
      CHECK_CUDA(cudaEventRecord(events_[1], stream_));
      CHECK_CUDA(cudaStreamSynchronize(stream_));
      float ms = 0;
      CHECK_CUDA(cudaEventElapsedTime(&ms, events_[0], events_[1]));
      if (i >= 3) us.push_back(ms * 1e3f);
    }
    return Median(us);
  }

  float Chain(const std::function<void(size_t)>& launch, size_t copies) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    CHECK_CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    for (size_t i = 0; i < copies; ++i) launch(i);
    CHECK_CUDA(cudaStreamEndCapture(stream_, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    std::vector<float> us;
    for (int i = 0; i < 7; ++i) {
      CHECK_CUDA(cudaEventRecord(events_[0], stream_));
      CHECK_CUDA(cudaGraphLaunch(exec, stream_));
      CHECK_CUDA(cudaEventRecord(events_[1], stream_));
      CHECK_CUDA(cudaStreamSynchronize(stream_));
      float ms = 0;
      CHECK_CUDA(cudaEventElapsedTime(&ms, events_[0], events_[1]));
      if (i >= 2) us.push_back(ms * 1e3f / static_cast<float>(copies));
    }
    CHECK_CUDA(cudaGraphExecDestroy(exec));
    CHECK_CUDA(cudaGraphDestroy(graph));
    return Median(us);
  }

  GemmPlans plans_;
  cudaStream_t stream_ = nullptr;
  cublasLtHandle_t handle_ = nullptr;
  std::unique_ptr<Buffer> workspace_;
  cudaEvent_t events_[2] = {};
};

int Main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  const bool fp8 = what == "fp8" || what == "tilings" || what == "int4" || what == "adds";
  const std::string filter = argc > 1 + fp8 ? argv[1 + fp8] : "";
  Bench bench;
  if (fp8) {
    for (const Shape& shape : {Shape{"8b qkv", 6144, 4096}, Shape{"8b o", 4096, 4096}, Shape{"8b gate_up", 28672, 4096},
                               Shape{"8b down", 4096, 14336}}) {
      if (std::string(shape.name).find(filter) == std::string::npos) continue;
      if (what == "adds") {
        bench.RunAdds(shape, {33, 40, 64, 80, 96, 128, 192, 256, 512, 2048, 8192});
      } else if (what == "int4") {
        bench.RunInt4(shape, {1, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 2048, 8192});
      } else if (what == "tilings") {
        bench.RunFp8(shape, {16, 32, 64, 128, 256, 512}, kTilings);
      } else {
        bench.RunFp8(shape, {1, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 8192}, {});
      }
    }
    return 0;
  }
  const std::vector<int64_t> all = {1, 2, 4, 8, 12, 16, 20, 24, 28, 32}, few = {1, 8, 16, 24, 32};
  const std::vector<std::pair<Shape, const std::vector<int64_t>*>> cases = {
      {{"8b qkv", 6144, 4096}, &all},       {{"8b o", 4096, 4096}, &all},
      {{"8b gate_up", 28672, 4096}, &all},  {{"8b down", 4096, 14336}, &all},
      {{"8b lm_head", 128256, 4096}, &all}, {{"qwen3 gate_up", 24576, 4096}, &few},
      {{"qwen3 down", 4096, 12288}, &few},  {{"qwen3 lm_head", 151936, 4096}, &few},
      {{"tp2 qkv", 3072, 4096}, &few},      {{"tp4 qkv", 1536, 4096}, &few},
      {{"tp8 qkv", 768, 4096}, &few},       {{"tp2 o", 4096, 2048}, &few},
      {{"tp4 o", 4096, 1024}, &few},        {{"tp8 o", 4096, 512}, &few},
      {{"tp2 gate_up", 14336, 4096}, &few}, {{"tp4 gate_up", 7168, 4096}, &few},
      {{"tp8 gate_up", 3584, 4096}, &few},  {{"tp2 down", 4096, 7168}, &few},
      {{"tp4 down", 4096, 3584}, &few},     {{"tp8 down", 4096, 1792}, &few},
      {{"tiny qkv", 1024, 384}, &few},      {{"tiny o", 384, 512}, &few},
      {{"tiny gate_up", 2048, 384}, &few},  {{"tiny down", 384, 1024}, &few},
      {{"tiny lm_head", 4096, 384}, &few},
  };
  for (const auto& [shape, rows] : cases) {
    if (std::string(shape.name).find(filter) != std::string::npos) bench.Run(shape, *rows);
  }
  return 0;
}

}  // namespace
}  // namespace spl::kernels::cuda

int main(int argc, char** argv) { return spl::kernels::cuda::Main(argc, argv); }
