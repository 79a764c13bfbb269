// The f32 forms of a CPU weight; gemm_bf16_cpu.h has the bf16 form, gemm_fp8_cpu.h
// the FP8 form, gemm_int4_cpu.h the int4 form. gemm_cpu.cc chooses between them; tests make any.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "kernels/gemm/gemm.h"
#include "kernels/gemm/onednn.h"

namespace spl::kernels::cpu {

// A weight that oneDNN multiplies.
class OneDnnWeight final : public LinearWeight {
 public:
  OneDnnWeight(const WeightView& w, std::unique_ptr<OneDnnMatrix> matrix)
      : LinearWeight(w.out_features, w.in_features), matrix(std::move(matrix)) {}

  const std::unique_ptr<OneDnnMatrix> matrix;
};

// Panels of 64 columns, f32: [ceil(out_features / 64), in_features, 64], zero past out_features.
class PanelWeight final : public LinearWeight {
 public:
  explicit PanelWeight(const WeightView& w);

  const float* panel(int64_t index) const { return panels_.data() + index * in_features() * 64; }

 private:
  std::vector<float> panels_;
};

}  // namespace spl::kernels::cpu
