// Perplexity: which tokens are scored, that dense decoding gives what a plain prefill of the whole text gives, and that
// decode methods matter.
#include "tools/cli/eval_perplexity.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <numeric>

#include "kernels/backend/backend.h"
#include "kernels/common/tolerance.h"
#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"

namespace spl::cli {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class EvalPerplexityTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    tokenizer_ = *tokenizer::Tokenizer::Load(test::kTinyModel);
    model_ = *engine::Model::Load(test::kTinyModel, kernels::MakeCpuBackend());
  }
  static void TearDownTestSuite() {
    tokenizer_.reset();
    model_.reset();
  }
  static PerplexityResult Measure(const std::vector<PerplexityWindow>& windows, const std::string& decode) {
    const auto result = MeasurePerplexity(model_, windows, *ParseEvalMethod("exact", decode, "context"), 2, [] {});
    EXPECT_TRUE(result.ok()) << result.status();
    return *result;
  }
  static std::vector<int32_t> Joined(const PerplexityWindow& window) {
    std::vector<int32_t> ids = window.context;
    ids.insert(ids.end(), window.continuation.begin(), window.continuation.end());
    return ids;
  }
  std::string File(const char* name, const std::string& text) {
    std::ofstream(dir_.path() + "/" + name) << text;
    return dir_.path() + "/" + name;
  }

  inline static std::unique_ptr<tokenizer::Tokenizer> tokenizer_;
  inline static std::shared_ptr<const engine::Model> model_;
  spl::testing::TempDir dir_;
};

std::string Sentences(int count) {
  std::string text;
  for (int i = 0; i < count; ++i) text += "The keeper of lamp " + std::to_string(i) + " went down to the water again. ";
  return text;
}

TEST_F(EvalPerplexityTest, WindowsOfATextBeginWithTheBeginTokenAndDoNotOverlap) {
  const std::string text = Sentences(100);
  const auto ids = *tokenizer_->Encode(text, {});
  const auto windows = LoadPerplexityWindows(File("a.txt", text), *tokenizer_,
                                             {.context_tokens = 200, .scored_tokens = 50, .num_windows = 4});
  ASSERT_TRUE(windows.ok()) << windows.status();
  ASSERT_EQ(windows->size(), 4u);
  auto from = ids.begin();
  for (const PerplexityWindow& window : *windows) {
    EXPECT_EQ(window.context.size(), 200u);
    EXPECT_EQ(window.continuation.size(), 50u);
    EXPECT_TRUE(window.is_answer.empty());
    EXPECT_EQ(window.context[0], *tokenizer_->bos_id());
    const std::vector<int32_t> joined = Joined(window);
    from = std::search(from, ids.end(), joined.begin() + 1, joined.end());
    ASSERT_NE(from, ids.end()) << window.name;
    from += static_cast<int64_t>(joined.size()) - 1;
  }
  EXPECT_EQ(from, ids.end());  // the last one ends where the text ends

  const auto fewer = LoadPerplexityWindows(
      File("a.txt", text), *tokenizer_, {.context_tokens = static_cast<int64_t>(ids.size()) / 2, .scored_tokens = 1});
  ASSERT_TRUE(fewer.ok()) << fewer.status();
  EXPECT_EQ(fewer->size(), 2u);
}

TEST_F(EvalPerplexityTest, WindowsOfASetBeginWithTheFirstAnswer) {
  const std::string line =
      R"({"id": "x", "task": "t", "length": 64, "segments": [{"type": "new", "text": "one two three four"},)"
      R"({"type": "answer"}, {"type": "reuse", "text": " five"}, {"type": "answer"}], "answers": ["12", "345"]})"
      "\n";
  const auto context = *tokenizer_->Encode("one two three four", {});
  const auto windows =
      LoadPerplexityWindows(File("a.jsonl", line), *tokenizer_,
                            {.context_tokens = static_cast<int64_t>(context.size()), .scored_tokens = 100});
  ASSERT_TRUE(windows.ok()) << windows.status();
  ASSERT_EQ(windows->size(), 1u);
  const PerplexityWindow& window = windows->front();
  EXPECT_EQ(window.context, context);
  EXPECT_EQ(window.continuation, *tokenizer_->Encode("12<|im_end|> five345<|im_end|>", {}));
  EXPECT_THAT(window.is_answer, ElementsAre(true, true, true, false, true, true, true, true));

  const auto error = [&](int64_t tokens) {
    return std::string(
        LoadPerplexityWindows(File("a.jsonl", line), *tokenizer_, {.context_tokens = tokens}).status().message());
  };
  EXPECT_THAT(error(static_cast<int64_t>(context.size()) - 1), HasSubstr("--context"));
  EXPECT_THAT(error(static_cast<int64_t>(context.size()) * 2 + 2), HasSubstr("no sample"));
}

TEST_F(EvalPerplexityTest, ErrorsSayWhatToDo) {
  const std::string path = File("short.txt", "Too short.");
  EXPECT_THAT(std::string(LoadPerplexityWindows(path, *tokenizer_, {}).status().message()),
              AllOf(HasSubstr("short.txt"), HasSubstr("--context 4096"), HasSubstr("--tokens 256")));
  EXPECT_EQ(LoadPerplexityWindows(path, *tokenizer_, {.scored_tokens = 0}).status().code(),
            absl::StatusCode::kInvalidArgument);
  const auto method = *ParseEvalMethod("exact", "sparcas:budgt=4", "context");
  EXPECT_THAT(std::string(EngineDecodeOptions(method).status().message()),
              AllOf(HasSubstr("sparcas:budgt=4"), HasSubstr("decode_budgt")));
}

TEST_F(EvalPerplexityTest, OptionsOfAMethodReachTheEngine) {
  const auto options = EngineDecodeOptions(*ParseEvalMethod("exact", "sparcas:budget=96:dims=8:recent=32", "context"));
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->selector, "sparcas");
  EXPECT_EQ(options->budget, 96);
  EXPECT_EQ(options->dims, 8);
  EXPECT_EQ(options->recent, 32);
  EXPECT_EQ(options->refresh_interval, engine::DecodeOptions().refresh_interval);
}

TEST_F(EvalPerplexityTest, DenseIsThePerplexityOfAPlainPrefill) {
  const auto windows = *LoadPerplexityWindows(File("a.txt", Sentences(100)), *tokenizer_,
                                              {.context_tokens = 300, .scored_tokens = 40, .num_windows = 2});
  const PerplexityResult dense = Measure(windows, "dense");
  auto generator = *engine::LocalGenerator::Create(model_, {.reuse = "exact"});
  const auto vocab = static_cast<size_t>(model_->config().vocab_size);
  double sum = 0;
  int64_t tokens = 0;
  for (const PerplexityWindow& window : windows) {
    const std::vector<int32_t> ids = Joined(window);
    const auto logits = generator->AllLogits(ids);
    ASSERT_TRUE(logits.ok()) << logits.status();
    for (size_t i = window.context.size(); i < ids.size(); ++i, ++tokens) {
      const std::span<const float> row(logits->data() + (i - 1) * vocab, vocab);
      double total = 0;
      for (const float logit : row) total += std::exp(double(logit));
      sum += std::log(total) - row[static_cast<size_t>(ids[i])];
    }
  }
  EXPECT_EQ(tokens, 80);
  // The mean of scores: its relative error is at most the largest of theirs.
  EXPECT_NEAR(std::log(Perplexity(dense, windows, false)), sum / double(tokens),
              kernels::ToleranceFor(kernels::DType::kBF16).relative_l2 * sum / double(tokens));
  EXPECT_EQ(Perplexity(dense, windows, true), 0);  // plain text has no answers
}

TEST_F(EvalPerplexityTest, MethodsDifferWhereTheirBudgetIsBelowTheContext) {
  const auto windows = *LoadPerplexityWindows(File("a.txt", Sentences(100)), *tokenizer_,
                                              {.context_tokens = 400, .scored_tokens = 20, .num_windows = 1});
  const PerplexityResult dense = Measure(windows, "dense");
  for (const std::string name : {"sparcas", "quest"}) {
    EXPECT_EQ(Measure(windows, name + ":budget=512").scores, dense.scores) << name;
    const PerplexityResult small = Measure(windows, name + ":budget=64:recent=16");
    EXPECT_NE(small.scores, dense.scores) << name;
    EXPECT_EQ(small.scores[0][0], dense.scores[0][0]) << name;  // out of the prefill
  }
  const PerplexityResult results[] = {dense, Measure(windows, "streaming:budget=64")};
  const auto json = PerplexityJson(results, windows)["perplexity"];
  EXPECT_EQ(json[0]["all"]["to_dense"], 1.0);
  EXPECT_NEAR(json[1]["all"]["to_dense"].get<double>(),
              Perplexity(results[1], windows, false) / Perplexity(dense, windows, false), 1e-12);
  EXPECT_EQ(json[1]["all"]["tokens"], 20);
}

}  // namespace
}  // namespace spl::cli
