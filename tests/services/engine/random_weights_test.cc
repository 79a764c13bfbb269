// Models without a checkpoint: shapes, names, and weights that follow from seed and tensor name alone.
#include "services/engine/model/random_weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>

#include "kernels/backend/backend.h"
#include "services/engine/engine.h"
#include "tests/support/model_logits.h"

namespace spl::engine {
namespace {

namespace fs = std::filesystem;
using test::Logits;
using testing::AllOf;
using testing::HasSubstr;

// Weights of the model in 1e9, as its card states them.
double Billions(const ModelConfig& c) {
  double layers = 0;
  for (int32_t i = 0; i < c.num_layers; ++i) {
    layers += double(c.hidden_size) * (2.0 * c.q_size() + 2.0 * c.kv_size());
    layers += c.is_moe_layer(i) ? c.moe.num_experts * (3.0 * c.hidden_size * c.moe.intermediate_size + c.hidden_size)
                                : 3.0 * c.hidden_size * c.intermediate_size;
  }
  return (layers + double(c.vocab_size) * c.hidden_size * (c.tie_word_embeddings ? 1 : 2)) / 1e9;
}

TEST(RandomModelTest, TheShapesAreThoseOfThePublishedModels) {
  const std::map<std::string, double> published = {{"llama-3.1-8b", 8.03},
                                                   {"llama-3.3-70b", 70.6},
                                                   {"qwen3-8b", 8.19},
                                                   {"qwen3-32b", 32.8},
                                                   {"qwen3-30b-a3b", 30.5}};
  EXPECT_EQ(RandomShapeNames().size(), published.size());
  for (const auto& [name, billions] : published) {
    const auto model = ParseRandomModel(name);
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_EQ(model->config.name, name);
    EXPECT_EQ(model->config.dtype, kernels::DType::kBF16);
    EXPECT_NEAR(Billions(model->config), billions, 0.005 * billions) << name;
  }
}

TEST(RandomModelTest, SeedsAndErrors) {
  EXPECT_EQ(ParseRandomModel("qwen3-8b")->seed, 0u);
  EXPECT_EQ(ParseRandomModel("qwen3-8b:18446744073709551615")->seed, UINT64_MAX);
  EXPECT_EQ(ParseRandomModel("qwen3-8b:7")->config.name, "qwen3-8b");
  for (const char* spec : {"qwen3-8b:18446744073709551616", "qwen3-8b:x", "qwen3-8b:", "qwen3-8b:-1"})
    EXPECT_THAT(ParseRandomModel(spec).status().ToString(), AllOf(HasSubstr(spec), HasSubstr("seed")));
  EXPECT_THAT(ParseRandomModel("gpt-5").status().ToString(),
              AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("gpt-5"), HasSubstr("qwen3-30b-a3b")));
  EXPECT_FALSE(ParseRandomModel("").ok());
}

// The numbers of a tensor are a format: figures that name a seed depend on them.
TEST(RandomModelTest, StreamsFollowFromSeedAndName) {
  EXPECT_EQ(RandomStream(0, "model.embed_tokens.weight"), 0x07878fab874758ceull);
  EXPECT_EQ(RandomStream(7, "model.embed_tokens.weight"), 0xa2b66666542ca644ull);
  EXPECT_NE(RandomStream(0, "model.layers.0.self_attn.q_proj.weight"),
            RandomStream(0, "model.layers.1.self_attn.q_proj.weight"));
}

class RandomWeightsTest : public testing::Test {
 protected:
  void SetUp() override {
    dir_ = fs::path(testing::TempDir()) / ("random-" + std::to_string(std::random_device{}())) / "little-moe";
    fs::create_directories(dir_);
    std::ofstream(dir_ / "config.json") << R"({
      "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
      "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 300,
      "max_position_embeddings": 512, "torch_dtype": "bfloat16", "num_experts": 4, "num_experts_per_tok": 2,
      "moe_intermediate_size": 40, "norm_topk_prob": true, "mlp_only_layers": [1], "attention_bias": true,
      "tie_word_embeddings": false})";
    config_path_ = (dir_ / "config.json").string();
  }
  void TearDown() override { fs::remove_all(dir_.parent_path()); }

  std::shared_ptr<const Model> Random(const std::string& seed, std::shared_ptr<const kernels::Backend> backend) {
    const auto random = ParseRandomModel(config_path_ + seed);
    EXPECT_TRUE(random.ok()) << random.status();
    auto model = Model::LoadRandom(*random, std::move(backend), {.kv_dtype = kernels::DType::kF32});
    EXPECT_TRUE(model.ok()) << model.status();
    return *model;
  }

  // The same weights as a checkpoint, element by element from the definition.
  void WriteCheckpoint(uint64_t seed) {
    std::vector<std::vector<kernels::bf16>> data;
    std::vector<NamedTensor> tensors;
    const auto add = [&](const std::string& name, std::vector<int64_t> shape) {
      int64_t count = 1;
      for (int64_t n : shape) count *= n;
      std::vector<kernels::bf16>& values = data.emplace_back();
      const bool norm = name.ends_with("norm.weight");
      for (int64_t i = 0; i < count; ++i)
        values.push_back(
            kernels::ToBf16(norm ? 1.0f : std::ldexp(float(kernels::RandomStep(RandomStream(seed, name), i)), -11)));
      tensors.push_back({name, TensorType::kBF16, std::move(shape), values.data()});
    };
    add("model.embed_tokens.weight", {300, 64});
    add("model.norm.weight", {64});
    add("lm_head.weight", {300, 64});
    for (int layer = 0; layer < 3; ++layer) {
      const std::string prefix = "model.layers." + std::to_string(layer) + ".";
      add(prefix + "input_layernorm.weight", {64});
      add(prefix + "post_attention_layernorm.weight", {64});
      for (const auto& [name, rows] : {std::pair{"q_proj", 128}, {"k_proj", 64}, {"v_proj", 64}}) {
        add(prefix + "self_attn." + name + ".weight", {rows, 64});
        add(prefix + "self_attn." + name + ".bias", {rows});
      }
      add(prefix + "self_attn.q_norm.weight", {32});
      add(prefix + "self_attn.k_norm.weight", {32});
      add(prefix + "self_attn.o_proj.weight", {64, 128});
      const auto add_ffn = [&](const std::string& mlp, int64_t width) {
        add(mlp + "gate_proj.weight", {width, 64});
        add(mlp + "up_proj.weight", {width, 64});
        add(mlp + "down_proj.weight", {64, width});
      };
      if (layer == 1) {
        add_ffn(prefix + "mlp.", 96);
        continue;
      }
      add(prefix + "mlp.gate.weight", {4, 64});
      for (int e = 0; e < 4; ++e) add_ffn(prefix + "mlp.experts." + std::to_string(e) + ".", 40);
    }
    ASSERT_TRUE(WriteSafetensors((dir_ / "model.safetensors").string(), tensors).ok());
  }

  fs::path dir_;
  std::string config_path_;
};

TEST_F(RandomWeightsTest, EqualACheckpointWithTheSameNumbers) {
  WriteCheckpoint(5);
  for (const auto compute : {kernels::GemmCompute::kF32, kernels::GemmCompute::kAuto}) {
    const auto backend = [&] { return std::shared_ptr<const kernels::Backend>(kernels::MakeCpuBackend({compute})); };
    const auto loaded = Model::Load(dir_.string(), backend(), {.kv_dtype = kernels::DType::kF32});
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    const auto random = Random(":5", backend());
    EXPECT_EQ(Logits(*loaded), Logits(random));
    EXPECT_EQ(random->config().name, "little-moe");
    EXPECT_EQ(random->layout_digest(), (*loaded)->layout_digest());
    EXPECT_NE(random->fingerprint(), (*loaded)->fingerprint());
  }
}

TEST_F(RandomWeightsTest, NeitherThreadsNorTheBackendChangeThem) {
  const auto cpu = [] {
    return std::shared_ptr<const kernels::Backend>(kernels::MakeCpuBackend({kernels::GemmCompute::kF32}));
  };
  const std::vector<float> want = Logits(Random("", cpu()), 1);
  EXPECT_EQ(Logits(Random(":0", cpu()), 4), want);
  const std::vector<float> reference = Logits(Random("", kernels::MakeReferenceBackend()));
  double difference = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    difference += std::pow(double(want[i]) - reference[i], 2);
    norm += std::pow(double(reference[i]), 2);
  }
  EXPECT_LE(std::sqrt(difference / norm), 1e-4);
  EXPECT_GT(norm, 0);
}

TEST_F(RandomWeightsTest, SeedsGiveDifferentModels) {
  const auto a = Random(":1", kernels::MakeCpuBackend()), b = Random(":2", kernels::MakeCpuBackend());
  EXPECT_NE(Logits(a), Logits(b));
  EXPECT_NE(a->fingerprint(), b->fingerprint());
  EXPECT_EQ(a->fingerprint(), Random(":1", kernels::MakeCpuBackend())->fingerprint());
}

// Missing and wrong tensors of experts are named.
TEST_F(RandomWeightsTest, ACheckpointWithoutAnExpertIsRefused) {
  WriteCheckpoint(5);
  std::string config = R"({"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
      "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 300,
      "max_position_embeddings": 512, "torch_dtype": "bfloat16", "num_experts": 5, "num_experts_per_tok": 2,
      "moe_intermediate_size": 40, "norm_topk_prob": true, "mlp_only_layers": [1], "attention_bias": true})";
  std::ofstream(config_path_) << config;
  EXPECT_THAT(Model::Load(dir_.string(), kernels::MakeCpuBackend()).status().ToString(),
              AllOf(HasSubstr("mlp.gate.weight"), HasSubstr("[5, 64]")));
  config.replace(config.find("\"num_experts\": 5"), 16, "\"num_experts\": 4");
  config.replace(config.find("size\": 40"), 9, "size\": 41");
  std::ofstream(config_path_) << config;
  EXPECT_THAT(Model::Load(dir_.string(), kernels::MakeCpuBackend()).status().ToString(),
              AllOf(HasSubstr("experts.0.gate_proj.weight"), HasSubstr("[41, 64]")));
}

}  // namespace
}  // namespace spl::engine
