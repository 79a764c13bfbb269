// Ways in which a CPU multiplies with a weight whose codes have scales (FP8, int4), for tests of each of them.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "tests/kernels/support/kernel_test_util.h"

namespace spl::kernels {

// An instruction set, and whether x is rounded to bf16.
struct ScaledVariant {
  CpuIsa isa;
  bool round_x;
};

// All that this machine has.
inline std::vector<ScaledVariant> ScaledVariants() {
  std::vector<ScaledVariant> variants;
  for (CpuIsa isa : testing::MachineIsas()) variants.push_back({isa, false});
  for (CpuIsa isa : testing::MachineBf16Isas()) variants.push_back({isa, true});
  return variants;
}

class ScaledLinearVariant : public ::testing::TestWithParam<ScaledVariant> {
 protected:
  // Rows as the variant reads them: rounded rows are exact inputs of the reference.
  std::vector<float> Rows(testing::Random& random, int64_t count) {
    std::vector<float> x = random.Normals(count);
    if (GetParam().round_x) {
      for (float& value : x) value = ToFloat(ToBf16(value));
    }
    return x;
  }
};

}  // namespace spl::kernels
