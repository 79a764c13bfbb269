// Scores of a continuation: those of one dense prefill of the whole text, and those of the tokens that the same
// generator would draw, whatever it decodes with.
#include <cmath>
#include <filesystem>
#include <fstream>

#include "kernels/common/tolerance.h"
#include "services/engine/model/random_weights.h"
#include "tests/services/engine/engines_fixture.h"
#include "tests/support/seeded_random.h"

namespace spl::engine {
namespace {

using test::SeededRandom;
using testing::HasSubstr;

class ScoreContinuationTest : public EnginesTest {
 protected:
  static std::unique_ptr<LocalGenerator> Generator(const DecodeOptions& decode) {
    LocalGeneratorOptions options;
    options.max_tokens = 2048;
    options.reuse = "exact";
    options.decode = decode;
    auto generator = LocalGenerator::Create(model_, options);
    EXPECT_TRUE(generator.ok()) << generator.status();
    return std::move(*generator);
  }
  static DecodeOptions Sparse(const char* name) {
    DecodeOptions options(name);
    options.budget = 48;
    options.recent = 16;
    return options;
  }
};

// Scores of the last tokens of random texts, behind the others and out of one prefill of all.
void ExpectScoresOfOnePrefill(LocalGenerator& dense, std::mt19937& random, kernels::DType dtype) {
  const auto vocab = static_cast<size_t>(dense.model().config().vocab_size);
  // Around the ends of pages and of slices of 512, a continuation of one token among them.
  const std::pair<size_t, size_t> lengths[] = {{1, 40}, {63, 3}, {64, 66}, {200, 1}, {511, 20}, {513, 130}};
  for (const auto& [prompt_tokens, continuation_tokens] : lengths) {
    std::vector<int32_t> text(prompt_tokens + continuation_tokens);
    for (int32_t& id : text) id = static_cast<int32_t>(random() % vocab);
    const auto all = dense.AllLogits(text);
    ASSERT_TRUE(all.ok()) << all.status();
    const std::span<const int32_t> ids(text);
    const auto scores = dense.ScoreContinuation(ids.first(prompt_tokens), ids.subspan(prompt_tokens));
    ASSERT_TRUE(scores.ok()) << scores.status();
    ASSERT_EQ(scores->size(), continuation_tokens);
    double error = 0, norm = 0, worst = 0, largest = 0;
    for (size_t i = 0; i < continuation_tokens; ++i) {
      const float* const row = all->data() + (prompt_tokens + i - 1) * vocab;
      double sum = 0;
      for (size_t t = 0; t < vocab; ++t) sum += std::exp(double(row[t]));  // these logits are far from overflow
      const double expected = row[static_cast<size_t>(text[prompt_tokens + i])] - std::log(sum);
      error += std::pow((*scores)[i] - expected, 2);
      norm += expected * expected;
      worst = std::max(worst, std::abs((*scores)[i] - expected));
      largest = std::max(largest, std::abs(expected));
    }
    const kernels::Tolerance tolerance = kernels::ToleranceFor(dtype);
    EXPECT_LE(std::sqrt(error / norm), tolerance.relative_l2) << prompt_tokens << " + " << continuation_tokens;
    EXPECT_LE(worst / largest, tolerance.max_abs_of_max_ref) << prompt_tokens << " + " << continuation_tokens;
  }
}

// Weights, KV and products in f32: nothing rounds to less.
TEST_F(ScoreContinuationTest, DenseScoresAreThoseOfOnePrefillInF32) {
  const std::filesystem::path dir =
      std::filesystem::path(testing::TempDir()) / ("score-" + std::to_string(std::random_device{}())) / "little";
  std::filesystem::create_directories(dir);
  std::ofstream(dir / "config.json") << R"({
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 300,
    "max_position_embeddings": 1024, "torch_dtype": "float32", "rms_norm_eps": 1e-5, "tie_word_embeddings": true})";
  const auto random_model = ParseRandomModel((dir / "config.json").string());
  ASSERT_TRUE(random_model.ok()) << random_model.status();
  auto model = Model::LoadRandom(*random_model, kernels::MakeCpuBackend(), {.kv_dtype = kernels::DType::kF32});
  std::filesystem::remove_all(dir.parent_path());
  ASSERT_TRUE(model.ok()) << model.status();
  auto dense = LocalGenerator::Create(*model, {.reuse = "exact", .decode = "dense"});
  ASSERT_TRUE(dense.ok()) << dense.status();
  std::mt19937 random = SeededRandom("dense scores in f32");
  ExpectScoresOfOnePrefill(**dense, random, kernels::DType::kF32);
}

// A checkpoint in bf16, whose products round what they read.
TEST_F(ScoreContinuationTest, DenseScoresAreThoseOfOnePrefillInBf16) {
  std::mt19937 random = SeededRandom("dense scores in bf16");
  ExpectScoresOfOnePrefill(*Generator("dense"), random, kernels::DType::kBF16);
}

// What a generator draws it also scores: the forced steps are the free ones.
TEST_F(ScoreContinuationTest, DrawnTokensGetTheScoresTheyWereDrawnWith) {
  std::mt19937 random = SeededRandom("drawn tokens");
  const auto prompt = RandomPrompt(random, 400);
  SamplingParams sampling;
  sampling.temperature = 0;
  sampling.max_tokens = 40;
  sampling.ignore_eos = true;
  sampling.num_logprobs = 0;
  std::vector<double> dense;
  for (const char* name : {"dense", "sparcas", "quest", "streaming"}) {
    auto generator = Generator(Sparse(name));
    std::vector<int32_t> tokens;
    std::vector<float> logprobs;
    const absl::Status status = generator->Generate(prompt, sampling, [&](int32_t, const SampledToken& t) {
      tokens.push_back(t.token);
      logprobs.push_back(t.logprob->logprob);
      return true;
    });
    ASSERT_TRUE(status.ok()) << status;
    const auto scores = generator->ScoreContinuation(prompt, tokens);
    ASSERT_TRUE(scores.ok()) << scores.status();
    ASSERT_EQ(scores->size(), tokens.size());
    for (size_t i = 0; i < tokens.size(); ++i) EXPECT_NEAR((*scores)[i], logprobs[i], 1e-5) << name << " " << i;
    // The same tokens behind dense steps: the first comes from the prefill, the others do depend on the selector.
    const auto other = Generator("dense")->ScoreContinuation(prompt, tokens);
    ASSERT_TRUE(other.ok()) << other.status();
    EXPECT_EQ((*scores)[0], (*other)[0]) << name;
    EXPECT_EQ(*scores == *other, std::string(name) == "dense") << name;
  }
}

TEST_F(ScoreContinuationTest, ErrorsNameWhatIsWrong) {
  auto generator = Generator("dense");
  const std::vector<int32_t> some(8, 1);
  const auto error = [&](std::span<const int32_t> prompt, std::span<const int32_t> continuation) {
    const absl::Status status = generator->ScoreContinuation(prompt, continuation).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_THAT(error(some, {}), HasSubstr("no tokens"));
  EXPECT_THAT(error({}, some), HasSubstr("no tokens"));
  const std::vector<int32_t> outside = {1, model_->config().vocab_size};
  EXPECT_THAT(error(some, outside), HasSubstr("outside the vocabulary"));
  const std::vector<int32_t> context(static_cast<size_t>(model_->config().max_positions) - 4, 1);
  EXPECT_THAT(error(context, some), HasSubstr("context"));
}

}  // namespace
}  // namespace spl::engine
