// Mixture of experts on a device; the contracts are routing.h's and grouped_linear.h's.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/common/buffer.h"
#include "kernels/moe/grouped_linear.h"
#include "kernels/moe/routing.h"

namespace spl::kernels::cuda {

// [num_experts, out_features, in_features] in device memory: f32, bf16, or codes of e4m3 or int4, arranged
// (ArrangeFp8Codes, ArrangeInt4Codes).
class DeviceGroupedWeight final : public GroupedWeight {
 public:
  // factors: ExpertFactors of codes, else null.
  DeviceGroupedWeight(std::unique_ptr<Buffer> memory, std::unique_ptr<Buffer> factors, const GroupedWeightView& view)
      : GroupedWeight(view),
        memory_(std::move(memory)),
        factors_(std::move(factors)),
        dtype_(view.dtype),
        scale_group_(view.scale_group) {}
  const void* data() const { return memory_->data(); }
  const void* factors() const { return factors_ == nullptr ? nullptr : factors_->data(); }
  DType dtype() const { return dtype_; }
  int64_t scale_group() const { return scale_group_; }

 private:
  const std::unique_ptr<Buffer> memory_, factors_;
  const DType dtype_;
  const int64_t scale_group_;
};

// True for experts in codes that a product takes: e4m3 with scales for 128 columns or a whole row (0), int4 with scales
// for 32, 64, a multiple of 128 columns or a whole row.
bool AreExpertCodesServed(const GroupedWeightView& w);
// Makes what a product needs beside the codes, with the features of a scale group side by side:
// [num_experts, groups, out_features] of a scale (kE4M3), or of a scale and an Int4Zero (kInt4). In host memory.
std::vector<uint32_t> ExpertFactors(const GroupedWeightView& w);

// All are asynchronous on `stream` and do not check device memory. cudaErrorNotSupported: element types that do not
// match the weight's, or sizes that are not multiples of 8.
cudaError_t RouteExperts(const RouteExpertsArgs& args, cudaStream_t stream);
cudaError_t GroupedLinear(const GroupedLinearArgs& args, cudaStream_t stream);
cudaError_t CombineExperts(const CombineExpertsArgs& args, cudaStream_t stream);

// GroupedLinear of weights in bf16, e4m3 and int4; x is bf16.
cudaError_t TiledGroupedLinear(const GroupedLinearArgs& args, cudaStream_t stream);

}  // namespace spl::kernels::cuda
