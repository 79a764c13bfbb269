// How many tokens the passes of a worker's model compute, by what they compute.
#pragma once

#include "services/base/metrics.h"
#include "services/engine/runtime/on_pass.h"

namespace spl::wire {

// Observes passes of a prefill or decode engine; both engines of a worker may have one. `metrics` must outlive it.
inline engine::OnPass PassObserver(Metrics& metrics) {
  const auto of = [&](const char* work) {
    return &metrics.Histogram("splice_pass_tokens",
                              "Tokens that a pass of the model computes: of prompts, of decode steps, or of both.",
                              buckets::Tokens(), {{"work", work}});
  };
  return [prompts = of("prompts"), decode = of("decode"), both = of("both")](int32_t prompt_rows, int32_t decode_rows) {
    auto* const work = decode_rows == 0 ? prompts : prompt_rows == 0 ? decode : both;
    work->Observe(prompt_rows + decode_rows);
  };
}

}  // namespace spl::wire
