// Broken model folders: each is refused with one message that names the file and the reason, and nothing crashes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

#include "kernels/backend/backend.h"
#include "services/engine/engine.h"
#include "services/engine/model/model_config.h"
#include "tests/support/paths.h"

namespace spl::engine {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;

std::string Read(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

// A copy of splice-tiny that a test may damage.
class ModelFolderTest : public testing::Test {
 protected:
  void SetUp() override {
    dir_ = fs::path(testing::TempDir()) / ("model-" + std::to_string(std::random_device{}()));
    fs::copy(test::kTinyModel, dir_);
    fs::remove(dir_ / kMap);  // it is for the undamaged weights
  }
  static constexpr const char* kMap = "head_classes.json";
  void TearDown() override { fs::remove_all(dir_); }

  void Write(const std::string& name, const std::string& bytes) {
    std::ofstream(dir_ / name, std::ios::binary | std::ios::trunc) << bytes;
  }
  void EditJson(const std::string& name, const std::function<void(json&)>& edit) {
    json root = json::parse(Read(dir_ / name));
    edit(root);
    Write(name, root.dump());
  }
  // Rewrites the header of a safetensors file; the data stays.
  void EditHeader(const std::string& name, const std::function<void(json&)>& edit) {
    const std::string file = Read(dir_ / name);
    uint64_t size = 0;
    std::memcpy(&size, file.data(), 8);
    json header = json::parse(file.substr(8, size));
    edit(header);
    const std::string text = header.dump();
    const uint64_t new_size = text.size();
    Write(name, std::string(reinterpret_cast<const char*>(&new_size), 8) + text + file.substr(8 + size));
  }
  std::string LoadError() {
    const auto model = Model::Load(dir_.string(), kernels::MakeCpuBackend());
    return model.ok() ? "it loaded" : model.status().ToString();
  }

  static inline const std::string kShard = "model-00002-of-00003.safetensors";
  fs::path dir_;
};

TEST_F(ModelFolderTest, AnUndamagedCopyLoads) { EXPECT_EQ(LoadError(), "it loaded"); }

TEST_F(ModelFolderTest, MissingFiles) {
  fs::remove(dir_ / kShard);
  EXPECT_THAT(LoadError(), AllOf(HasSubstr(kShard), HasSubstr("cannot open")));
  fs::remove(dir_ / "config.json");
  EXPECT_THAT(LoadError(), HasSubstr("config.json"));
}

TEST_F(ModelFolderTest, TruncatedShard) {
  fs::resize_file(dir_ / kShard, fs::file_size(dir_ / kShard) - 1000);
  EXPECT_THAT(LoadError(), AllOf(HasSubstr(kShard), HasSubstr("outside")));
  fs::resize_file(dir_ / kShard, 100);
  EXPECT_THAT(LoadError(), AllOf(HasSubstr(kShard), HasSubstr("truncated")));
  fs::resize_file(dir_ / kShard, 3);
  EXPECT_THAT(LoadError(), AllOf(HasSubstr(kShard), HasSubstr("too short")));
}

TEST_F(ModelFolderTest, MissingTensor) {
  EditHeader(kShard, [](json& header) { header.erase("model.layers.5.mlp.up_proj.weight"); });
  EXPECT_THAT(LoadError(), HasSubstr("model.layers.5.mlp.up_proj.weight"));
  EditJson("model.safetensors.index.json",
           [](json& index) { index["weight_map"].erase("model.layers.5.mlp.up_proj.weight"); });
  EXPECT_THAT(LoadError(), AllOf(HasSubstr("model.layers.5.mlp.up_proj.weight"), HasSubstr("missing")));
}

TEST_F(ModelFolderTest, WrongShapeAndSize) {
  EditHeader(kShard, [](json& header) {
    std::swap(header["model.layers.5.mlp.up_proj.weight"]["shape"][0],
              header["model.layers.5.mlp.up_proj.weight"]["shape"][1]);
  });
  EXPECT_THAT(LoadError(), AllOf(HasSubstr("up_proj"), HasSubstr("shape [384, 1024]"), HasSubstr("[1024, 384]")));
  EditHeader(kShard, [](json& header) { header["model.layers.5.mlp.up_proj.weight"]["shape"] = {1024, 385}; });
  EXPECT_THAT(LoadError(), AllOf(HasSubstr("up_proj"), HasSubstr("need")));
}

TEST_F(ModelFolderTest, OverlappingTensors) {
  EditHeader(kShard, [](json& header) {
    header["model.layers.5.mlp.up_proj.weight"]["data_offsets"] =
        header["model.layers.5.mlp.gate_proj.weight"]["data_offsets"];
  });
  EXPECT_THAT(LoadError(), AllOf(HasSubstr(kShard), HasSubstr("overlap")));
}

TEST_F(ModelFolderTest, OffsetsOutsideTheFile) {
  EditHeader(kShard, [](json& header) {
    header["model.layers.5.mlp.up_proj.weight"]["data_offsets"] = {uint64_t{1} << 62, (uint64_t{1} << 62) + 786432};
  });
  EXPECT_THAT(LoadError(), AllOf(HasSubstr("up_proj"), HasSubstr("outside")));
}

TEST_F(ModelFolderTest, BadHeaderSizesAndJson) {
  const std::string file = Read(dir_ / kShard);
  Write(kShard, std::string(8, '\xff') + file.substr(8));
  EXPECT_THAT(LoadError(), AllOf(HasSubstr(kShard), HasSubstr("header claims")));
  Write(kShard, file.substr(0, 8) + "[" + file.substr(9));
  EXPECT_THAT(LoadError(), AllOf(HasSubstr(kShard), HasSubstr("not a JSON object")));
}

TEST_F(ModelFolderTest, UnsupportedTypeOfATensor) {
  EditHeader(kShard, [](json& header) { header["model.layers.5.mlp.up_proj.weight"]["dtype"] = "F8_E5M2"; });
  EXPECT_THAT(LoadError(), AllOf(HasSubstr("up_proj"), HasSubstr("F8_E5M2")));
}

TEST_F(ModelFolderTest, AShardNameCannotLeaveTheFolder) {
  EditJson("model.safetensors.index.json",
           [](json& index) { index["weight_map"]["model.norm.weight"] = "../../etc/passwd"; });
  EXPECT_THAT(LoadError(), AllOf(HasSubstr("index.json"), HasSubstr("plain file name")));
}

TEST_F(ModelFolderTest, ConfigFields) {
  const std::string config = Read(dir_ / "config.json");
  const auto error = [&](const std::function<void(json&)>& edit) {
    Write("config.json", config);
    EditJson("config.json", edit);
    return LoadError();
  };
  EXPECT_THAT(error([](json& c) { c["architectures"] = {"MambaForCausalLM"}; }),
              AllOf(HasSubstr("UNIMPLEMENTED"), HasSubstr("config.json: architectures: must be one of"),
                    HasSubstr("MambaForCausalLM")));
  EXPECT_THAT(error([](json& c) { c.erase("hidden_size"); }), AllOf(HasSubstr("hidden_size"), HasSubstr("missing")));
  EXPECT_THAT(error([](json& c) { c["hidden_size"] = "384"; }), AllOf(HasSubstr("hidden_size"), HasSubstr("integer")));
  EXPECT_THAT(error([](json& c) { c["num_key_value_heads"] = 3; }), HasSubstr("num_key_value_heads"));
  EXPECT_THAT(error([](json& c) { c["num_hidden_layers"] = 0; }), HasSubstr("num_hidden_layers"));
  EXPECT_THAT(error([](json& c) {
                c["rope_scaling"] = {{"rope_type", "dynamic"}, {"factor", 2.0}};
              }),
              AllOf(HasSubstr("UNIMPLEMENTED"), HasSubstr("rope_scaling.rope_type: must be"), HasSubstr("dynamic")));
  EXPECT_THAT(error([](json& c) { c["rope_theta"] = -1; }), HasSubstr("rope_theta"));
  EXPECT_THAT(error([](json& c) { c["hidden_act"] = "gelu"; }), HasSubstr("gelu"));
  EXPECT_THAT(error([](json& c) { c["mlp_bias"] = true; }), HasSubstr("mlp_bias"));
  EXPECT_THAT(error([](json& c) { c["torch_dtype"] = "int8"; }), HasSubstr("int8"));
  Write("config.json", "{");
  EXPECT_THAT(LoadError(), HasSubstr("config.json: is not JSON"));
}

// config.json texts of the families, by the fields that matter.
json FamilyConfig(const std::string& architecture) {
  json c = {{"architectures", {architecture}},
            {"hidden_size", 64},
            {"intermediate_size", 96},
            {"num_hidden_layers", 6},
            {"num_attention_heads", 4},
            {"num_key_value_heads", 2},
            {"vocab_size", 512},
            {"head_dim", nullptr},
            {"max_position_embeddings", 2048},
            {"torch_dtype", "bfloat16"},
            {"rope_scaling", nullptr},
            {"sliding_window", nullptr}};
  if (architecture == "Qwen3MoeForCausalLM")
    c.update({{"num_experts", 8}, {"num_experts_per_tok", 2}, {"moe_intermediate_size", 48}, {"norm_topk_prob", true}});
  return c;
}

ModelConfig Parsed(const json& c) {
  auto config = ParseModelConfig(c.dump(), "config.json");
  EXPECT_TRUE(config.ok()) << config.status();
  return config.ok() ? *config : ModelConfig{};
}

std::string ParseError(const json& c) {
  const auto config = ParseModelConfig(c.dump(), "dir/config.json");
  return config.ok() ? "it parsed" : config.status().ToString();
}

TEST(FamilyConfigTest, WhatSetsTheFamiliesApart) {
  const ModelConfig llama = Parsed(FamilyConfig("LlamaForCausalLM"));
  EXPECT_EQ(llama.head_dim, 16);  // null: hidden / heads
  EXPECT_FALSE(llama.qk_norm || llama.attention_bias);
  const ModelConfig qwen2 = Parsed(FamilyConfig("Qwen2ForCausalLM"));
  EXPECT_TRUE(qwen2.attention_bias);
  EXPECT_FALSE(qwen2.qk_norm);
  json c = FamilyConfig("Qwen3ForCausalLM");
  c["head_dim"] = 32;
  const ModelConfig qwen3 = Parsed(c);
  EXPECT_EQ(qwen3.head_dim, 32);
  EXPECT_TRUE(qwen3.qk_norm);
  EXPECT_FALSE(qwen3.attention_bias);
  EXPECT_FALSE(qwen3.is_moe_layer(0));
}

TEST(FamilyConfigTest, SlidingWindowOfMistral) {
  json c = FamilyConfig("MistralForCausalLM");
  EXPECT_THAT(Parsed(c).sliding_windows, testing::IsEmpty());
  EXPECT_EQ(Parsed(c).visibility(3).rule, kernels::VisibilityRule::kFull);
  c["sliding_window"] = 48;
  EXPECT_THAT(Parsed(c).sliding_windows, testing::Each(48));
  const kernels::HeadVisibility v = Parsed(c).visibility(3);
  EXPECT_EQ(v.rule, kernels::VisibilityRule::kBand);
  EXPECT_EQ(v.window, 48);
  EXPECT_EQ(v.num_sinks, 0);
  c.erase("sliding_window");
  EXPECT_THAT(Parsed(c).sliding_windows, testing::Each(4096)) << "the family's default";
  c["layer_types"] = {"full_attention",    "sliding_attention", "full_attention",
                      "sliding_attention", "full_attention",    "full_attention"};
  c["sliding_window"] = 7;
  EXPECT_THAT(Parsed(c).sliding_windows, testing::ElementsAre(0, 7, 0, 7, 0, 0));
  c["sliding_window"] = 0;
  EXPECT_THAT(ParseError(c), AllOf(HasSubstr("dir/config.json"), HasSubstr("sliding_window")));
}

TEST(FamilyConfigTest, SlidingWindowOfQwen) {
  for (const char* architecture : {"Qwen2ForCausalLM", "Qwen3ForCausalLM"}) {
    json c = FamilyConfig(architecture);
    c.update({{"sliding_window", 100}, {"max_window_layers", 4}, {"use_sliding_window", false}});
    EXPECT_THAT(Parsed(c).sliding_windows, testing::IsEmpty());
    c["use_sliding_window"] = true;
    EXPECT_THAT(Parsed(c).sliding_windows, testing::ElementsAre(0, 0, 0, 0, 100, 100));
    c["max_window_layers"] = 6;
    EXPECT_THAT(Parsed(c).sliding_windows, testing::IsEmpty());
    c["max_window_layers"] = 28;
    EXPECT_THAT(Parsed(c).sliding_windows, testing::IsEmpty());
    c["layer_types"] = {"full_attention"};
    EXPECT_THAT(ParseError(c),
                AllOf(HasSubstr("layer_types"), HasSubstr("must have 6 entries (num_hidden_layers), got 1")));
    c["layer_types"] = json::array({"full_attention", "full_attention", "full_attention", "chunked_attention",
                                    "full_attention", "full_attention"});
    EXPECT_THAT(ParseError(c), AllOf(HasSubstr("UNIMPLEMENTED"), HasSubstr("chunked_attention")));
    c["layer_types"] = json::array({"full_attention", "full_attention", "full_attention", "sliding_attention",
                                    "full_attention", "full_attention"});
    EXPECT_THAT(Parsed(c).sliding_windows, testing::ElementsAre(0, 0, 0, 100, 0, 0));
    c["use_sliding_window"] = false;
    EXPECT_THAT(ParseError(c), AllOf(HasSubstr("layer_types"), HasSubstr("no sliding_window")));
  }
  json moe = FamilyConfig("Qwen3MoeForCausalLM");
  moe["use_sliding_window"] = true;
  EXPECT_THAT(ParseError(moe), AllOf(HasSubstr("UNIMPLEMENTED"), HasSubstr("use_sliding_window")));
}

TEST(FamilyConfigTest, MixtureOfExperts) {
  json c = FamilyConfig("Qwen3MoeForCausalLM");
  ModelConfig config = Parsed(c);
  EXPECT_EQ(config.moe.num_experts, 8);
  EXPECT_EQ(config.moe.num_experts_per_token, 2);
  EXPECT_EQ(config.moe.intermediate_size, 48);
  EXPECT_TRUE(config.moe.renormalize && config.qk_norm);
  for (int layer = 0; layer < 6; ++layer) EXPECT_TRUE(config.is_moe_layer(layer));
  c["decoder_sparse_step"] = 2;
  c["mlp_only_layers"] = {3, 0};
  config = Parsed(c);
  for (int layer = 0; layer < 6; ++layer) EXPECT_EQ(config.is_moe_layer(layer), layer == 1 || layer == 5) << layer;

  const auto error = [&](const char* field, const json& value) {
    json wrong = FamilyConfig("Qwen3MoeForCausalLM");
    wrong[field] = value;
    return ParseError(wrong);
  };
  EXPECT_THAT(error("num_experts", nullptr), AllOf(HasSubstr("num_experts"), HasSubstr("missing")));
  EXPECT_THAT(error("num_experts", 0), HasSubstr("num_experts"));
  EXPECT_THAT(error("num_experts_per_tok", 9),
              AllOf(HasSubstr("num_experts_per_tok"), HasSubstr("at most num_experts")));
  EXPECT_THAT(error("num_experts_per_tok", nullptr), HasSubstr("num_experts_per_tok"));
  EXPECT_THAT(error("moe_intermediate_size", nullptr), HasSubstr("moe_intermediate_size"));
  EXPECT_THAT(error("decoder_sparse_step", 0), HasSubstr("decoder_sparse_step"));
  EXPECT_THAT(error("mlp_only_layers", "all"), HasSubstr("mlp_only_layers"));
  EXPECT_THAT(error("mlp_only_layers", {-1}), HasSubstr("mlp_only_layers"));
  EXPECT_THAT(error("norm_topk_prob", 1), HasSubstr("norm_topk_prob"));
}

TEST(FamilyConfigTest, RefusesWhatItCannotRun) {
  json c = FamilyConfig("Qwen3ForCausalLM");
  c["quantization_config"] = {{"quant_method", "bitsandbytes"}};
  EXPECT_THAT(ParseError(c), AllOf(HasSubstr("UNIMPLEMENTED"), HasSubstr("bitsandbytes")));
  c = FamilyConfig("Qwen3ForCausalLM");
  c["rope_parameters"] = {{"full_attention", {{"rope_type", "default"}, {"rope_theta", 1e6}}}};
  EXPECT_THAT(ParseError(c), AllOf(HasSubstr("UNIMPLEMENTED"), HasSubstr("rope_parameters")));
  c["rope_parameters"] = {{"rope_type", "default"}, {"partial_rotary_factor", 0.5}};
  EXPECT_THAT(ParseError(c), AllOf(HasSubstr("UNIMPLEMENTED"), HasSubstr("partial_rotary_factor")));
}

TEST(FamilyConfigTest, RopeParametersOfNewerFolders) {
  json c = FamilyConfig("Qwen3ForCausalLM");
  c.erase("rope_scaling");
  c["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 1e6}};
  EXPECT_EQ(Parsed(c).rope.theta, 1e6);
  EXPECT_EQ(Parsed(c).rope.scaling, RopeScaling::kNone);
  c["rope_parameters"] = {
      {"rope_type", "yarn"}, {"rope_theta", 5e6}, {"factor", 4.0}, {"original_max_position_embeddings", 1024}};
  const ModelConfig yarn = Parsed(c);
  EXPECT_EQ(yarn.rope.theta, 5e6);
  EXPECT_EQ(yarn.rope.scaling, RopeScaling::kYarn);
  EXPECT_EQ(yarn.rope.original_max_positions, 1024);
}

// The map beside a model is used unasked, so it must be of these weights.
TEST_F(ModelFolderTest, AMapOfOtherWeightsIsRefused) {
  EXPECT_EQ((*Model::Load(dir_.string(), kernels::MakeCpuBackend()))->head_classes(), nullptr);
  fs::copy(fs::path(test::kTinyModel) / kMap, dir_ / kMap);
  EXPECT_NE((*Model::Load(dir_.string(), kernels::MakeCpuBackend()))->head_classes(), nullptr);
  EditJson("config.json", [](json& c) { c["rope_theta"] = 10000.0; });
  EXPECT_THAT(LoadError(), testing::HasSubstr("FAILED_PRECONDITION"));
  EXPECT_THAT(LoadError(), testing::HasSubstr("splice profile"));
  EXPECT_THAT(LoadError(), testing::HasSubstr(kMap));
  const auto without = Model::Load(dir_.string(), kernels::MakeCpuBackend(), {.head_classes = "none"});
  EXPECT_TRUE(without.ok()) << without.status();
}

TEST_F(ModelFolderTest, TheFingerprintFollowsWeightsAndConfiguration) {
  const auto fingerprint = [&] { return (*Model::Load(dir_.string(), kernels::MakeCpuBackend()))->fingerprint(); };
  const auto original = fingerprint();
  EXPECT_EQ(fingerprint(), original);
  EditJson("config.json", [](json& c) { c["rope_theta"] = 10000.0; });
  EXPECT_NE(fingerprint(), original);
  EditJson("config.json", [](json& c) { c["rope_theta"] = 500000.0; });
  const std::string config = Read(dir_ / "config.json");
  EditJson("config.json", [](json& c) { c["architectures"] = {"MistralForCausalLM"}; });
  const auto window_4096 = fingerprint();
  EditJson("config.json", [](json& c) { c["sliding_window"] = 100; });
  EXPECT_NE(fingerprint(), window_4096);
  Write("config.json", config);
  EXPECT_EQ(fingerprint(), original);
  std::string shard = Read(dir_ / kShard);
  shard.back() = static_cast<char>(shard.back() ^ 1);
  Write(kShard, shard);
  EXPECT_NE(fingerprint(), original);
}

TEST(SafetensorsTest, WhatIsWrittenIsRead) {
  const std::string path = testing::TempDir() + "roundtrip.safetensors";
  const std::vector<float> a = {1, 2, 3, 4, 5, 6};
  const std::vector<NamedTensor> tensors = {{"a", TensorType::kF32, {2, 3}, a.data()},
                                            {"empty", TensorType::kF32, {0, 3}, nullptr}};
  ASSERT_TRUE(WriteSafetensors(path, tensors).ok());
  const auto file = SafetensorsFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  const auto read = (*file)->Find("a");
  ASSERT_TRUE(read.ok());
  EXPECT_THAT(read->shape, testing::ElementsAre(2, 3));
  EXPECT_EQ(std::memcmp(read->data, a.data(), read->bytes), 0);
  EXPECT_EQ((*file)->Find("empty")->bytes, 0u);
  EXPECT_EQ((*file)->Find("b").status().code(), absl::StatusCode::kNotFound);
}

TEST(RopeTest, Llama3ScalingLeavesHighFrequenciesAndStretchesLowOnes) {
  RopeConfig rope{.theta = 500000,
                  .scaling = RopeScaling::kLlama3,
                  .factor = 8,
                  .low_freq_factor = 1,
                  .high_freq_factor = 4,
                  .original_max_positions = 8192};
  RopeConfig plain{.theta = 500000};
  const auto scaled = InverseFrequencies(rope, 128), unscaled = InverseFrequencies(plain, 128);
  EXPECT_EQ(scaled.front(), unscaled.front());
  EXPECT_FLOAT_EQ(scaled.back(), unscaled.back() / 8);
  for (size_t i = 0; i < scaled.size(); ++i) {
    EXPECT_LE(scaled[i], unscaled[i]);
    EXPECT_GE(scaled[i], unscaled[i] / 8 * 0.999f);
    if (i > 0) {
      EXPECT_LT(scaled[i], scaled[i - 1]);
    }
  }
}

// YaRN as its paper and published code define it, written out once more: pairs that turn more than beta_fast times over
// the original context keep their frequency, those that turn less than beta_slow times are divided by the factor.
TEST(RopeTest, YarnIsTheInterpolationByPartsOfThePaper) {
  json c = FamilyConfig("Qwen3ForCausalLM");
  c.update({{"head_dim", 128}, {"rope_theta", 1e6}, {"max_position_embeddings", 40960}});
  c["rope_scaling"] = {{"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 32768}};
  const ModelConfig config = Parsed(c);
  EXPECT_EQ(config.max_positions, 131072);
  EXPECT_NEAR(config.rope.attention_factor, 0.1 * std::log(4.0) + 1, 1e-12);
  const std::vector<float> plain = InverseFrequencies({.theta = 1e6}, 128);
  const std::vector<float> yarn = InverseFrequencies(config.rope, 128);
  const auto turns = [&](double pair) { return 32768.0 * std::pow(1e6, -pair / 64) / (2 * M_PI); };
  // The ends of the blend, found by search instead of by the logarithm: the last whole pair with more than 32 turns,
  // and the first with less than one.
  int low = 0, high = 0;
  while (turns(low + 1) >= 32) ++low;
  while (turns(high) > 1) ++high;
  EXPECT_EQ(low, 23);
  EXPECT_EQ(high, 40);
  for (int i = 0; i < 64; ++i) {
    const double stretched = std::clamp((i - low) / double(high - low), 0.0, 1.0);
    const double want = plain[i] * (1 - stretched) + plain[i] / 4 * stretched;
    EXPECT_NEAR(yarn[i], want, 2e-7 * want) << i;
    if (i <= low) {
      EXPECT_EQ(yarn[i], plain[i]);
    }
    if (i >= high) {
      EXPECT_FLOAT_EQ(yarn[i], plain[i] / 4);
    }
  }
  // Without truncation the blend starts and ends between pairs.
  c["rope_scaling"]["truncate"] = false;
  const std::vector<float> fractional = InverseFrequencies(Parsed(c).rope, 128);
  const double low_end = 64 * std::log(32768 / (32 * 2 * M_PI)) / std::log(1e6);
  const double high_end = 64 * std::log(32768 / (2 * M_PI)) / std::log(1e6);
  const double stretched = (30 - low_end) / (high_end - low_end);
  EXPECT_NEAR(fractional[30], plain[30] * (1 - stretched * 0.75), 1e-6 * plain[30]);
}

TEST(RopeTest, YarnFieldsAndErrors) {
  json c = FamilyConfig("Qwen2ForCausalLM");
  c["rope_scaling"] = {{"type", "yarn"}, {"factor", 2.0}};
  EXPECT_EQ(Parsed(c).rope.original_max_positions, 2048) << "the context of the configuration";
  EXPECT_EQ(Parsed(c).max_positions, 4096);
  c["rope_scaling"]["attention_factor"] = 1.5;
  EXPECT_EQ(Parsed(c).rope.attention_factor, 1.5);
  c["rope_scaling"] = {{"type", "yarn"}, {"factor", 40.0}, {"mscale", 0.5}, {"mscale_all_dim", 1.0}};
  EXPECT_NEAR(Parsed(c).rope.attention_factor, (0.05 * std::log(40.0) + 1) / (0.1 * std::log(40.0) + 1), 1e-12);
  c["rope_scaling"] = {{"type", "yarn"}};
  EXPECT_THAT(ParseError(c), AllOf(HasSubstr("config.json"), HasSubstr("rope_scaling"), HasSubstr("factor")));
  c["rope_scaling"] = {{"type", "yarn"}, {"factor", 0.5}};
  EXPECT_THAT(ParseError(c), AllOf(HasSubstr("factor"), HasSubstr("must be at least 1")));
  c["rope_scaling"] = {{"type", "yarn"}, {"factor", 2.0}, {"beta_fast", 1.0}, {"beta_slow", 2.0}};
  EXPECT_THAT(ParseError(c), HasSubstr("beta_fast"));
  c["rope_scaling"] = {{"type", "yarn"}, {"factor", 1e9}};
  EXPECT_THAT(ParseError(c), HasSubstr("rope_scaling"));
  c["rope_scaling"] = "yarn";
  EXPECT_THAT(ParseError(c), AllOf(HasSubstr("rope_scaling"), HasSubstr("must be an object")));
}

}  // namespace
}  // namespace spl::engine
