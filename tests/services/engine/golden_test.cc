// The whole model against logits of the reference implementation (Hugging Face transformers), and greedy continuations.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "kernels/backend/backend.h"
#include "kernels/backend/cuda/cuda_plugin.h"
#include "services/engine/engine.h"
#include "tests/support/engine_devices.h"
#include "tests/support/paths.h"

namespace spl::engine {
namespace {

using test::RelativeL2;

enum class Arithmetic {
  kReference,  // the reference backend, K and V cached in f32
  kF32,        // the CPU backend with f32 products and f32 K and V: of 16-bit weights nothing else is rounded
  kDefault,    // the CPU backend as the programs run it: for bf16 weights bf16 products (where the machine has them)
               // and bf16 K and V
  kCudaF32,    // as kF32 and kDefault, on a GPU; skipped where there is none
  kCuda,
};

struct Case {
  const char* name;
  Arithmetic arithmetic;
  double tolerance;  // relative L2 of the logits
  int ranks = 1;     // of tensor parallelism
};

absl::StatusOr<std::shared_ptr<const kernels::Backend>> MakeBackend(Arithmetic arithmetic, int rank) {
  if (arithmetic == Arithmetic::kCuda || arithmetic == Arithmetic::kCudaF32) {
    auto cuda = kernels::MakeCudaBackend(
        {.device = rank,
         .gemm = arithmetic == Arithmetic::kCudaF32 ? kernels::GemmCompute::kF32 : kernels::GemmCompute::kAuto});
    if (!cuda.ok()) return cuda.status();
    return std::shared_ptr<const kernels::Backend>(*std::move(cuda));
  }
  if (arithmetic == Arithmetic::kReference)
    return std::shared_ptr<const kernels::Backend>(kernels::MakeReferenceBackend());
  return std::shared_ptr<const kernels::Backend>(kernels::MakeCpuBackend(
      {.gemm = arithmetic == Arithmetic::kF32 ? kernels::GemmCompute::kF32 : kernels::GemmCompute::kAuto}));
}

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

std::string CaseName(const testing::TestParamInfo<Case>& info) {
  std::string name = info.param.name;
  std::replace(name.begin(), name.end(), '-', '_');
  if (info.param.ranks > 1) name += "_tp" + std::to_string(info.param.ranks);
  switch (info.param.arithmetic) {
    case Arithmetic::kReference:
      return name + "_ref";
    case Arithmetic::kF32:
      return name + "_cpu_f32";
    case Arithmetic::kCudaF32:
      return name + "_cuda_f32";
    case Arithmetic::kCuda:
      return name + "_cuda";
    case Arithmetic::kDefault:
      break;
  }
  return name + "_cpu";
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
    const bool splice_tiny = std::string(GetParam().name) == "splice-tiny";
    Devices devices;
    for (int rank = 0; rank < GetParam().ranks; ++rank) {
      auto backend = MakeBackend(GetParam().arithmetic, rank);
      if (!backend.ok()) GTEST_SKIP() << backend.status();
      devices.push_back(*std::move(backend));
    }
    ModelOptions options;
    if (GetParam().arithmetic != Arithmetic::kDefault && GetParam().arithmetic != Arithmetic::kCuda)
      options.kv_dtype = kernels::DType::kF32;
    auto model = Model::Load(splice_tiny ? test::kTinyModel : folder, devices, options);
    ASSERT_TRUE(model.ok()) << model.status();
    auto generator = LocalGenerator::Create(*model, {.executor = {.max_rows = 128}, .max_tokens = 1024});
    ASSERT_TRUE(generator.ok()) << generator.status();
    generator_ = std::move(*generator);
  }

  void CheckLogits();
  void CheckGreedy();

  std::unique_ptr<SafetensorsFile> golden_;
  std::unique_ptr<LocalGenerator> generator_;
};

void GoldenTest::CheckLogits() {
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

TEST_P(GoldenTest, LogitsAndArgmax) { CheckLogits(); }

void GoldenTest::CheckGreedy() {
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

TEST_P(GoldenTest, GreedyContinuations) { CheckGreedy(); }

// The logits of these two in bf16 arithmetic are NOT within 4e-3 of the golden ones: with hidden size 64 and random
// weights, rounding K and V alone costs tiny-qwen2 up to 9.1e-3 (measured with the reference backend), bf16 products
// bring it to 1.4e-2 and tiny-qwen3 to 6.7e-3. In f32 arithmetic both are within 1e-4, below. What does hold in bf16:
class Bf16GreedyTest : public GoldenTest {};
TEST_P(Bf16GreedyTest, GreedyContinuations) { CheckGreedy(); }
INSTANTIATE_TEST_SUITE_P(Models, Bf16GreedyTest,
                         testing::Values(Case{"tiny-qwen2", Arithmetic::kDefault, 0},
                                         Case{"tiny-qwen3", Arithmetic::kDefault, 0},
                                         Case{"tiny-qwen2", Arithmetic::kCuda, 0},
                                         Case{"tiny-qwen3", Arithmetic::kCuda, 0}),
                         CaseName);

// Split over ranks nothing but the order of sums changes. (tiny-mistral has one KV head: see parallel_executor_test.)
INSTANTIATE_TEST_SUITE_P(
    TensorParallel, GoldenTest,
    testing::Values(Case{"tiny-llama3", Arithmetic::kReference, 1e-4, 2},
                    Case{"tiny-llama3", Arithmetic::kF32, 1e-4, 2}, Case{"tiny-qwen2", Arithmetic::kF32, 1e-4, 2},
                    Case{"tiny-qwen3", Arithmetic::kF32, 1e-4, 2}, Case{"tiny-qwen3-moe", Arithmetic::kF32, 1e-4, 2},
                    Case{"splice-tiny", Arithmetic::kF32, 1e-4, 2}, Case{"splice-tiny", Arithmetic::kF32, 1e-4, 4},
                    Case{"tiny-llama3", Arithmetic::kCuda, 1e-4, 2}, Case{"tiny-qwen2", Arithmetic::kCudaF32, 1e-4, 2},
                    Case{"tiny-qwen3", Arithmetic::kCudaF32, 1e-4, 2},
                    Case{"tiny-qwen3-moe", Arithmetic::kCudaF32, 1e-4, 2},
                    Case{"splice-tiny", Arithmetic::kCudaF32, 1e-4, 2},
                    Case{"splice-tiny", Arithmetic::kCuda, 4e-3, 2}),
    CaseName);

// In bf16 another order of sums turns one of splice-tiny's 80 greedy tokens, where the two best logits are 9.851 and
// 9.806; the logits stay within their tolerance.
class Bf16RanksTest : public GoldenTest {};
TEST_P(Bf16RanksTest, LogitsAndArgmax) { CheckLogits(); }
INSTANTIATE_TEST_SUITE_P(Models, Bf16RanksTest,
                         testing::Values(Case{"splice-tiny", Arithmetic::kDefault, 4e-3, 2},
                                         Case{"splice-tiny", Arithmetic::kDefault, 4e-3, 4}),
                         CaseName);

INSTANTIATE_TEST_SUITE_P(
    Models, GoldenTest,
    testing::Values(Case{"tiny-llama3", Arithmetic::kReference, 1e-4}, Case{"tiny-llama3", Arithmetic::kDefault, 1e-4},
                    Case{"tiny-mistral", Arithmetic::kReference, 1e-4},
                    Case{"tiny-mistral", Arithmetic::kDefault, 1e-4}, Case{"tiny-qwen2", Arithmetic::kReference, 1e-4},
                    Case{"tiny-qwen2", Arithmetic::kF32, 1e-4}, Case{"tiny-qwen3", Arithmetic::kReference, 1e-4},
                    Case{"tiny-qwen3", Arithmetic::kF32, 1e-4}, Case{"tiny-qwen3-moe", Arithmetic::kReference, 1e-4},
                    Case{"tiny-qwen3-moe", Arithmetic::kF32, 1e-4}, Case{"tiny-qwen3-moe", Arithmetic::kDefault, 4e-3},
                    Case{"splice-tiny", Arithmetic::kDefault, 4e-3}, Case{"tiny-llama3", Arithmetic::kCuda, 1e-4},
                    Case{"tiny-mistral", Arithmetic::kCuda, 1e-4}, Case{"tiny-qwen2", Arithmetic::kCudaF32, 1e-4},
                    Case{"tiny-qwen3", Arithmetic::kCudaF32, 1e-4}, Case{"tiny-qwen3-moe", Arithmetic::kCudaF32, 1e-4},
                    Case{"tiny-qwen3-moe", Arithmetic::kCuda, 4e-3}, Case{"splice-tiny", Arithmetic::kCudaF32, 1e-4},
                    Case{"splice-tiny", Arithmetic::kCuda, 4e-3}),
    CaseName);

}  // namespace
}  // namespace spl::engine
