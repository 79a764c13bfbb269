// Models with FP8 weights: every published layout against its dequantized twin, what is refused, and quantization at
// load. SPLICE_BACKEND=cuda runs those on a GPU that can.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "kernels/backend/backend.h"
#include "services/engine/engine.h"
#include "services/engine/model/fp8_quantization.h"
#include "services/engine/model/weight_quantization.h"
#include "tests/support/engine_devices.h"
#include "tests/support/fp8_folders.h"
#include "tests/support/model_logits.h"
#include "tests/support/paths.h"
#include "tests/support/seeded_random.h"
#include "tests/support/temp_dir.h"

namespace spl::engine {
namespace {

using nlohmann::json;
using test::Fp8Folders;
using test::Fp8Format;
using test::Logits;
using test::RelativeL2;
using ::testing::AllOf;
using ::testing::HasSubstr;

uint32_t Seed() {
  static const uint32_t seed = test::SeededRandom("FP8 weights")();
  return seed;
}

Devices Exact(int ranks = 1) {
  Devices devices;
  for (int r = 0; r < ranks; ++r) devices.push_back(kernels::MakeCpuBackend({.gemm = kernels::GemmCompute::kF32}));
  return devices;
}

std::vector<float> LogitsOf(const std::string& dir, const Devices& devices, ModelOptions options) {
  auto model = Model::Load(dir, devices, options);
  EXPECT_TRUE(model.ok()) << model.status();
  return model.ok() ? Logits(*model) : std::vector<float>();
}

class Fp8FolderTest : public ::testing::TestWithParam<Fp8Format> {
 protected:
  spl::testing::TempDir dir_;
};

std::string FormatParam(const ::testing::TestParamInfo<Fp8Format>& info) { return test::Fp8FormatName(info.param); }

// In f32 nothing is rounded but sums: the FP8 folder computes what its dequantized twin does.
TEST_P(Fp8FolderTest, EqualsItsDequantizedTwin) {
  const Fp8Folders folders(dir_.path(), GetParam(), Seed());
  const ModelOptions f32{.kv_dtype = kernels::DType::kF32};
  const std::vector<float> want = LogitsOf(folders.plain(), Exact(), f32);
  ASSERT_FALSE(want.empty());
  EXPECT_LT(RelativeL2(LogitsOf(folders.fp8(), Exact(), f32), want), 1e-5);
  EXPECT_LT(RelativeL2(LogitsOf(folders.fp8(), {kernels::MakeReferenceBackend()}, f32), want), 1e-5);
  auto model = Model::Load(folders.fp8(), Exact());
  ASSERT_TRUE(model.ok());
  EXPECT_EQ((*model)->weight_dtype(), kernels::DType::kE4M3);
  EXPECT_EQ((*model)->weights_name(), test::HasBlocks(GetParam())         ? "fp8-e4m3-block"
                                      : GetParam() == Fp8Format::kChannel ? "fp8-e4m3-channel"
                                                                          : "fp8-e4m3-tensor");
  EXPECT_EQ((*model)->kv_dtype(), kernels::DType::kBF16);
}

// As programs run it. With power-of-two scales the weights are the same numbers in bf16, and scales multiply sums
// exactly: without blocks, whose sums are added in another order, every bit is the same.
TEST_P(Fp8FolderTest, PowerOfTwoScalesGiveTheResultsOfBf16Weights) {
  const Fp8Folders folders(dir_.path(), GetParam(), Seed() + 1, /*power_of_two=*/true);
  if (!kernels::CpuHasBf16Gemm()) GTEST_SKIP() << "no product of bf16 on this machine's CPU";
  const Devices devices = *test::DevicesOf("cpu");
  const std::vector<float> want = LogitsOf(folders.plain(), devices, {}), got = LogitsOf(folders.fp8(), devices, {});
  if (test::HasBlocks(GetParam())) {
    EXPECT_LT(RelativeL2(got, want), 4e-3);
  } else {
    EXPECT_EQ(got, want);
  }
}

TEST_P(Fp8FolderTest, RanksHaveTheirScales) {
  const Fp8Folders folders(dir_.path(), GetParam(), Seed() + 2);
  const ModelOptions f32{.kv_dtype = kernels::DType::kF32};
  const auto model = Model::Load(folders.fp8(), Exact(2), f32);
  if (test::HasBlocks(GetParam())) {  // 320 columns of down_proj on two ranks
    EXPECT_THAT(model.status().ToString(),
                AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("layers.0.mlp.down_proj.weight"), HasSubstr("--tp")));
    return;
  }
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_LT(RelativeL2(Logits(*model), LogitsOf(folders.fp8(), Exact(), f32)), 1e-5);
}

// A GPU against the same folder on the CPU; 4e-3 is the tolerance of bf16. Rows go to all experts, so that no rounding
// decides which.
TEST_P(Fp8FolderTest, AGpuAgreesWithTheCpu) {
  if (!test::OnGpu()) GTEST_SKIP() << "SPLICE_BACKEND is not cuda";
  Fp8Folders folders(dir_.path(), GetParam(), Seed() + 3);
  folders.config()["num_experts_per_tok"] = 4;
  folders.Write();
  const auto gpu = test::DevicesOf("cuda");
  ASSERT_TRUE(gpu.ok()) << gpu.status();
  EXPECT_LT(RelativeL2(LogitsOf(folders.fp8(), *gpu, {}), LogitsOf(folders.fp8(), *test::DevicesOf("cpu"), {})), 4e-3);
}

INSTANTIATE_TEST_SUITE_P(Formats, Fp8FolderTest,
                         ::testing::Values(Fp8Format::kTensor, Fp8Format::kChannel, Fp8Format::kCompressedBlocks,
                                           Fp8Format::kModelOpt, Fp8Format::kBlocks),
                         FormatParam);

class DamagedFp8Test : public ::testing::Test {
 protected:
  static constexpr const char* kName = "model.layers.0.self_attn.k_proj.weight";

  std::string Error(Fp8Format format, const std::function<void(Fp8Folders&)>& damage) {
    Fp8Folders folders(dir_.path(), format, Seed());
    damage(folders);
    folders.Write();
    const auto model = Model::Load(folders.fp8(), Exact());
    return model.ok() ? "it loaded" : model.status().ToString();
  }
  std::string ScaleError(float scale, const std::string& name = std::string(kName) + "_scale") {
    return Error(Fp8Format::kTensor, [&](Fp8Folders& f) { f.tensors()[name] = test::FloatTensor({1}, {scale}); });
  }
  spl::testing::TempDir dir_;
};

TEST_F(DamagedFp8Test, ScalesThatAreNoPositiveNumbers) {
  EXPECT_EQ(ScaleError(0.01f), "it loaded");
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), 0.0f, -1.0f})
    EXPECT_THAT(ScaleError(bad), AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr(std::string(kName) + "_scale"),
                                       HasSubstr("not a positive number")));
  EXPECT_THAT(ScaleError(-1.0f, "model.layers.0.self_attn.k_proj.input_scale"), HasSubstr("k_proj.input_scale"));
}

TEST_F(DamagedFp8Test, MissingAndMisshapenScales) {
  EXPECT_THAT(Error(Fp8Format::kTensor, [](Fp8Folders& f) { f.tensors().erase(std::string(kName) + "_scale"); }),
              AllOf(HasSubstr("NOT_FOUND"), HasSubstr(std::string(kName) + "_scale")));
  EXPECT_THAT(
      Error(Fp8Format::kChannel,
            [](Fp8Folders& f) {
              f.tensors()[std::string(kName) + "_scale"] = test::FloatTensor({127, 1}, std::vector<float>(127, 1.0f));
            }),
      AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr(kName), HasSubstr("[127, 1]"), HasSubstr("128 rows")));
  EXPECT_THAT(
      Error(Fp8Format::kBlocks,
            [](Fp8Folders& f) {
              f.tensors()[std::string(kName) + "_scale_inv"] = test::FloatTensor({2, 2}, std::vector<float>(4, 1.0f));
            }),
      AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr(kName), HasSubstr("[2, 2]"), HasSubstr("[1, 2]")));
}

TEST_F(DamagedFp8Test, NanCodesAndTypes) {
  for (const int code : {0x7f, 0xff})
    EXPECT_THAT(Error(Fp8Format::kBlocks,
                      [&](Fp8Folders& f) { f.tensors()[kName].bytes[1000] = static_cast<std::byte>(code); }),
                AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr(kName), HasSubstr("NaN")));
  EXPECT_THAT(Error(Fp8Format::kBlocks, [](Fp8Folders& f) { f.config().erase("quantization_config"); }),
              AllOf(HasSubstr("q_proj.weight"), HasSubstr("no 'quantization_config'")));
  EXPECT_THAT(Error(Fp8Format::kTensor,
                    [](Fp8Folders& f) {
                      f.tensors()[kName] =
                          test::FloatTensor({Fp8Folders::kKv, Fp8Folders::kHidden},
                                            std::vector<float>(Fp8Folders::kKv * Fp8Folders::kHidden, 0.1f), true);
                    }),
              AllOf(HasSubstr(kName), HasSubstr("differ in type")));
  EXPECT_THAT(
      Error(Fp8Format::kTensor, [](Fp8Folders& f) { f.tensors()["model.norm.weight"].type = TensorType::kE4M3; }),
      HasSubstr("model.norm.weight"));
}

// A head may be in FP8; the table of embeddings may not.
TEST_F(DamagedFp8Test, HeadsMayBeQuantizedAndEmbeddingsMayNot) {
  const auto quantize = [](const std::string& name) {
    return [name](Fp8Folders& f) {
      test::Fp8Tensor& tensor = f.tensors()[name];
      tensor.type = TensorType::kE4M3;
      tensor.bytes.assign(static_cast<size_t>(Fp8Folders::kVocab * Fp8Folders::kHidden), std::byte{0x38});
      f.tensors()[name + "_scale"] = test::FloatTensor({1}, {0.01f});
    };
  };
  EXPECT_EQ(Error(Fp8Format::kTensor, quantize("lm_head.weight")), "it loaded");
  EXPECT_THAT(Error(Fp8Format::kTensor, quantize("model.embed_tokens.weight")), HasSubstr("model.embed_tokens.weight"));
}

TEST(WeightQuantizationTest, FormatsThatAreNotSupportedAreNamed) {
  const auto error = [](const char* text) {
    return ParseWeightQuantization(json::parse(text), "config.json").status().ToString();
  };
  const std::pair<const char*, const char*> cases[] = {
      {R"({"quant_method": "bitsandbytes"})", "bitsandbytes"},
      {R"({"quant_method": "modelopt", "quant_algo": "NVFP4"})", "modelopt NVFP4"},
      {R"({"quant_method": "fp8", "fmt": "e5m2"})", "fp8 e5m2"},
      {R"({"quant_method": "fp8", "weight_block_size": [64, 64]})", "fp8 blocks of [64,64]"},
      {R"({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"})", "nvfp4-pack-quantized"},
      {R"({"quant_method": "compressed-tensors", "format": "float-quantized", "sparsity_config":
          {"format": "sparse-24-bitmask"}})",
       "sparse-24-bitmask"},
      {R"({"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0":
          {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}}})",
       "compressed-tensors int8"}};
  for (const auto& [config, name] : cases)
    EXPECT_THAT(error(config), AllOf(HasSubstr("UNIMPLEMENTED"), HasSubstr(name), HasSubstr("FP8 e4m3"))) << config;
  EXPECT_THAT(error(R"({"quant_method": "compressed-tensors", "format": "float-quantized"})"),
              AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("config_groups")));
  EXPECT_THAT(error(R"({"quant_method": 7})"), AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("quant_method")));
  EXPECT_TRUE(ParseWeightQuantization(json::parse(R"({"quant_method": "fp8", "activation_scheme": "static"})"), "c")
                  ->static_activations);
}

TEST(QuantizeRowTest, KeepsTheLargestValueAndRefusesWhatHasNoScale) {
  const std::vector<float> row = {0.5f, -2.0f, 0.0f, 1e-6f};
  std::vector<uint8_t> codes(row.size());
  const auto scale = QuantizeRow(row.data(), 4, codes.data());
  ASSERT_TRUE(scale.ok());
  EXPECT_FLOAT_EQ(*scale, 2.0f / 448);
  EXPECT_EQ(test::Fp8Value(codes[1]), -448);
  EXPECT_EQ(test::Fp8Value(codes[0]), 112);
  EXPECT_EQ(codes[2], 0);
  const std::vector<float> zeros(4, 0.0f);
  EXPECT_EQ(*QuantizeRow(zeros.data(), 4, codes.data()), 1.0f);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), 1e-40f}) {
    std::vector<float> with_bad = zeros;
    with_bad[2] = bad;
    EXPECT_EQ(QuantizeRow(with_bad.data(), 4, codes.data()).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

// splice-tiny, quantized while it is loaded: another model, whose logits are near, on any number of ranks.
TEST(QuantizeAtLoadTest, SpliceTiny) {
  const ModelOptions f32{.kv_dtype = kernels::DType::kF32},
      fp8{.kv_dtype = kernels::DType::kF32, .quantize = QuantizeTo::kFp8};
  const auto plain = Model::Load(test::kTinyModel, Exact(), f32),
             quantized = Model::Load(test::kTinyModel, Exact(), fp8),
             on_two = Model::Load(test::kTinyModel, Exact(2), fp8);
  ASSERT_TRUE(plain.ok() && quantized.ok() && on_two.ok()) << plain.status() << quantized.status() << on_two.status();
  EXPECT_EQ((*plain)->weight_dtype(), kernels::DType::kBF16);
  EXPECT_EQ((*quantized)->weight_dtype(), kernels::DType::kE4M3);
  EXPECT_EQ((*plain)->weights_name(), "bf16");
  EXPECT_EQ((*quantized)->weights_name(), "fp8-e4m3-channel");
  EXPECT_NE((*plain)->fingerprint(), (*quantized)->fingerprint());
  EXPECT_EQ((*quantized)->fingerprint(), (*on_two)->fingerprint());
  EXPECT_NE((*quantized)->head_classes(), nullptr);  // the map of the folder
  const std::vector<float> want = Logits(*plain), got = Logits(*quantized);
  const double change = RelativeL2(got, want);
  std::printf("splice-tiny in FP8: logits differ by %.4f (relative L2)\n", change);
  EXPECT_GT(change, 1e-4);
  EXPECT_LT(change, 0.1);  // three bits of mantissa round a weight by 1/16 at most; measured: 0.056
  EXPECT_LT(RelativeL2(Logits(*on_two), got), 1e-4);
}

TEST(QuantizeAtLoadTest, RandomWeightsAndRefusals) {
  spl::testing::TempDir dir;
  const Fp8Folders folders(dir.path(), Fp8Format::kChannel, Seed());
  EXPECT_THAT(Model::Load(folders.fp8(), Exact(), {.quantize = QuantizeTo::kFp8}).status().ToString(),
              AllOf(HasSubstr("--quantize"), HasSubstr("compressed-tensors")));
  const auto declared = ParseRandomModel(folders.fp8() + "/config.json");
  ASSERT_TRUE(declared.ok()) << declared.status();
  EXPECT_THAT(Model::LoadRandom(*declared, Exact()).status().ToString(), HasSubstr("quantization_config"));
  const auto random = ParseRandomModel(folders.plain() + "/config.json");
  ASSERT_TRUE(random.ok()) << random.status();
  const auto plain = Model::LoadRandom(*random, Exact()),
             fp8 = Model::LoadRandom(*random, Exact(), {.quantize = QuantizeTo::kFp8});
  ASSERT_TRUE(plain.ok() && fp8.ok()) << plain.status() << fp8.status();
  EXPECT_NE((*plain)->fingerprint(), (*fp8)->fingerprint());
  EXPECT_LT(RelativeL2(Logits(*fp8), Logits(*plain)), 0.1);
}

}  // namespace
}  // namespace spl::engine
