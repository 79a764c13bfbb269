// A token drawn from logits that a test makes up, without an executor.
#pragma once

#include <gtest/gtest.h>

#include <span>
#include <vector>

#include "kernels/sampling/sample_tokens.h"
#include "services/engine/runtime/sampler.h"

namespace spl::test {

inline engine::SampledToken SampleOnHost(engine::Sampler& sampler, std::span<const float> logits) {
  const kernels::SampleRow row = sampler.Row(0);
  kernels::SampledRow out;
  std::vector<kernels::TopToken> top(static_cast<size_t>(std::max(row.num_top, 0)));
  const absl::Status status =
      kernels::cpu::SampleTokens({.isa = kernels::DetectCpuIsa()}, {.logits = logits.data(),
                                                                    .num_logit_rows = 1,
                                                                    .width = static_cast<int64_t>(logits.size()),
                                                                    .rows = {&row, 1},
                                                                    .out = &out,
                                                                    .top = top.data(),
                                                                    .top_stride = static_cast<int32_t>(top.size())});
  EXPECT_TRUE(status.ok()) << status;
  return sampler.Take(out, top);
}

}  // namespace spl::test
