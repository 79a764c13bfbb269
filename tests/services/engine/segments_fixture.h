// Small random models on every kind of device, prompts run through them by any policy, and sources made of their KV:
// what the tests of reuse share. What the models say does not matter, only that two ways to it agree.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "services/engine/engine.h"
#include "services/engine/methods/recovery_methods.h"
#include "services/engine/runtime/prompt_run.h"
#include "tests/services/engine/prompt_runs.h"
#include "tests/support/engine_devices.h"
#include "tests/support/seeded_random.h"

namespace spl::engine {

using Tokens = std::vector<int32_t>;
using test::RandomTokens;
using test::SeededRandom;

// `more`: further fields, each behind a comma. A Llama, unless they name another architecture.
inline std::string Config(const std::string& more, int num_layers = 4) {
  const bool named = more.find("architectures") != std::string::npos;
  return std::string(named ? "{" : R"({"architectures":["LlamaForCausalLM"],)") +
         R"("hidden_size":64,"intermediate_size":96,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":16,
    "vocab_size":512,"max_position_embeddings":8192,"rms_norm_eps":1e-5,"tie_word_embeddings":true,"eos_token_id":1,
    "torch_dtype":"float32","num_hidden_layers":)" +
         std::to_string(num_layers) + more + "}";
}

inline const char* const kLlama3Scaling =
    R"(,"rope_scaling":{"rope_type":"llama3","factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0,
        "original_max_position_embeddings":1024})";
inline const char* const kYarnScaling =
    R"(,"rope_scaling":{"rope_type":"yarn","factor":4.0,"original_max_position_embeddings":2048})";

inline int32_t Between(std::mt19937& random, int32_t low, int32_t high) {
  return std::uniform_int_distribution<int32_t>(low, high)(random);
}

struct Result {
  std::shared_ptr<SequenceKv> kv;
  std::vector<float> logits;  // of the last position
  std::vector<std::byte> pages;
  int64_t recomputed = 0;
};

class SegmentsFixture : public testing::TestWithParam<std::string> {
 protected:
  static constexpr int32_t kPoolTokens = 32 * 1024;
  static int num_ranks() { return GetParam() == "ranks" ? 2 : 1; }

  void SetUp() override { Load(""); }

  // False: skipped.
  void Load(const std::string& more, std::optional<kernels::DType> kv_dtype = std::nullopt, int32_t max_rows = 192,
            int num_layers = 4) {
    const auto devices = test::DevicesOf(GetParam(), num_ranks());
    if (!devices.ok()) GTEST_SKIP() << devices.status();
    auto config = ParseModelConfig(Config(more, num_layers), "test");
    ASSERT_TRUE(config.ok()) << config.status();
    Use(Model::LoadRandom({*config, 7}, *devices, {.kv_dtype = kv_dtype.has_value() ? kv_dtype : test::KvType()}),
        max_rows);
  }
  void LoadFolder(const std::string& folder, int32_t max_rows) {
    const auto devices = test::DevicesOf(GetParam(), num_ranks());
    if (!devices.ok()) GTEST_SKIP() << devices.status();
    Use(Model::Load(folder, *devices, {.kv_dtype = test::KvType()}), max_rows);
  }
  void Use(const absl::StatusOr<std::shared_ptr<const Model>>& model, int32_t max_rows) {
    ASSERT_TRUE(model.ok()) << model.status();
    pool_.reset();
    model_ = *model;
    const int64_t pages = PagesForTokens(model_->config(), kPoolTokens);
    executor_.reset();
    memory_.emplace(AllocateKvMemory(*model_, pages).value());
    Poison(*model_, *memory_);  // whatever is read beyond what was written shows
    pool_ = std::make_unique<PagePool>(memory_->pages, model_->backends());
    executor_ = ParallelExecutor::Create(model_, memory_->pages, {.num_threads = 2, .max_rows = max_rows}).value();
  }

  Result Run(const Tokens& tokens, const ReuseOptions& reuse, const std::vector<SegmentHit>& hits = {},
             std::shared_ptr<SequenceKv> kv = nullptr) {
    Result result;
    result.kv = kv ? std::move(kv) : std::make_shared<SequenceKv>(*pool_, KvShapeOf(model_->config()));
    EXPECT_TRUE(result.kv->Reserve(static_cast<int64_t>(tokens.size())).ok());
    auto policy = MakeRecoveryPolicy(reuse, model_->config());
    EXPECT_TRUE(policy.ok()) << policy.status();
    PromptRun run(tokens, hits, *result.kv, **policy);
    result.logits = RunToEnd(run, *executor_, executor_->max_rows());
    if (result.logits.empty()) return result;
    result.recomputed = run.recomputed_tokens();
    const std::vector<int32_t> pages = result.kv->AllPages();
    result.pages.resize(pages.size() * model_->page_bytes());
    EXPECT_TRUE(pool_->ReadPages(pages, result.pages.data()).ok());
    return result;
  }
  Result Exact(const Tokens& tokens) { return Run(tokens, {.policy = "exact"}); }

  // K or V of one token, as floats.
  std::vector<float> Row(const Result& r, int32_t layer, int32_t head, int32_t position, bool value) const {
    const int32_t pages = r.kv->num_pages_per_stream();
    const size_t page = (static_cast<size_t>(layer) * model_->config().num_kv_heads + head) * pages + position / 64;
    const std::byte* at = r.pages.data() + page * model_->page_bytes() + (value ? model_->page_bytes() / 2 : 0);
    return test::KvRow(*model_, at, position % 64);
  }
  bool SameKv(const Result& a, const Result& b, int32_t num_tokens) const {
    for (int32_t layer = 0; layer < model_->config().num_layers; ++layer) {
      for (int32_t head = 0; head < model_->config().num_kv_heads; ++head) {
        for (int32_t p = 0; p < num_tokens; ++p) {
          for (const bool value : {false, true}) {
            const auto x = Row(a, layer, head, p, value), y = Row(b, layer, head, p, value);
            if (std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) != 0) {
              ADD_FAILURE() << "layer " << layer << " head " << head << " position " << p << (value ? " V" : " K");
              return false;
            }
          }
        }
      }
    }
    return true;
  }
  static bool SameLogits(const Result& a, const Result& b) {
    return a.logits.size() == b.logits.size() &&
           std::memcmp(a.logits.data(), b.logits.data(), a.logits.size() * sizeof(float)) == 0;
  }

  // Tokens [begin, end) of a prompt that was computed exactly, whose first segment begins at `first_segment`.
  std::shared_ptr<const SegmentSource> SourceOf(const Result& r, const Tokens& tokens, int32_t begin, int32_t end,
                                                int32_t first_segment = INT32_MAX) {
    return std::make_shared<SegmentSource>(*r.kv, begin, std::span(tokens).subspan(begin, end - begin),
                                           SourceContextOf({}, tokens, begin, first_segment));
  }

  // Prompts that were computed exactly, and a prompt pasted together from parts of them and fresh text: fresh text of
  // any length anywhere, a part used twice, a part of a part, an end that is a part, a cached prefix.
  struct Layout {
    Tokens tokens;
    std::vector<SegmentHit> hits;
    std::shared_ptr<SequenceKv> prefix;  // null: none
    std::vector<Tokens> texts;           // the prompts that were computed
    std::vector<Result> sources;         // of each; keeps the pages
    struct Part {
      size_t text = 0;
      int32_t begin = 0;
    };
    std::vector<Part> parts;  // of each hit: where it was cut out
  };
  Layout RandomLayout(std::mt19937& random, int32_t length_max) {
    Layout layout;
    for (int i = Between(random, 1, 3); i > 0; --i) {
      layout.texts.push_back(RandomTokens(random, Between(random, 40, 300)));
      layout.sources.push_back(Exact(layout.texts.back()));
    }
    if (random() % 3 == 0) {  // the first chunks of a source are the prefix
      const Result& source = layout.sources[0];
      const auto chunks = static_cast<int32_t>(layout.texts[0].size()) / 64;
      if (chunks > 0) {
        layout.prefix = std::make_shared<SequenceKv>(*pool_, KvShapeOf(model_->config()));
        for (int32_t i = 0; i < chunks; ++i) layout.prefix->AppendShared(source.kv->PagesOfChunk(i));
        layout.tokens.assign(layout.texts[0].begin(), layout.texts[0].begin() + chunks * 64);
      }
    }
    const auto add_fresh = [&](int32_t count) {
      const Tokens fresh = RandomTokens(random, count);
      layout.tokens.insert(layout.tokens.end(), fresh.begin(), fresh.end());
    };
    for (int i = Between(random, 1, 6); i > 0 && static_cast<int32_t>(layout.tokens.size()) < length_max; --i) {
      if (random() % 3 != 0) add_fresh(Between(random, 1, random() % 2 ? 5 : 150));
      const size_t which = random() % layout.texts.size();
      const auto size = static_cast<int32_t>(layout.texts[which].size());
      const int32_t begin = Between(random, 0, size - 1), end = Between(random, begin + 1, size);
      layout.parts.push_back({which, begin});
      layout.hits.push_back({SourceOf(layout.sources[which], layout.texts[which], begin, end), 0,
                             static_cast<int32_t>(layout.tokens.size()), end - begin});
      layout.tokens.insert(layout.tokens.end(), layout.texts[which].begin() + begin, layout.texts[which].begin() + end);
    }
    if (random() % 2 == 0) add_fresh(Between(random, 1, 60));
    return layout;
  }

  std::shared_ptr<const Model> model_;
  std::optional<KvMemory> memory_;
  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<ParallelExecutor> executor_;
};

}  // namespace spl::engine
