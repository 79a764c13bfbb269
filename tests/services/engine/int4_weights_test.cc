// Models with int4 weights: every published layout against its dequantized twin, what is refused, and quantization at
// load. SPLICE_BACKEND=cuda runs those on a GPU that can.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>

#include "kernels/backend/backend.h"
#include "services/engine/engine.h"
#include "services/engine/model/int4_quantization.h"
#include "services/engine/model/weight_quantization.h"
#include "tests/support/engine_devices.h"
#include "tests/support/int4_folders.h"
#include "tests/support/model_logits.h"
#include "tests/support/paths.h"
#include "tests/support/seeded_random.h"
#include "tests/support/temp_dir.h"

namespace spl::engine {
namespace {

using nlohmann::json;
using test::Int4Folders;
using test::Int4Format;
using test::Logits;
using test::RelativeL2;
using ::testing::AllOf;
using ::testing::HasSubstr;

uint32_t Seed() {
  static const uint32_t seed = test::SeededRandom("int4 weights")();
  return seed;
}

Devices Exact(int ranks = 1) {
  Devices devices;
  for (int r = 0; r < ranks; ++r) devices.push_back(kernels::MakeCpuBackend({.gemm = kernels::GemmCompute::kF32}));
  return devices;
}

const ModelOptions kF32{.kv_dtype = kernels::DType::kF32};

std::vector<float> LogitsOf(const std::string& dir, const Devices& devices, ModelOptions options) {
  auto model = Model::Load(dir, devices, options);
  EXPECT_TRUE(model.ok()) << model.status();
  return model.ok() ? Logits(*model) : std::vector<float>();
}

class Int4FolderTest : public ::testing::TestWithParam<Int4Format> {
 protected:
  spl::testing::TempDir dir_;
};

// In f32 nothing is rounded but sums: the int4 folder computes what its dequantized twin does.
TEST_P(Int4FolderTest, EqualsItsDequantizedTwin) {
  const Int4Folders folders(dir_.path(), GetParam(), Seed());
  const std::vector<float> want = LogitsOf(folders.plain(), Exact(), kF32);
  ASSERT_FALSE(want.empty());
  EXPECT_LT(RelativeL2(LogitsOf(folders.int4(), Exact(), kF32), want), 1e-5);
  EXPECT_LT(RelativeL2(LogitsOf(folders.int4(), {kernels::MakeReferenceBackend()}, kF32), want), 1e-5);
  auto model = Model::Load(folders.int4(), Exact());
  ASSERT_TRUE(model.ok());
  EXPECT_EQ((*model)->weight_dtype(), kernels::DType::kInt4);
  const int64_t group = test::GroupOf(GetParam());
  EXPECT_EQ((*model)->weights_name(), group == 0 ? "int4-channel" : "int4-group" + std::to_string(group));
  EXPECT_EQ((*model)->kv_dtype(), kernels::DType::kBF16);
}

// As programs run it; 4e-3 is the tolerance of bf16.
TEST_P(Int4FolderTest, IsNearItsTwinInBf16) {
  const Int4Folders folders(dir_.path(), GetParam(), Seed() + 1);
  const double change =
      RelativeL2(LogitsOf(folders.int4(), *test::DevicesOf("cpu"), kF32), LogitsOf(folders.plain(), Exact(), kF32));
  std::printf("%s: logits with bf16 activations differ by %.5f (relative L2)\n", test::Int4FormatName(GetParam()),
              change);
  EXPECT_LT(change, 2e-2);
}

TEST_P(Int4FolderTest, RanksHaveTheirScales) {
  const Int4Folders folders(dir_.path(), GetParam(), Seed() + 2);
  const auto model = Model::Load(folders.int4(), Exact(2), kF32);
  if (test::IsOrdered(GetParam())) {
    EXPECT_THAT(model.status().ToString(), AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("layers.0.self_attn.o_proj"),
                                                 HasSubstr("g_idx"), HasSubstr("--tp"), HasSubstr("act-order")));
  } else if (test::GroupOf(GetParam()) == 128) {  // 384 columns of down_proj on two ranks
    EXPECT_THAT(model.status().ToString(),
                AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("layers.0.mlp.down_proj.weight"), HasSubstr("--tp")));
  } else {
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_LT(RelativeL2(Logits(*model), LogitsOf(folders.int4(), Exact(), kF32)), 1e-5);
  }
}

// A head that is quantized, and a layer that is not: the tensors say it, not the lists.
TEST_P(Int4FolderTest, EachMatrixSaysItsType) {
  Int4Folders folders(dir_.path(), GetParam(), Seed() + 3);
  folders.Quantized("lm_head.weight", Int4Folders::kVocab, Int4Folders::kHidden);
  folders.Write();
  EXPECT_LT(RelativeL2(LogitsOf(folders.int4(), Exact(), kF32), LogitsOf(folders.plain(), Exact(), kF32)), 1e-5);
  // o_proj of layer 0 in bf16 and f16: any values.
  const std::string name = "model.layers.0.self_attn.o_proj.weight";
  std::vector<float> values(Int4Folders::kHidden * Int4Folders::kQ, 0.0078125f);
  folders.tensors()[name] = test::IsPacked(GetParam())
                                ? test::FloatTensor({Int4Folders::kHidden, Int4Folders::kQ}, values, true)
                                : test::HalfTensor({Int4Folders::kHidden, Int4Folders::kQ}, values);
  test::WriteTensors(folders.int4(), folders.tensors());
  auto plain = SafetensorsFile::Open(folders.plain() + "/model.safetensors");
  ASSERT_TRUE(plain.ok());
  test::Fp8Tensors tensors;
  for (const auto& [each, view] : (*plain)->tensors())
    tensors[each] = {view.type, view.shape, std::vector<std::byte>(view.data, view.data + view.bytes)};
  tensors[name] = test::FloatTensor({Int4Folders::kHidden, Int4Folders::kQ}, values);
  plain->reset();
  test::WriteTensors(folders.plain(), tensors);
  EXPECT_LT(RelativeL2(LogitsOf(folders.int4(), Exact(), kF32), LogitsOf(folders.plain(), Exact(), kF32)), 1e-5);
}

// A GPU against the same folder on the CPU; 4e-3 is the tolerance of bf16. Rows go to all experts, so that no rounding
// decides which.
TEST_P(Int4FolderTest, AGpuAgreesWithTheCpu) {
  if (!test::OnGpu()) GTEST_SKIP() << "SPLICE_BACKEND is not cuda";
  Int4Folders folders(dir_.path(), GetParam(), Seed() + 4);
  folders.config()["num_experts_per_tok"] = 4;
  if (test::IsOrdered(GetParam())) {
    folders.config()["mlp_only_layers"] = {0, 1};  // nowhere are there experts with act-order
    for (const char* part : {"gate_proj", "up_proj"})
      folders.Quantized(std::string("model.layers.1.mlp.") + part + ".weight", Int4Folders::kWidth,
                        Int4Folders::kHidden);
    folders.Quantized("model.layers.1.mlp.down_proj.weight", Int4Folders::kHidden, Int4Folders::kWidth);
  }
  folders.Write();
  const auto gpu = test::DevicesOf("cuda");
  ASSERT_TRUE(gpu.ok()) << gpu.status();
  EXPECT_LT(RelativeL2(LogitsOf(folders.int4(), *gpu, {}), LogitsOf(folders.int4(), *test::DevicesOf("cpu"), {})),
            4e-3);
}

INSTANTIATE_TEST_SUITE_P(Formats, Int4FolderTest, ::testing::ValuesIn(test::kInt4Formats),
                         [](const ::testing::TestParamInfo<Int4Format>& info) {
                           return std::string(test::Int4FormatName(info.param));
                         });

class DamagedInt4Test : public ::testing::Test {
 protected:
  static constexpr const char* kModule = "model.layers.0.self_attn.k_proj";
  static constexpr int64_t kRows = Int4Folders::kKv, kColumns = Int4Folders::kHidden;

  std::string Error(Int4Format format,
                    const std::function<void(test::Fp8Tensors&, const std::string& module)>& damage) {
    Int4Folders folders(dir_.path(), format, Seed());
    damage(folders.tensors(), kModule);
    folders.Write();
    const auto model = Model::Load(folders.int4(), Exact());
    return model.ok() ? "it loaded" : model.status().ToString();
  }
  spl::testing::TempDir dir_;
};

TEST_F(DamagedInt4Test, ScalesThatAreNoPositiveNumbers) {
  const auto with = [&](float scale) {
    return Error(Int4Format::kPackedChannel, [&](test::Fp8Tensors& tensors, const std::string& module) {
      std::vector<float> scales(kRows, 0.01f);
      scales[5] = scale;
      tensors[module + ".weight_scale"] = test::FloatTensor({kRows, 1}, scales);
    });
  };
  EXPECT_EQ(with(0.01f), "it loaded");
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), 0.0f, -1.0f})
    EXPECT_THAT(with(bad), AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("k_proj.weight_scale"), HasSubstr("scale 5"),
                                 HasSubstr("not a positive number")));
}

TEST_F(DamagedInt4Test, MissingTensorsAreNamed) {
  for (const char* name : {".weight_scale", ".weight_shape", ".weight_zero_point"})
    EXPECT_THAT(Error(Int4Format::kPackedZeros,
                      [&](test::Fp8Tensors& tensors, const std::string& module) { tensors.erase(module + name); }),
                AllOf(HasSubstr("NOT_FOUND"), HasSubstr(std::string(kModule) + name)));
  for (const Int4Format format : {Int4Format::kGptq, Int4Format::kAwq}) {
    for (const char* name : {".scales", ".qzeros"})
      EXPECT_THAT(
          Error(format, [&](test::Fp8Tensors& tensors, const std::string& module) { tensors.erase(module + name); }),
          AllOf(HasSubstr("NOT_FOUND"), HasSubstr(std::string(kModule) + name)));
    EXPECT_THAT(
        Error(format, [](test::Fp8Tensors& tensors, const std::string& module) { tensors.erase(module + ".qweight"); }),
        AllOf(HasSubstr("NOT_FOUND"), HasSubstr(std::string(kModule) + ".weight")));
  }
}

TEST_F(DamagedInt4Test, ShapesThatDoNotFit) {
  EXPECT_THAT(
      Error(Int4Format::kPacked,
            [](test::Fp8Tensors& tensors, const std::string& module) {
              tensors[module + ".weight_scale"] = test::FloatTensor({kRows, 4}, std::vector<float>(kRows * 4, 0.01f));
            }),
      AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("k_proj.weight_scale"), HasSubstr("[128, 4]"),
            HasSubstr("groups of 128"), HasSubstr("[128, 2]")));
  EXPECT_THAT(Error(Int4Format::kPacked,
                    [](test::Fp8Tensors& tensors, const std::string& module) {
                      tensors[module + ".weight_shape"] = test::IntTensor<int64_t>({2}, {kRows, 2 * kColumns});
                    }),
              AllOf(HasSubstr("k_proj.weight_shape"), HasSubstr("[128, 512]"), HasSubstr("[128, 256]")));
  // Eight bits a code: the other pack factor.
  EXPECT_THAT(Error(Int4Format::kGptq,
                    [](test::Fp8Tensors& tensors, const std::string& module) {
                      tensors[module + ".qweight"] =
                          test::IntTensor({kColumns / 4, kRows}, std::vector<uint32_t>(kColumns / 4 * kRows));
                    }),
              AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("k_proj.qweight"), HasSubstr("[64, 128]"),
                    HasSubstr("[32, 128]")));
  EXPECT_THAT(Error(Int4Format::kAwq,
                    [](test::Fp8Tensors& tensors, const std::string& module) {
                      tensors[module + ".qzeros"] = test::IntTensor({1, kRows / 8}, std::vector<uint32_t>(kRows / 8));
                    }),
              AllOf(HasSubstr("k_proj.qzeros"), HasSubstr("[1, 16]"), HasSubstr("[2, 16]")));
  EXPECT_THAT(Error(Int4Format::kAwq,
                    [](test::Fp8Tensors& tensors, const std::string& module) {
                      tensors[module + ".qweight"] =
                          test::FloatTensor({kColumns, kRows / 8}, std::vector<float>(kColumns * kRows / 8));
                    }),
              AllOf(HasSubstr("k_proj.qweight"), HasSubstr("I32")));
}

TEST_F(DamagedInt4Test, OrdersThatAreNone) {
  const auto with = [&](const std::function<void(std::vector<int32_t>&)>& change) {
    return Error(Int4Format::kGptqOrdered, [&](test::Fp8Tensors& tensors, const std::string& module) {
      std::vector<int32_t> groups(kColumns);
      std::memcpy(groups.data(), tensors[module + ".g_idx"].bytes.data(), kColumns * 4);
      change(groups);
      tensors[module + ".g_idx"] = test::IntTensor({kColumns}, groups);
    });
  };
  EXPECT_EQ(with([](std::vector<int32_t>&) {}), "it loaded");
  EXPECT_THAT(with([](std::vector<int32_t>& groups) { groups[7] = groups[7] == 0 ? 1 : 0; }),
              AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("k_proj.g_idx"), HasSubstr("32 columns each")));
  EXPECT_THAT(with([](std::vector<int32_t>& groups) { groups[7] = 99; }), HasSubstr("k_proj.g_idx"));
  // Another order than that of q_proj, which is multiplied together with it.
  EXPECT_THAT(with([](std::vector<int32_t>& groups) { std::reverse(groups.begin(), groups.end()); }),
              AllOf(HasSubstr("q_proj.weight"), HasSubstr("k_proj.weight"), HasSubstr("order of their columns")));
}

// GPTQ writes biases of zeros where the model has none.
TEST_F(DamagedInt4Test, BiasesMayBeZeros) {
  for (const auto& [name, size] : {std::pair{"model.layers.0.self_attn.o_proj.bias", Int4Folders::kHidden},
                                   std::pair{"model.layers.0.mlp.up_proj.bias", Int4Folders::kWidth}}) {
    const auto with = [&, name = name, size = size](float last) {
      return Error(Int4Format::kGptq, [&](test::Fp8Tensors& tensors, const std::string&) {
        std::vector<float> bias(size, 0.0f);
        bias.back() = last;
        tensors[name] = test::HalfTensor({size}, bias);
      });
    };
    EXPECT_EQ(with(0), "it loaded");
    EXPECT_THAT(with(0.5f), AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr(name), HasSubstr("bias")));
  }
}

TEST_F(DamagedInt4Test, EmbeddingsMayNotBeQuantized) {
  for (const Int4Format format : {Int4Format::kPacked, Int4Format::kAwq}) {
    Int4Folders folders(dir_.path(), format, Seed());
    folders.Quantized("model.embed_tokens.weight", Int4Folders::kVocab, Int4Folders::kHidden);
    folders.Write();
    EXPECT_THAT(Model::Load(folders.int4(), Exact()).status().ToString(),
                AllOf(HasSubstr("model.embed_tokens.weight"), HasSubstr("int4 is not supported")));
  }
}

TEST(Int4FormatTest, FormatsThatAreNotSupportedAreNamed) {
  const auto error = [](const char* text) {
    return ParseWeightQuantization(json::parse(text), "config.json").status().ToString();
  };
  const std::pair<const char*, const char*> cases[] = {
      {R"({"quant_method": "gptq", "bits": 8, "group_size": 128})", "gptq of 8 bits"},
      {R"({"quant_method": "gptq", "bits": 4, "group_size": 16})", "gptq in groups of 16"},
      {R"({"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"})",
       "gptq checkpoint_format marlin"},
      {R"({"quant_method": "gptq", "bits": 4, "group_size": 128, "is_marlin_format": true})",
       "gptq checkpoint_format marlin"},
      {R"({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"})", "awq version gemv"},
      {R"({"quant_method": "awq", "bits": 4, "group_size": 128, "backend": "llm-awq"})", "awq backend llm-awq"},
      {R"({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": false})", "awq without zero points"},
      {R"({"quant_method": "awq", "bits": 3, "group_size": 128})", "awq of 3 bits"},
      {R"({"quant_method": "bitsandbytes", "load_in_4bit": true})", "bitsandbytes"},
      {R"({"quant_method": "compressed-tensors", "format": "marlin-24"})", "compressed-tensors marlin-24"},
      {R"({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0":
          {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}}})",
       "pack-quantized of 8 bits"},
      {R"({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0":
          {"weights": {"num_bits": 4, "type": "int", "strategy": "tensor"}}}})",
       "strategy tensor"},
      {R"({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0":
          {"weights": {"num_bits": 4, "type": "int", "strategy": "channel"}, "input_activations": {"num_bits": 8}}}})",
       "with quantized activations"},
      {R"({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {
          "group_0": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}},
          "group_1": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}}}})",
       "groups that differ"}};
  for (const auto& [config, name] : cases)
    EXPECT_THAT(error(config), AllOf(HasSubstr("UNIMPLEMENTED"), HasSubstr(name), HasSubstr("int4 weights"))) << config;
  EXPECT_THAT(error(R"({"quant_method": "gptq", "bits": 4})"),
              AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("group_size")));
  EXPECT_THAT(error(R"({"quant_method": "compressed-tensors", "format": "pack-quantized"})"),
              AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("config_groups")));
}

// The scale that the header promises, found by the definition; codes are the nearest.
TEST(QuantizeInt4GroupTest, TakesTheScaleWithTheLeastError) {
  std::mt19937 random(Seed() + 6);
  std::normal_distribution<float> normal;
  bool shrank = false;
  for (const int64_t count : {128, 128, 128, 40, 8}) {
    std::vector<float> values;
    for (int64_t i = 0; i < count; ++i) values.push_back(0.02f * normal(random));
    std::vector<uint8_t> codes(static_cast<size_t>(count));
    const auto scale = QuantizeInt4Group(values.data(), count, codes.data());
    ASSERT_TRUE(scale.ok());
    const auto error_of = [&](float with) {
      double sum = 0;
      for (const float value : values) {
        const double code = std::clamp(std::nearbyint(static_cast<double>(value) / with), -8.0, 7.0);
        sum += (value - with * code) * (value - with * code);
      }
      return sum;
    };
    float largest = 0;
    for (const float value : values) largest = std::max(largest, std::fabs(value));
    double least = std::numeric_limits<double>::infinity(), got = 0;
    for (int i = 0; i < 18; ++i)
      least =
          std::min(least, error_of(kernels::ToFloat(kernels::ToBf16(largest / 7 * (1 - static_cast<float>(i) / 50)))));
    for (int64_t i = 0; i < count; ++i) {
      ASSERT_LE(codes[i], 15);
      const double error = values[i] - *scale * (codes[i] - 8.0);
      got += error * error;
    }
    EXPECT_NEAR(got, least, 1e-4 * least);
    EXPECT_EQ(kernels::ToFloat(kernels::ToBf16(*scale)), *scale);
    shrank |= *scale < 0.95f * largest / 7;
  }
  EXPECT_TRUE(shrank);
}

TEST(QuantizeInt4GroupTest, ZerosAndWhatIsNoNumber) {
  std::vector<float> values(16, 0.0f);
  std::vector<uint8_t> codes(16);
  EXPECT_EQ(*QuantizeInt4Group(values.data(), 16, codes.data()), 1.0f);
  EXPECT_EQ(codes, std::vector<uint8_t>(16, 8));
  values[3] = 1e-38f;
  EXPECT_EQ(*QuantizeInt4Group(values.data(), 16, codes.data()), 1.0f);
  values[3] = 3e38f;
  EXPECT_TRUE(std::isfinite(*QuantizeInt4Group(values.data(), 16, codes.data())));
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    values[3] = bad;
    EXPECT_EQ(QuantizeInt4Group(values.data(), 16, codes.data()).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

// splice-tiny, quantized while it is loaded: another model, whose logits are near, on any number of ranks.
TEST(QuantizeInt4AtLoadTest, SpliceTiny) {
  const ModelOptions int4{.kv_dtype = kernels::DType::kF32, .quantize = QuantizeTo::kInt4};
  const ModelOptions fp8{.kv_dtype = kernels::DType::kF32, .quantize = QuantizeTo::kFp8};
  const auto plain = Model::Load(test::kTinyModel, Exact(), kF32),
             quantized = Model::Load(test::kTinyModel, Exact(), int4),
             in_fp8 = Model::Load(test::kTinyModel, Exact(), fp8),
             on_two = Model::Load(test::kTinyModel, Exact(2), int4);
  ASSERT_TRUE(plain.ok() && quantized.ok() && in_fp8.ok() && on_two.ok())
      << plain.status() << quantized.status() << in_fp8.status() << on_two.status();
  EXPECT_EQ((*quantized)->weight_dtype(), kernels::DType::kInt4);
  EXPECT_EQ((*quantized)->weights_name(), "int4-group128");
  EXPECT_NE((*plain)->fingerprint(), (*quantized)->fingerprint());
  EXPECT_NE((*in_fp8)->fingerprint(), (*quantized)->fingerprint());
  EXPECT_EQ((*quantized)->fingerprint(), (*on_two)->fingerprint());
  EXPECT_NE((*quantized)->head_classes(), nullptr);  // the map of the folder
  const std::vector<float> want = Logits(*plain), got = Logits(*quantized);
  const double change = RelativeL2(got, want);
  std::printf("splice-tiny in int4: logits differ by %.4f (relative L2)\n", change);
  EXPECT_GT(change, 1e-3);
  EXPECT_LT(change, 0.5);
  EXPECT_LT(RelativeL2(Logits(*on_two), got), 1e-4);
}

TEST(QuantizeInt4AtLoadTest, Refusals) {
  spl::testing::TempDir dir;
  const Int4Folders folders(dir.path(), Int4Format::kAwq, Seed());
  EXPECT_THAT(Model::Load(folders.int4(), Exact(), {.quantize = QuantizeTo::kInt4}).status().ToString(),
              AllOf(HasSubstr("--quantize"), HasSubstr("awq")));
  // 384 columns of down_proj on two ranks cut a group of 128.
  EXPECT_THAT(Model::Load(folders.plain(), Exact(2), {.quantize = QuantizeTo::kInt4}).status().ToString(),
              AllOf(HasSubstr("down_proj.weight"), HasSubstr("--tp")));
}

}  // namespace
}  // namespace spl::engine
