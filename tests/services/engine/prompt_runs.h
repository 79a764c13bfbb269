// What the tests of prefill methods share: memory in which KV that nobody wrote shows, and prompts run to their end.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "services/engine/cache/kv_memory.h"
#include "services/engine/model/model.h"
#include "services/engine/runtime/prompt_run.h"

namespace spl::engine {

// NaN everywhere.
inline void Poison(const Model& model, const KvMemory& memory) {
  for (size_t r = 0; r < memory.buffers.size(); ++r) {
    const std::vector<std::byte> nan(memory.buffers[r]->size(), std::byte{0xff});
    ASSERT_TRUE(model.rank(static_cast<int>(r))
                    .backend()
                    .Copy(kernels::CopyKind::kUpload, memory.buffers[r]->data(), nan.data(), nan.size())
                    .ok());
  }
}

// In passes of at most `room` rows. The logits behind the prompt; none after an error, which is a failure.
inline std::vector<float> RunToEnd(PromptRun& run, ParallelExecutor& executor, int32_t room) {
  EXPECT_TRUE(run.Begin(executor).ok());
  int32_t last_row = 0;
  while (!run.done()) {
    const PrefillSlice slice = run.Next(room);
    last_row = static_cast<int32_t>(slice.tokens.size()) - 1;
    const absl::Status status = executor.Prefill({&slice, 1}, run.layers());
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_TRUE(run.Finish(executor).ok());
    if (!status.ok()) return {};
  }
  EXPECT_TRUE(executor.ComputeLogits({&last_row, 1}).ok());
  const auto logits = executor.Logits();
  EXPECT_TRUE(logits.ok());
  return {logits->begin(), logits->end()};
}

}  // namespace spl::engine
