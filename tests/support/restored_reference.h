// Tokens of a prompt whose local heads all become global at some output token: what restoring while decoding
// must give, made without it. The sequence keeps everything; only what heads see changes.
#pragma once

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "services/engine/engine.h"
#include "services/engine/methods/recovery_methods.h"
#include "services/engine/runtime/prompt_run.h"
#include "services/engine/runtime/sample_rows.h"
#include "services/engine/selection/head_classes_selector.h"

namespace spl::test {

// `first_token`: the first output token (prefill's counts as 0) that is computed with every head global; -1: none is.
// `classes` null: those of the model's map.
inline std::vector<int32_t> RestoredReference(const std::shared_ptr<const engine::Model>& model,
                                              const engine::ReuseOptions& reuse, const std::vector<int32_t>& prompt,
                                              int64_t first_token, const engine::SamplingParams& sampling,
                                              std::shared_ptr<const engine::StreamClasses> classes = nullptr) {
  const engine::KvShape shape = engine::KvShapeOf(model->config());
  const auto length = static_cast<int64_t>(prompt.size()), num_tokens = sampling.max_tokens;
  auto memory = *engine::AllocateKvMemory(*model, engine::PagesForTokens(model->config(), length + num_tokens + 64));
  engine::PagePool pool(memory.pages, model->backends());
  auto executor = *engine::ParallelExecutor::Create(model, memory.pages, {.max_rows = 512});
  auto policy = *engine::MakeRecoveryPolicy(reuse, model->config(), model->head_classes().get());
  engine::SequenceKv kv(pool, shape);
  EXPECT_TRUE(kv.Reserve(length + num_tokens).ok());
  int32_t last_row = 0;
  {
    engine::PromptRun run(prompt, {}, kv, *policy);
    EXPECT_TRUE(run.Begin(*executor).ok());
    while (!run.done()) {
      const engine::PrefillSlice slice = run.Next(executor->max_rows());
      EXPECT_TRUE(executor->Prefill({&slice, 1}, run.layers()).ok());
      EXPECT_TRUE(run.Finish(*executor).ok());
      last_row = static_cast<int32_t>(slice.tokens.size()) - 1;
    }
  }
  EXPECT_TRUE(executor->ComputeLogits({&last_row, 1}).ok());
  engine::Sampler sampler(sampling, model->config().eos_ids, 0, prompt, {}, length, model->config().max_positions);
  engine::Sampler* const samplers[] = {&sampler};
  engine::RowSampler rows;
  std::vector<int32_t> tokens = {(*rows.Sample(*executor, samplers))[0].token};
  if (classes == nullptr) classes = engine::ServedClasses(*model->head_classes());
  std::vector<int32_t> all(static_cast<size_t>(shape.num_streams()));
  std::iota(all.begin(), all.end(), 0);
  engine::HeadClassesSelector local(model->config(), classes);
  engine::HeadClassesSelector global(model->config(), engine::WithRestored(classes, all));
  for (int64_t i = 1; i < num_tokens; ++i) {
    engine::TokenSelector* const selector =
        first_token >= 0 && i >= first_token ? static_cast<engine::TokenSelector*>(&global) : &local;
    const engine::DecodeRow row{tokens.back(), &kv, selector};
    EXPECT_TRUE(executor->Decode({&row, 1}).ok());
    kv.set_num_tokens(kv.num_tokens() + 1);
    tokens.push_back((*rows.Sample(*executor, samplers))[0].token);
  }
  return tokens;
}

}  // namespace spl::test
