// Broken model folders: each is refused with one message that names the file and the reason, and nothing crashes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

#include "kernels/common/backend.h"
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
  }
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
  EditHeader(kShard, [](json& header) { header["model.layers.5.mlp.up_proj.weight"]["dtype"] = "F8_E4M3"; });
  EXPECT_THAT(LoadError(), AllOf(HasSubstr("up_proj"), HasSubstr("F8_E4M3")));
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
              AllOf(HasSubstr("MambaForCausalLM"), HasSubstr("config.json"), HasSubstr("not supported")));
  EXPECT_THAT(error([](json& c) { c.erase("hidden_size"); }), AllOf(HasSubstr("hidden_size"), HasSubstr("missing")));
  EXPECT_THAT(error([](json& c) { c["hidden_size"] = "384"; }), AllOf(HasSubstr("hidden_size"), HasSubstr("integer")));
  EXPECT_THAT(error([](json& c) { c["num_key_value_heads"] = 3; }), HasSubstr("num_key_value_heads"));
  EXPECT_THAT(error([](json& c) { c["num_hidden_layers"] = 0; }), HasSubstr("num_hidden_layers"));
  EXPECT_THAT(error([](json& c) {
                c["rope_scaling"] = {{"rope_type", "dynamic"}, {"factor", 2.0}};
              }),
              AllOf(HasSubstr("dynamic"), HasSubstr("not supported")));
  EXPECT_THAT(error([](json& c) { c["rope_theta"] = -1; }), HasSubstr("rope_theta"));
  EXPECT_THAT(error([](json& c) { c["hidden_act"] = "gelu"; }), HasSubstr("gelu"));
  EXPECT_THAT(error([](json& c) { c["mlp_bias"] = true; }), HasSubstr("mlp_bias"));
  EXPECT_THAT(error([](json& c) { c["torch_dtype"] = "int8"; }), HasSubstr("int8"));
  Write("config.json", "{");
  EXPECT_THAT(LoadError(), HasSubstr("not a JSON object"));
}

TEST_F(ModelFolderTest, TheFingerprintFollowsWeightsAndConfiguration) {
  const auto fingerprint = [&] { return (*Model::Load(dir_.string(), kernels::MakeCpuBackend()))->fingerprint(); };
  const auto original = fingerprint();
  EXPECT_EQ(fingerprint(), original);
  EditJson("config.json", [](json& c) { c["rope_theta"] = 10000.0; });
  EXPECT_NE(fingerprint(), original);
  EditJson("config.json", [](json& c) { c["rope_theta"] = 500000.0; });
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

}  // namespace
}  // namespace spl::engine
