// The whole model against logits of the reference implementation (Hugging Face transformers), and greedy continuations.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "kernels/common/backend.h"
#include "services/engine/engine.h"
#include "tests/support/paths.h"

namespace spl::engine {
namespace {

struct Case {
  const char* name;
  bool splice_tiny;
  double tolerance;  // relative L2 of the logits
  bool reference_backend;
};

std::vector<int32_t> Ints(const SafetensorsFile& file, const std::string& name) {
  const auto tensor = file.Find(name);
  EXPECT_TRUE(tensor.ok()) << tensor.status();
  std::vector<int32_t> values(tensor->bytes / 4);
  std::memcpy(values.data(), tensor->data, tensor->bytes);
  return values;
}

std::vector<float> Floats(const SafetensorsFile& file, const std::string& name) {
  const auto tensor = file.Find(name);
  EXPECT_TRUE(tensor.ok()) << tensor.status();
  std::vector<float> values(tensor->bytes / 4);
  std::memcpy(values.data(), tensor->data, tensor->bytes);
  return values;
}

double RelativeL2(std::span<const float> got, std::span<const float> want) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    difference += (double(got[i]) - want[i]) * (double(got[i]) - want[i]);
    norm += double(want[i]) * want[i];
  }
  return std::sqrt(difference / norm);
}

class GoldenTest : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    const std::string shared = test::SharedDir();
    if (shared.empty()) GTEST_SKIP() << "no shared/golden beside the checkout";
    const std::string folder = shared + "/golden/" + GetParam().name;
    auto golden = SafetensorsFile::Open(folder + "/golden.safetensors");
    ASSERT_TRUE(golden.ok()) << golden.status();
    golden_ = std::move(*golden);
    std::shared_ptr<const kernels::Backend> backend =
        GetParam().reference_backend ? kernels::MakeReferenceBackend() : kernels::MakeCpuBackend();
    auto model = Model::Load(GetParam().splice_tiny ? test::kTinyModel : folder, backend);
    ASSERT_TRUE(model.ok()) << model.status();
    auto generator = LocalGenerator::Create(*model, {.executor = {.max_rows = 128}, .max_tokens = 1024});
    ASSERT_TRUE(generator.ok()) << generator.status();
    generator_ = std::move(*generator);
  }

  std::unique_ptr<SafetensorsFile> golden_;
  std::unique_ptr<LocalGenerator> generator_;
};

TEST_P(GoldenTest, LogitsAndArgmax) {
  const int32_t vocab = generator_->model().config().vocab_size;
  for (int p = 0; golden_->Contains("p" + std::to_string(p) + ".input_ids"); ++p) {
    const std::string prefix = "p" + std::to_string(p);
    const std::vector<int32_t> ids = Ints(*golden_, prefix + ".input_ids");
    const bool all = golden_->Contains(prefix + ".logits");
    const std::vector<float> want = Floats(*golden_, prefix + (all ? ".logits" : ".last_logits"));
    auto got = generator_->AllLogits(ids);
    ASSERT_TRUE(got.ok()) << got.status();
    const std::span<const float> compared =
        all ? std::span<const float>(*got) : std::span<const float>(*got).last(vocab);
    ASSERT_EQ(compared.size(), want.size());
    const double error = RelativeL2(compared, want);
    RecordProperty(prefix + "_rel_l2", std::to_string(error));
    std::printf("%s %s: relative L2 %.2e\n", GetParam().name, prefix.c_str(), error);
    EXPECT_LE(error, GetParam().tolerance) << prefix;
    for (size_t row = 0; row * vocab < want.size(); ++row) {
      const auto a = compared.subspan(row * vocab, vocab);
      std::vector<float> b(want.begin() + row * vocab, want.begin() + (row + 1) * vocab);
      const auto best = std::max_element(b.begin(), b.end()) - b.begin();
      std::vector<float> sorted = b;
      std::nth_element(sorted.begin(), sorted.begin() + 1, sorted.end(), std::greater<>());
      if (b[best] - sorted[1] <= 1e-2f) continue;
      EXPECT_EQ(std::max_element(a.begin(), a.end()) - a.begin(), best) << prefix << " row " << row;
    }
  }
}

TEST_P(GoldenTest, GreedyContinuations) {
  for (int p = 0; golden_->Contains("p" + std::to_string(p) + ".greedy"); ++p) {
    const std::string prefix = "p" + std::to_string(p);
    const std::vector<int32_t> want = Ints(*golden_, prefix + ".greedy");
    SamplingParams sampling;
    sampling.temperature = 0;
    sampling.max_tokens = static_cast<int64_t>(want.size());
    sampling.ignore_eos = true;
    std::vector<int32_t> got;
    const absl::Status status =
        generator_->Generate(Ints(*golden_, prefix + ".input_ids"), sampling, [&](int32_t, const SampledToken& token) {
          got.push_back(token.token);
          return true;
        });
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_THAT(got, testing::ElementsAreArray(want)) << prefix;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Models, GoldenTest,
    testing::Values(Case{"tiny-llama3", false, 1e-4, true}, Case{"tiny-llama3", false, 1e-4, false},
                    Case{"tiny-mistral", false, 1e-4, true}, Case{"tiny-mistral", false, 1e-4, false},
                    Case{"tiny-qwen2", false, 4e-3, true}, Case{"tiny-qwen2", false, 4e-3, false},
                    Case{"tiny-qwen3", false, 4e-3, true}, Case{"tiny-qwen3", false, 4e-3, false},
                    Case{"tiny-qwen3-moe", false, 4e-3, true}, Case{"tiny-qwen3-moe", false, 4e-3, false},
                    Case{"splice-tiny", true, 4e-3, false}),
    [](const auto& info) {
      std::string name = info.param.name;
      std::replace(name.begin(), name.end(), '-', '_');
      return name + (info.param.reference_backend ? "_ref" : "_cpu");
    });

}  // namespace
}  // namespace spl::engine
