#pragma once

#include "tests/services/engine/engines_fixture.h"

namespace spl::engine {

// A worker that has seen nothing, and a store that has seen its prompts.
class StoredPromptsTest : public EnginesTest {
 protected:
  // The store has these.
  void StartWithStored(std::span<const std::vector<int32_t>> prompts) {
    options_.store = store_;
    options_.canonical_prefill = false;
    options_.fetch_by_cost = false;
    Start(8192, 8192, options_);
    size_t num_chunks = 0;
    for (const auto& prompt : prompts) {
      auto cold = Submit(prompt, Greedy(6));
      ASSERT_TRUE(cold->Wait() && cold->status.ok()) << cold->status;
      num_chunks += prompt.size() / 64;
      ASSERT_TRUE(store_->WaitForSize(num_chunks));
    }
    options_.fetch_by_cost = true;
    Start(8192, 8192, options_);
  }
  chunk::ChunkKey KeyOf(std::span<const int32_t> prompt, size_t chunk) const {
    return chunk::MakePrefixKeys(model_->kv_fingerprint(), {}, prompt)[chunk];
  }

  std::shared_ptr<FakeStore> store_ = std::make_shared<FakeStore>();
  PrefillEngineOptions options_;
  std::mt19937 random_{23};
};

}  // namespace spl::engine
