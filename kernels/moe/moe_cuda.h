// Mixture of experts on a device; the contracts are routing.h's and grouped_linear.h's.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "kernels/common/buffer.h"
#include "kernels/moe/grouped_linear.h"
#include "kernels/moe/routing.h"

namespace spl::kernels::cuda {

// [num_experts, out_features, in_features] in device memory, f32 or bf16.
class DeviceGroupedWeight final : public GroupedWeight {
 public:
  DeviceGroupedWeight(std::unique_ptr<Buffer> memory, const GroupedWeightView& view)
      : GroupedWeight(view), memory_(std::move(memory)), dtype_(view.dtype) {}
  const void* data() const { return memory_->data(); }
  DType dtype() const { return dtype_; }

 private:
  const std::unique_ptr<Buffer> memory_;
  const DType dtype_;
};

// All are asynchronous on `stream` and do not check device memory. cudaErrorNotSupported: element types that do not
// match the weight's, or sizes that are not multiples of 8.
cudaError_t RouteExperts(const RouteExpertsArgs& args, cudaStream_t stream);
cudaError_t GroupedLinear(const GroupedLinearArgs& args, cudaStream_t stream);
cudaError_t CombineExperts(const CombineExpertsArgs& args, cudaStream_t stream);

}  // namespace spl::kernels::cuda
