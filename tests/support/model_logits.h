// Logits of a whole model for a fixed prompt, to compare two ways of loading its weights.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "services/engine/engine.h"

namespace spl::test {

// [100, vocab] for 100 ids below 300. Empty after an error, which is a failure.
inline std::vector<float> Logits(std::shared_ptr<const engine::Model> model, int num_threads = 2) {
  auto generator = engine::LocalGenerator::Create(
      std::move(model), {.executor = {.num_threads = num_threads, .max_rows = 64}, .max_tokens = 256});
  EXPECT_TRUE(generator.ok()) << generator.status();
  if (!generator.ok()) return {};
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < 100; ++i) ids.push_back(i * 37 % 300);
  auto logits = (*generator)->AllLogits(ids);
  EXPECT_TRUE(logits.ok()) << logits.status();
  return logits.ok() ? *std::move(logits) : std::vector<float>();
}

}  // namespace spl::test
