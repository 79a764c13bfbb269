// Matrix products on a device through cuBLASLt; the contract is gemm.h's.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "kernels/common/buffer.h"
#include "kernels/gemm/gemm.h"

namespace spl::kernels::cuda {

// Row-major [out_features, in_features] in device memory, f32 or bf16. `add_rows`: PrefersAdd from so many rows on.
class DeviceWeight final : public LinearWeight {
 public:
  DeviceWeight(std::unique_ptr<Buffer> memory, DType dtype, int64_t out_features, int64_t in_features,
               int64_t add_rows = INT64_MAX)
      : LinearWeight(out_features, in_features), memory_(std::move(memory)), dtype_(dtype), add_rows_(add_rows) {}
  bool PrefersAdd(int64_t num_rows) const override { return num_rows >= add_rows_; }
  const void* data() const { return memory_->data(); }
  DType dtype() const { return dtype_; }

 private:
  const std::unique_ptr<Buffer> memory_;
  const DType dtype_;
  const int64_t add_rows_;
};

// Whether cuBLASLt multiplies e4m3 with e4m3 on the current device, with scales of rows and channels, or of blocks:
// version 12.9 or later, on Hopper.
bool MultipliesE4M3();
// Scales of 128 x 128 blocks as these products read them: [ceil(out / 128)][ceil(in / 128), rounded up to four]. Empty:
// the rows of some block have different scales. REQUIRES: view.scale_group is 128.
std::vector<float> BlockScales(const WeightView& view);

struct GemmContext {
  cublasLtHandle_t handle = nullptr;
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
  cudaStream_t stream = nullptr;
};

// Keeps the descriptors and the chosen algorithm of each shape. Any thread may call.
class GemmPlans {
 public:
  explicit GemmPlans(bool deterministic);
  ~GemmPlans();
  GemmPlans(const GemmPlans&) = delete;
  GemmPlans& operator=(const GemmPlans&) = delete;

  // y = x Wᵀ, or with `add` y += x Wᵀ. x has the weight's type (f32 in full f32, or bf16 with f32 accumulation, or
  // e4m3); y has that type or f32, with e4m3 f32 or bf16. The bias is not added here. Asynchronous on ctx.stream. The
  // last bits of a row's result may depend on num_rows, because cuBLASLt chooses its algorithm by the shape, for
  // RowsOfChoice(num_rows) rows (rows_of_choice.h). With `deterministic`, every number of rows uses the algorithm for
  // kDeterministicRows rows.
  //
  // e4m3: a DeviceFp8Weight. With a scale for each channel Hopper's tensor cores add some 14 bits of a sum ("fast
  // accumulation"): results are 1e-3 to 3e-3 off in relative L2, a tenth of what rounding x to e4m3 costs. Sums in f32
  // take 1.2 times as long (docs/results/2026-11-26-fp8-prompts.md); with scales of blocks there are only these.
  absl::Status Multiply(const GemmContext& ctx, const LinearArgs& args, bool add = false);

 private:
  struct Plan;
  // A weight as cuBLASLt sees it.
  struct Matrix {
    const void* data;
    DType dtype;
    const float* scales;  // kE4M3
    bool blocks;          // scales are of blocks
  };
  static Matrix MatrixOf(const LinearWeight& weight);
  using Key = std::array<int64_t, 4>;  // rows, out, in, element types
  static Key KeyOf(const LinearArgs& args, int64_t num_rows);
  // plan.algorithm: the one for `rows` rows, if it serves the plan's number.
  cublasStatus_t Choose(const GemmContext& ctx, const LinearArgs& args, int64_t rows,
                        cublasLtMatmulPreference_t preference, Plan& plan);
  absl::Status Make(const GemmContext& ctx, const LinearArgs& args, Plan& plan);

  static constexpr int64_t kDeterministicRows = 512;
  const bool deterministic_;
  std::mutex mutex_;                                // guards the two below
  std::map<Key, cublasLtMatmulAlgo_t> algorithms_;  // by the number of rows that was asked for
  std::map<Key, std::unique_ptr<Plan>> plans_;
};

// y[i, j] += bias[j]. y is f32 or bf16.
cudaError_t AddBias(const LinearArgs& args, cudaStream_t stream);

}  // namespace spl::kernels::cuda
