// experts_cuda_bench
//
// Times the products of a layer's experts (the shape of Qwen3-30B-A3B: 128 experts of 768, 8 for each row) in bf16, FP8
// (a scale per channel) and int4 (groups of 128 columns), with a cold L2 cache: microseconds, the rate at which the
// weights of experts with rows are read, and the rate of the arithmetic. Rows go to random experts.
#include <numeric>
#include <random>

#include "kernels/cuda/cuda_bench_util.h"
#include "kernels/cuda/cuda_memory.h"
#include "kernels/gemm/fp8_gemm_cuda.h"
#include "kernels/gemm/int4_gemm_cuda.h"
#include "kernels/moe/moe_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int32_t kExperts = 128, kTop = 8;

struct Routes {
  std::vector<int32_t> rows, offsets = {0};
  int experts_with_rows = 0;
};

Routes Route(std::mt19937& random, int64_t num_rows) {
  std::vector<std::vector<int32_t>> of_expert(kExperts);
  std::vector<int32_t> order(kExperts);
  std::iota(order.begin(), order.end(), 0);
  for (int32_t row = 0; row < num_rows; ++row) {
    std::shuffle(order.begin(), order.end(), random);
    for (int32_t k = 0; k < kTop; ++k) of_expert[order[k]].push_back(row);
  }
  Routes routes;
  for (const auto& rows : of_expert) {
    routes.rows.insert(routes.rows.end(), rows.begin(), rows.end());
    routes.offsets.push_back(static_cast<int32_t>(routes.rows.size()));
    routes.experts_with_rows += !rows.empty();
  }
  return routes;
}

std::unique_ptr<Buffer> Random(int64_t bytes) {
  auto buffer = AllocateDevice(static_cast<size_t>(bytes)).value();
  FillNormal<<<2048, 256>>>(static_cast<__nv_bfloat16*>(buffer->data()), bytes / 2, 5);
  return buffer;
}

std::unique_ptr<DeviceGroupedWeight> Weight(DType dtype, int64_t out, int64_t in) {
  GroupedWeightView view{.dtype = dtype, .num_experts = kExperts, .out_features = out, .in_features = in};
  auto memory = Random(kExperts * out * DTypeRowBytes(dtype, in));
  if (dtype == DType::kBF16) return std::make_unique<DeviceGroupedWeight>(std::move(memory), nullptr, view);
  if (dtype == DType::kInt4) view.scale_group = 128;
  const std::vector<float> scales(static_cast<size_t>(kExperts * out * view.expert(0).num_scale_groups()), 0.01f);
  view.scales = scales.data();
  const std::vector<uint32_t> factors = ExpertFactors(view);
  auto uploaded = AllocateDevice(factors.size() * sizeof(uint32_t)).value();
  CHECK_CUDA(cudaMemcpy(uploaded->data(), factors.data(), uploaded->size(), cudaMemcpyHostToDevice));
  return std::make_unique<DeviceGroupedWeight>(std::move(memory), std::move(uploaded), view);
}

void Run(const char* name, int64_t out, int64_t in, bool gather) {
  std::mt19937 random(1);
  for (const DType dtype : {DType::kBF16, DType::kE4M3, DType::kInt4}) {
    const auto weight = Weight(dtype, out, in);
    for (const int64_t rows : {1, 4, 8, 32, 128, 512, 2048, 8192}) {
      const Routes routes = Route(random, rows);
      const int64_t places = rows * kTop;
      const auto x = Random((gather ? rows : places) * in * 2);
      const auto y = AllocateDevice(static_cast<size_t>(places * out) * 4).value();
      int32_t* const row_ids = Upload(routes.rows);
      int32_t* const offsets = Upload(routes.offsets);
      const GroupedLinearArgs args{.x = {x->data(), DType::kBF16},
                                   .num_x_rows = gather ? rows : places,
                                   .rows = gather ? row_ids : nullptr,
                                   .offsets = offsets,
                                   .weight = weight.get(),
                                   .y = {y->data(), DType::kF32},
                                   .num_places = places};
      const double us = 1e3 * MedianMs(20, [&] { CHECK_CUDA(GroupedLinear(args, nullptr)); });
      const double bytes = double(routes.experts_with_rows) * double(out) * double(DTypeRowBytes(dtype, in));
      std::printf("%-8s %-5s rows %5ld  experts %3d  %8.2f us  %5.2f TB/s of weights  %6.1f TFLOP/s\n", name,
                  std::string(DTypeName(dtype)).c_str(), static_cast<long>(rows), routes.experts_with_rows, us,
                  bytes / us * 1e-6, 2.0 * double(places) * double(out) * double(in) / us * 1e-6);
      std::fflush(stdout);
      CHECK_CUDA(cudaFree(row_ids));
      CHECK_CUDA(cudaFree(offsets));
    }
  }
}

}  // namespace
}  // namespace spl::kernels::cuda

int main() {
  using namespace spl::kernels::cuda;
  AllocateFlushBuffer();
  std::printf("plain reading of 1 GiB: %.2f TB/s\n", ReadRate(int64_t{1} << 30) * 1e-12);
  Run("gate_up", 2 * 768, 2048, true);
  Run("down", 2048, 768, false);
}
