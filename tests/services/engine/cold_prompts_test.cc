// Methods for cold spans: the limits of docs/methods/loopserve.md and docs/methods/baselines.md on whole models, on the
// CPU and, where there is one, a GPU. Models are small and random: what counts is that two ways to a result agree.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "kernels/backend/backend.h"
#include "kernels/backend/cuda/cuda_plugin.h"
#include "services/engine/engine.h"
#include "services/engine/execution/line_attention.h"
#include "services/engine/methods/recovery_methods.h"
#include "services/engine/recovery/line_policy.h"
#include "services/engine/runtime/prompt_run.h"
#include "tests/services/engine/prompt_runs.h"
#include "tests/support/engine_devices.h"
#include "tests/support/seeded_random.h"

namespace spl::engine {
namespace {

using Tokens = std::vector<int32_t>;
using test::RelativeL2;
using test::SeededRandom;

constexpr int32_t kVocab = 512;

Tokens RandomTokens(std::mt19937& random, int64_t count) { return test::RandomTokens(random, count, kVocab); }

struct Result {
  std::shared_ptr<SequenceKv> kv;
  std::vector<float> logits;
  std::vector<std::byte> pages;  // what was written
  LineReport lines;
  bool exact = false;
  bool alone = false;
};

bool SameBits(const Result& a, const Result& b) {
  return a.logits.size() == b.logits.size() && a.pages == b.pages &&
         std::memcmp(a.logits.data(), b.logits.data(), a.logits.size() * sizeof(float)) == 0;
}

std::string Config(const char* dtype, int32_t num_layers, int32_t head_dim,
                   const char* architecture = "LlamaForCausalLM", const char* more = "") {
  return fmt::format(
      R"({{"architectures":["{}"],"hidden_size":64,"intermediate_size":96,"num_hidden_layers":{},
      "num_attention_heads":4,"num_key_value_heads":2,"head_dim":{},"vocab_size":{},"max_position_embeddings":8192,
      "rms_norm_eps":1e-5,"tie_word_embeddings":true,"eos_token_id":1{},"torch_dtype":"{}"}})",
      architecture, num_layers, head_dim, kVocab, more, dtype);
}

// "cuda" runs the bf16 kernels, the others f32.
class ColdPromptsTest : public testing::TestWithParam<std::string> {
 protected:
  static constexpr int32_t kMaxRows = 256, kLayers = 6, kHeads = 2;

  void SetUp() override { MakeModel(kLayers); }

  void MakeModel(int32_t num_layers, const char* architecture = "LlamaForCausalLM", const char* more = "") {
    executor_.reset();
    pool_.reset();
    memory_.reset();
    const bool bf16 = GetParam() == "cuda";
    const auto devices = test::DevicesOf(GetParam().substr(0, 4), GetParam() == "ranks" ? 2 : 1);
    if (!devices.ok()) GTEST_SKIP() << devices.status();
    auto config =
        ParseModelConfig(Config(bf16 ? "bfloat16" : "float32", num_layers, bf16 ? 64 : 16, architecture, more), "test");
    ASSERT_TRUE(config.ok()) << config.status();
    auto model = Model::LoadRandom({*config, 7}, *devices, {.kv_dtype = test::KvType()});
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *model;
    memory_.emplace(AllocateKvMemory(*model_, PagesForTokens(model_->config(), 16 * 1024)).value());
    Poison(*model_, *memory_);  // what is read beyond what was written shows
    pool_ = std::make_unique<PagePool>(memory_->pages, model_->backends());
    executor_ = ParallelExecutor::Create(model_, memory_->pages,
                                         {.num_threads = 2, .max_rows = kMaxRows, .max_span_rows = 8192})
                    .value();
  }

  // `prefix`: of a result whose leading tokens are these, whose pages are shared, as prefix hits are.
  Result Run(const Tokens& tokens, const ReuseOptions& reuse, int32_t room = kMaxRows, const Result* prefix = nullptr,
             int32_t num_prefix = 0, const HeadClassMap* map = nullptr) {
    Result result;
    result.kv = std::make_shared<SequenceKv>(*pool_, KvShapeOf(model_->config()));
    for (int32_t page = 0; page < num_prefix / kernels::kPageTokens; ++page)
      result.kv->AppendShared(prefix->kv->PagesOfChunk(page));
    EXPECT_TRUE(result.kv->Reserve(static_cast<int64_t>(tokens.size())).ok());
    auto policy = MakeRecoveryPolicy(reuse, model_->config(), map);
    EXPECT_TRUE(policy.ok()) << policy.status();
    if (!policy.ok()) return result;
    PromptRun run(tokens, {}, *result.kv, **policy);
    result.logits = RunToEnd(run, *executor_, room);
    result.exact = run.exact();
    result.alone = run.alone();
    result.lines = run.lines();
    if (result.logits.empty()) return result;
    const std::vector<int32_t> pages = result.kv->AllPages();
    result.pages.resize(pages.size() * model_->page_bytes());
    EXPECT_TRUE(pool_->ReadPages(pages, result.pages.data()).ok());
    const size_t per_stream = static_cast<size_t>(result.kv->num_pages_per_stream()), half = model_->page_bytes() / 2;
    const size_t written = (tokens.size() - 1) % kernels::kPageTokens + 1;
    for (size_t last = per_stream - 1; last < pages.size(); last += per_stream) {
      for (size_t begin = last * model_->page_bytes(); begin < (last + 1) * model_->page_bytes(); begin += half)
        test::ClearRowsFrom(*model_, written, result.pages.data() + begin);
    }
    return result;
  }
  Result Exact(const Tokens& tokens) { return Run(tokens, {.policy = "exact"}); }
  // Of results that differ by the order of sums only.
  double tolerance() const { return GetParam() == "cuda" ? std::max(4e-3, test::OrderOfSums()) : test::OrderOfSums(); }

  std::shared_ptr<const Model> model_;
  std::optional<KvMemory> memory_;
  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<ParallelExecutor> executor_;
};

ReuseOptions LoopServe(double alpha = 0.995) {
  return {.policy = "loopserve", .line_alpha = alpha, .line_min_span = 1};
}
ReuseOptions MInference(int32_t columns = 8192, int32_t slashes = 8192) {
  return {.policy = "minference", .line_columns = columns, .line_slashes = slashes};
}

// 5.1, 7: with every line the whole span, layer by layer, is the plain prefill, slice by slice, bit by bit.
TEST_P(ColdPromptsTest, WithEveryLineMInferenceIsExact) {
  std::mt19937 random = SeededRandom("every line");
  for (const int64_t length : {1, 63, 64, 65, 256, 257, 700, 1337}) {
    const Tokens tokens = RandomTokens(random, length);
    const Result want = Exact(tokens), got = Run(tokens, MInference());
    EXPECT_TRUE(SameBits(got, want)) << length << ": " << RelativeL2(got.logits, want.logits);
    EXPECT_EQ(got.lines.heads, kLayers * kHeads);
    EXPECT_EQ(got.lines.cells, got.lines.causal_cells) << length;
    if (length > 64) {
      EXPECT_NEAR(got.lines.held_out_mass / static_cast<double>(got.lines.held_out_heads), 1, 1e-5);
    }
    // The room of a pass is for others.
    EXPECT_TRUE(SameBits(Run(tokens, MInference(), 64), want)) << length << " in slices";
  }
}

TEST_P(ColdPromptsTest, WithAllOfTheAttentionLoopServeIsExact) {
  std::mt19937 random = SeededRandom("alpha 1");
  for (const int64_t length : {70, 700, 1337}) {
    const Tokens tokens = RandomTokens(random, length);
    const Result want = Exact(tokens), got = Run(tokens, LoopServe(1));
    EXPECT_LT(RelativeL2(got.logits, want.logits), tolerance()) << length;
    EXPECT_EQ(got.lines.heads, (kLayers - 2) * kHeads);
    EXPECT_NEAR(got.lines.covered / got.lines.sampled, 1, 1e-6);
    // Layers below the dense ones are the same bit by bit, and those are all of them:
    ReuseOptions dense = LoopServe(0.5);
    dense.dense_layers = kLayers;
    const Result all_dense = Run(tokens, dense);
    EXPECT_TRUE(SameBits(all_dense, want)) << length;
    EXPECT_EQ(all_dense.lines.heads, 0);
    EXPECT_TRUE(all_dense.exact);
  }
}

// 5.1: the certificate holds, fewer lines are fewer cells, and what was kept back tells the truth of it.
TEST_P(ColdPromptsTest, LinesCoverWhatTheyPromise) {
  std::mt19937 random = SeededRandom("lines cover");
  const Tokens tokens = RandomTokens(random, 1500);
  const Result exact = Exact(tokens);
  double cells_before = 2, mass_before = 2;
  for (const double alpha : {0.995, 0.9, 0.5, 0.2}) {
    const Result got = Run(tokens, LoopServe(alpha));
    EXPECT_GE(got.lines.covered, alpha * got.lines.sampled * (1 - 1e-5)) << alpha;
    const double cells = got.lines.cells / got.lines.causal_cells;
    const double mass = got.lines.held_out_mass / static_cast<double>(got.lines.held_out_heads);
    EXPECT_LE(cells, cells_before);
    EXPECT_LE(mass, mass_before + 1e-3);
    EXPECT_GT(mass, alpha - 0.2) << "rows that were not asked have about the share of those that were";
    EXPECT_LE(got.lines.held_out_lowest, mass);
    cells_before = cells, mass_before = mass;
    EXPECT_FALSE(got.exact);
    EXPECT_TRUE(got.alone);
  }
  EXPECT_LT(cells_before, 0.9);
  const Result few = Run(tokens, LoopServe(0.2));
  EXPECT_GT(RelativeL2(few.logits, exact.logits), 1e-4) << "something was left out";
  EXPECT_TRUE(SameBits(few, Run(tokens, LoopServe(0.2)))) << "equal prompts, equal answers";
  EXPECT_TRUE(SameBits(few, Run(tokens, LoopServe(0.2), 64))) << "whatever the room of a pass";
}

TEST_P(ColdPromptsTest, SpanBehindAPrefix) {
  std::mt19937 random = SeededRandom("span behind a prefix");
  const Tokens tokens = RandomTokens(random, 900);
  const Result want = Exact(tokens);
  for (const int32_t prefix : {64, 448, 832}) {
    EXPECT_TRUE(SameBits(Run(tokens, MInference(), kMaxRows, &want, prefix), want)) << prefix;
    const Result lines = Run(tokens, LoopServe(0.3), kMaxRows, &want, prefix);
    EXPECT_EQ(lines.kv->exact_tokens(), prefix);
    EXPECT_LT(lines.lines.cells, lines.lines.causal_cells);
    // Its span is too short:
    ReuseOptions longer = LoopServe(0.3);
    longer.line_min_span = 900 - prefix + 1;
    const Result dense = Run(tokens, longer, kMaxRows, &want, prefix);
    EXPECT_TRUE(SameBits(dense, want));
    EXPECT_EQ(dense.kv->exact_tokens(), 900);
    EXPECT_EQ(dense.lines.heads, 0);
  }
}

// 7: a band over everything is everything.
TEST_P(ColdPromptsTest, WideBandIsExact) {
  std::mt19937 random = SeededRandom("wide band");
  for (const int64_t length : {5, 300, 700}) {
    const Tokens tokens = RandomTokens(random, length);
    const Result want = Exact(tokens);
    for (const char* policy : {"a-shape", "tri-shape"}) {
      for (const int32_t window : {static_cast<int32_t>(length), 3968}) {
        const Result got = Run(tokens, {.policy = policy, .band_window = window});
        EXPECT_LT(RelativeL2(got.logits, want.logits), tolerance()) << policy << " " << length;
        EXPECT_FALSE(got.exact);
        EXPECT_EQ(got.kv->exact_tokens(), 0);
      }
    }
    const Result narrow = Run(tokens, {.policy = "a-shape", .band_sinks = 4, .band_window = 4});
    if (length > 8) {
      EXPECT_GT(RelativeL2(narrow.logits, want.logits), 1e-4);
    }
    EXPECT_TRUE(SameBits(narrow, Run(tokens, {.policy = "a-shape", .band_sinks = 4, .band_window = 4}, 64)));
  }
}

// 7: the last rows see everything; in one layer, where keys are exact, they are those of full attention.
TEST_P(ColdPromptsTest, LastRowsOfTriShapeSeeEverything) {
  MakeModel(1);
  if (IsSkipped()) return;
  std::mt19937 random = SeededRandom("tri-shape");
  const Tokens tokens = RandomTokens(random, 600);
  const ReuseOptions tri{.policy = "tri-shape", .band_sinks = 8, .band_window = 16, .band_last_rows = 100};
  ReuseOptions a = tri;
  a.policy = "a-shape";
  const auto all = [&](const ReuseOptions& reuse, int32_t max_rows) {
    auto generator = LocalGenerator::Create(
        model_, {.executor = {.num_threads = 2, .max_rows = max_rows}, .max_tokens = 2048, .reuse_options = reuse});
    EXPECT_TRUE(generator.ok()) << generator.status();
    return (*generator)->AllLogits(tokens).value();
  };
  const std::vector<float> exact = all({.policy = "exact"}, 256), open = all(tri, 256), band = all(a, 256);
  const auto row = [](const std::vector<float>& logits, int32_t r) {
    return std::vector<float>(logits.begin() + r * kVocab, logits.begin() + (r + 1) * kVocab);
  };
  for (int32_t r = 0; r < 600; ++r) {
    if (r >= 500) {
      EXPECT_EQ(row(open, r), row(exact, r)) << r;
    } else {
      EXPECT_EQ(row(open, r), row(band, r)) << r;
    }
    const double off = RelativeL2(row(band, r), row(exact, r));
    EXPECT_TRUE(r >= 16 || off < tolerance()) << r << ": " << off;
    EXPECT_TRUE(r < 64 || off > 1e-6) << r << ": " << off;
  }
  EXPECT_EQ(all(tri, 64), open) << "the last rows are in two slices";
}

// Heads with a class of their own keep to it; the others choose.
TEST_P(ColdPromptsTest, HeadClassesAndLines) {
  std::mt19937 random = SeededRandom("classes and lines");
  const Tokens tokens = RandomTokens(random, 700);
  const auto map = [](int32_t window) {
    std::vector<HeadClass> classes(kLayers * kHeads);
    for (size_t i = 0; i < classes.size(); i += 2) classes[i] = {.is_global = false, .window = window, .sinks = 4};
    return HeadClassMap(kLayers, kHeads, std::move(classes));
  };
  const HeadClassMap wide = map(1024), narrow = map(8);
  ReuseOptions options = LoopServe(1);
  options.head_classes = true;
  const Result want = Exact(tokens), got = Run(tokens, options, kMaxRows, nullptr, 0, &wide);
  EXPECT_LT(RelativeL2(got.logits, want.logits), tolerance());
  EXPECT_EQ(got.lines.heads, (kLayers - 2) * (kHeads - 1));
  EXPECT_GT(RelativeL2(Run(tokens, options, kMaxRows, nullptr, 0, &narrow).logits, want.logits), 1e-4);
  options.head_classes = false;
  EXPECT_LT(RelativeL2(Run(tokens, options, kMaxRows, nullptr, 0, &narrow).logits, want.logits), tolerance());
}

// Layers with a window of the model's own choose no lines.
TEST_P(ColdPromptsTest, WindowsOfTheModelStay) {
  MakeModel(4, "MistralForCausalLM", R"(,"sliding_window":40)");
  if (IsSkipped()) return;
  ASSERT_EQ(model_->config().visibility(2).rule, kernels::VisibilityRule::kBand);
  std::mt19937 random = SeededRandom("windows stay");
  const Tokens tokens = RandomTokens(random, 300);
  const Result want = Exact(tokens);
  for (const ReuseOptions& reuse : {LoopServe(0.1), MInference(30, 30)}) {
    const Result got = Run(tokens, reuse);
    EXPECT_TRUE(SameBits(got, want)) << reuse.policy;
    EXPECT_TRUE(got.exact);
  }
  EXPECT_TRUE(SameBits(Run(tokens, {.policy = "a-shape", .band_sinks = 4, .band_window = 64}), want));
}

// 6.3 P1, P2: what lies at or behind the first approximate token is a source of nothing.
TEST_P(ColdPromptsTest, Provenance) {
  std::mt19937 random = SeededRandom("provenance of cold spans");
  const Tokens tokens = RandomTokens(random, 500);
  for (const ReuseOptions& reuse : {LoopServe(0.5), MInference(100, 100), MInference(),
                                    ReuseOptions{.policy = "a-shape"}, ReuseOptions{.policy = "tri-shape"}}) {
    const Result got = Run(tokens, reuse);
    EXPECT_FALSE(got.exact) << reuse.policy;
    EXPECT_EQ(got.kv->exact_tokens(), 0) << reuse.policy;
  }
  const Result exact = Run(tokens, {.policy = "loopserve"});
  EXPECT_TRUE(exact.exact) << "shorter than line_min_span";
  EXPECT_FALSE(exact.alone);
  EXPECT_EQ(exact.kv->exact_tokens(), 500);
  EXPECT_TRUE(SameBits(exact, Exact(tokens)));
}

INSTANTIATE_TEST_SUITE_P(Devices, ColdPromptsTest, testing::Values("cpu", "ranks", "cuda", "cuda_f32"),
                         [](const auto& info) { return info.param; });

TEST(ColdPromptOptionsTest, BadValuesAreRefusedByName) {
  const ModelConfig config = ParseModelConfig(Config("float32", 4, 16), "test").value();
  const auto error = [&](const ReuseOptions& options) {
    const auto policy = MakeRecoveryPolicy(options, config);
    EXPECT_FALSE(policy.ok());
    return std::string(policy.status().message());
  };
  EXPECT_THAT(error({.policy = "loopserve", .line_alpha = 0}), testing::HasSubstr("line_alpha is 0"));
  EXPECT_THAT(error({.policy = "loopserve", .line_alpha = 1.5}), testing::HasSubstr("line_alpha is 1.5"));
  EXPECT_THAT(error({.policy = "loopserve", .line_alpha = NAN}), testing::HasSubstr("line_alpha is nan"));
  EXPECT_THAT(error({.policy = "loopserve", .line_samples = 8}), testing::HasSubstr("line_samples is 8"));
  EXPECT_THAT(error({.policy = "loopserve", .line_samples = 129}), testing::HasSubstr("line_samples is 129"));
  EXPECT_THAT(error({.policy = "loopserve", .line_min_span = 0}), testing::HasSubstr("line_min_span is 0"));
  EXPECT_THAT(error({.policy = "loopserve", .dense_layers = 5}), testing::HasSubstr("dense_layers is 5"));
  EXPECT_THAT(error({.policy = "minference", .line_columns = 0}), testing::HasSubstr("line_columns is 0"));
  EXPECT_THAT(error({.policy = "minference", .line_slashes = 8193}), testing::HasSubstr("line_slashes is 8193"));
  EXPECT_THAT(error({.policy = "a-shape", .band_sinks = -1}), testing::HasSubstr("band_sinks is -1"));
  EXPECT_THAT(error({.policy = "a-shape", .band_window = 0}), testing::HasSubstr("band_window is 0"));
  EXPECT_THAT(error({.policy = "tri-shape", .band_last_rows = 0}), testing::HasSubstr("band_last_rows is 0"));
  EXPECT_THAT(error({.policy = "loopserve", .head_classes = true}), testing::HasSubstr("needs head classes"));
  for (const char* policy : {"loopserve", "minference", "a-shape", "tri-shape"}) {
    const auto made = MakeRecoveryPolicy({.policy = policy}, config);
    ASSERT_TRUE(made.ok()) << made.status();
    EXPECT_EQ((*made)->name(), policy);
    EXPECT_FALSE((*made)->reuses_segments());
    EXPECT_FALSE(UsesHeadClasses({.policy = policy}));
  }
  EXPECT_TRUE(UsesHeadClasses({.policy = "loopserve", .head_classes = true}));
  EXPECT_FALSE(UsesHeadClasses({.policy = "loopserve", .full_kv = true, .head_classes = true}));
}

TEST(HeldOutRowsTest, AreSpreadAndNotSampled) {
  std::mt19937 random = SeededRandom("held-out rows");
  for (int round = 0; round < 200; ++round) {
    const int32_t rows = 1 + static_cast<int32_t>(random() % 5000);
    const std::vector<int32_t> samples = kernels::SampleRows(rows, random());
    const std::vector<int32_t> held_out = HeldOutRows(rows, samples, random(), 16);
    EXPECT_EQ(held_out.size(), std::min<size_t>(16, static_cast<size_t>(rows) - samples.size()));
    EXPECT_TRUE(std::is_sorted(held_out.begin(), held_out.end()));
    for (size_t i = 0; i < held_out.size(); ++i) {
      EXPECT_TRUE(held_out[i] >= 0 && held_out[i] < rows);
      EXPECT_TRUE(i == 0 || held_out[i] > held_out[i - 1]);
      EXPECT_FALSE(std::binary_search(samples.begin(), samples.end(), held_out[i]));
    }
  }
}

// Against a walk over every cell.
TEST(CountLineCellsTest, CountsEveryCellOnce) {
  std::mt19937 random = SeededRandom("line cells");
  for (int round = 0; round < 50; ++round) {
    kernels::LineVisibility lines{.first_position = static_cast<int32_t>(random() % 300),
                                  .num_rows = 1 + static_cast<int32_t>(random() % 400)};
    const int32_t keys = lines.first_position + lines.num_rows;
    lines.tile_words = (keys + 4095) / 4096;
    lines.column_words = 2;
    std::vector<uint64_t> tiles(static_cast<size_t>(lines.num_row_tiles() * lines.tile_words));
    std::vector<uint64_t> masks(static_cast<size_t>(lines.num_row_tiles() * lines.column_words));
    double want = 0;
    for (int32_t t = 0; t < lines.num_row_tiles(); ++t) {
      const int32_t first = lines.first_position + 64 * t, rows = std::min(64, lines.num_rows - 64 * t);
      for (int32_t tile = 0; tile <= (first + rows - 1) / 64; ++tile) {
        if (random() % 2 == 0) continue;
        tiles[static_cast<size_t>(t * lines.tile_words + tile / 64)] |= uint64_t{1} << (tile % 64);
        for (int32_t row = first; row < first + rows; ++row) {
          for (int32_t key = 64 * tile; key < 64 * tile + 64; ++key) want += key <= row;
        }
      }
      for (int32_t bit = 0; bit < 128; ++bit) {
        if (random() % 3 != 0) continue;
        masks[static_cast<size_t>(t * 2 + bit / 64)] |= uint64_t{1} << (bit % 64);
        want += rows;
      }
    }
    EXPECT_EQ(CountLineCells(lines, tiles.data(), masks.data()), want) << lines.first_position << " " << lines.num_rows;
  }
}

}  // namespace
}  // namespace spl::engine
