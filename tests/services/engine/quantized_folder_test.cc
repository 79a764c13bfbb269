// splice quantize: what it writes loads, and computes bit by bit what --quantize fp8 does.
#include "services/engine/model/quantized_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "services/engine/engine.h"
#include "services/engine/model/fp8_quantization.h"
#include "tests/support/engine_devices.h"
#include "tests/support/fp8_folders.h"
#include "tests/support/model_logits.h"
#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"

namespace spl::engine {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using test::Fp8Folders;
using test::Fp8Format;
using test::Logits;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr uint32_t kSeed = 71;

json ReadJson(const fs::path& path) {
  std::ifstream in(path);
  return json::parse(in, nullptr, false);
}

std::vector<std::string> FilesOf(const fs::path& dir) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(dir)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

class QuantizedFolderTest : public ::testing::Test {
 protected:
  std::string Out() const { return dir_.path() + "/out"; }

  // The written folder against the source quantized at load.
  std::shared_ptr<const Model> ExpectSameAsAtLoad(const std::string& source, QuantizeTo to = QuantizeTo::kFp8,
                                                  const std::string& weights = "fp8-e4m3-channel") {
    const auto devices = test::DevicesOf("cpu");
    EXPECT_TRUE(devices.ok());
    auto written = Model::Load(Out(), *devices), at_load = Model::Load(source, *devices, {.quantize = to});
    EXPECT_TRUE(written.ok() && at_load.ok()) << written.status() << at_load.status();
    if (!written.ok() || !at_load.ok()) return nullptr;
    EXPECT_EQ((*written)->weights_name(), weights);
    EXPECT_EQ(Logits(*written), Logits(*at_load));
    return *written;
  }
  std::string Error(const std::string& source, const std::string& out) {
    return WriteQuantizedFolder(source, out, QuantizeTo::kFp8).status().ToString();
  }

  spl::testing::TempDir dir_;
};

TEST_F(QuantizedFolderTest, SpliceTinyIsTheModelThatIsQuantizedAtLoad) {
  std::vector<QuantizedFolderProgress> seen;
  const auto folder = WriteQuantizedFolder(test::kTinyModel, Out() + "/", QuantizeTo::kFp8,
                                           [&](const auto& at) { seen.push_back(at); });
  ASSERT_TRUE(folder.ok()) << folder.status();
  EXPECT_EQ(folder->num_shards, 3);
  EXPECT_EQ(folder->num_quantized, 12 * 7);
  EXPECT_LT(folder->bytes_after, folder->bytes_before * 0.6);  // the embedding stays in bf16
  EXPECT_EQ(FilesOf(Out()), FilesOf(test::kTinyModel));
  EXPECT_FALSE(fs::exists(Out() + ".partial"));
  ASSERT_FALSE(seen.empty());
  EXPECT_EQ(seen.back().done_bytes, folder->bytes_before);
  EXPECT_EQ(seen.back().total_bytes, folder->bytes_before);
  EXPECT_EQ(seen.back().shard, 3);
  const auto written = ExpectSameAsAtLoad(test::kTinyModel);
  ASSERT_NE(written, nullptr);
  ASSERT_NE(written->head_classes(), nullptr);  // head_classes.json names the new weights
  EXPECT_EQ(written->head_classes()->model_fingerprint(), written->fingerprint());
  const json index = ReadJson(Out() + "/model.safetensors.index.json");
  EXPECT_EQ(index.at("metadata").at("total_size"), folder->bytes_after);
  EXPECT_TRUE(index.at("weight_map").contains("model.layers.0.mlp.up_proj.weight_scale"));
}

// Every code and scale, and every tensor that is not quantized.
TEST_F(QuantizedFolderTest, TensorsAreTheRowsOfTheSource) {
  ASSERT_TRUE(WriteQuantizedFolder(test::kTinyModel, Out(), QuantizeTo::kFp8).ok());
  const auto before = Checkpoint::Open(test::kTinyModel), after = Checkpoint::Open(Out());
  ASSERT_TRUE(before.ok() && after.ok());
  int quantized = 0;
  for (const auto& file : before->files()) {
    for (const auto& [name, from] : file->tensors()) {
      const TensorView to = *after->Find(name, from.shape);
      if (!IsQuantizedMatrix(name)) {
        EXPECT_EQ(to.type, from.type) << name;
        EXPECT_EQ(std::memcmp(to.data, from.data, from.bytes), 0) << name;
        continue;
      }
      ++quantized;
      ASSERT_EQ(to.type, TensorType::kE4M3) << name;
      const int64_t rows = from.shape[0], width = from.shape[1];
      const TensorView scales = *after->Find(name + "_scale", {rows, 1});
      for (int64_t row = 0; row < rows; ++row) {
        std::vector<float> values;
        for (int64_t i = 0; i < width; ++i) {
          kernels::bf16 value;
          std::memcpy(&value, from.data + 2 * (row * width + i), 2);
          values.push_back(kernels::ToFloat(value));
        }
        std::vector<uint8_t> codes(static_cast<size_t>(width));
        const float want = *QuantizeRow(values.data(), width, codes.data());
        float scale = 0;
        std::memcpy(&scale, scales.data + 4 * row, 4);
        ASSERT_EQ(scale, want) << name << ", row " << row;
        ASSERT_EQ(std::memcmp(codes.data(), to.data + row * width, codes.size()), 0) << name << ", row " << row;
      }
    }
  }
  EXPECT_EQ(quantized, 12 * 7);
}

// Experts, routers, a head of its own, one file without an index.
TEST_F(QuantizedFolderTest, ExpertsAndWhatIsIgnored) {
  const Fp8Folders folders(dir_.path(), Fp8Format::kTensor, kSeed, /*power_of_two=*/true);
  std::ofstream(folders.plain() + "/tokenizer.json") << "{}";
  std::ofstream(folders.plain() + "/pytorch_model.bin") << "other weights";
  const auto folder = WriteQuantizedFolder(folders.plain(), Out(), QuantizeTo::kFp8);
  ASSERT_TRUE(folder.ok()) << folder.status();
  EXPECT_THAT(folder->copied, ElementsAre("tokenizer.json"));
  EXPECT_THAT(FilesOf(Out()), ElementsAre("config.json", "model.safetensors", "tokenizer.json"));
  ExpectSameAsAtLoad(folders.plain());
  json config = ReadJson(Out() + "/config.json");
  const json quantization = config.at("quantization_config");
  EXPECT_EQ(quantization.at("quant_method"), "compressed-tensors");
  EXPECT_EQ(quantization.at("format"), "float-quantized");
  const json weights = quantization.at("config_groups").at("group_0").at("weights");
  EXPECT_EQ(weights.at("strategy"), "channel");
  EXPECT_EQ(weights.at("num_bits"), 8);
  EXPECT_EQ(quantization.at("ignore"), json({"lm_head", "model.layers.1.mlp.gate"}));
  config.erase("quantization_config");
  EXPECT_EQ(config, ReadJson(folders.plain() + "/config.json"));
}

TEST_F(QuantizedFolderTest, Int4IsTheModelThatIsQuantizedAtLoad) {
  const auto folder = WriteQuantizedFolder(test::kTinyModel, Out(), QuantizeTo::kInt4);
  ASSERT_TRUE(folder.ok()) << folder.status();
  EXPECT_EQ(folder->num_quantized, 12 * 7);
  EXPECT_LT(folder->bytes_after, folder->bytes_before * 0.35);  // the embedding stays in bf16
  const auto written = ExpectSameAsAtLoad(test::kTinyModel, QuantizeTo::kInt4, "int4-group128");
  ASSERT_NE(written, nullptr);
  ASSERT_NE(written->head_classes(), nullptr);
  EXPECT_EQ(written->head_classes()->model_fingerprint(), written->fingerprint());
  const json index = ReadJson(Out() + "/model.safetensors.index.json");
  EXPECT_EQ(index.at("metadata").at("total_size"), folder->bytes_after);
  const std::string name = "model.layers.0.mlp.up_proj.weight";
  for (const char* suffix : {"_packed", "_scale", "_shape"})
    EXPECT_TRUE(index.at("weight_map").contains(name + suffix));
  EXPECT_FALSE(index.at("weight_map").contains(name));
  const json quantization = ReadJson(Out() + "/config.json").at("quantization_config");
  EXPECT_EQ(quantization.at("format"), "pack-quantized");
  EXPECT_TRUE(quantization.at("config_groups").at("group_0").at("input_activations").is_null());
  const json weights = quantization.at("config_groups").at("group_0").at("weights");
  EXPECT_EQ(weights.at("strategy"), "group");
  EXPECT_EQ(weights.at("group_size"), 128);
  EXPECT_EQ(weights.at("num_bits"), 4);
  EXPECT_EQ(weights.at("symmetric"), true);
}

// Codes by the definition of the layout: eight a word along the row, the first in the lowest bits, plus 8.
TEST_F(QuantizedFolderTest, Int4WordsAreTheNearestCodesOfTheSource) {
  ASSERT_TRUE(WriteQuantizedFolder(test::kTinyModel, Out(), QuantizeTo::kInt4).ok());
  const auto before = Checkpoint::Open(test::kTinyModel), after = Checkpoint::Open(Out());
  ASSERT_TRUE(before.ok() && after.ok());
  const std::string name = "model.layers.3.mlp.down_proj.weight";
  const TensorView from = *before->Find(name), words = *after->Find(name + "_packed"),
                   scales = *after->Find(name + "_scale"), shape = *after->Find(name + "_shape");
  const int64_t rows = from.shape[0], width = from.shape[1], groups = (width + 127) / 128;
  ASSERT_EQ(words.type, TensorType::kI32);
  ASSERT_EQ(words.shape, (std::vector<int64_t>{rows, width / 8}));
  ASSERT_EQ(scales.type, TensorType::kBF16);
  ASSERT_EQ(scales.shape, (std::vector<int64_t>{rows, groups}));
  int64_t declared[2];
  std::memcpy(declared, shape.data, sizeof(declared));
  EXPECT_EQ(declared[0], rows);
  EXPECT_EQ(declared[1], width);
  const auto bf16_at = [](const TensorView& tensor, int64_t i) {
    kernels::bf16 value;
    std::memcpy(&value, tensor.data + 2 * i, 2);
    return static_cast<double>(kernels::ToFloat(value));
  };
  for (int64_t i = 0; i < rows * width; ++i) {
    uint32_t word;
    std::memcpy(&word, words.data + i / 8 * 4, 4);
    const double scale = bf16_at(scales, i / width * groups + i % width / 128);
    const double code = static_cast<double>(word >> 4 * (i % 8) & 15) - 8, value = bf16_at(from, i) / scale;
    ASSERT_LE(std::fabs(std::clamp(value, -8.0, 7.0) - code), 0.5001) << i;
  }
}

TEST_F(QuantizedFolderTest, NothingIsOverwrittenOrLeftBehind) {
  Fp8Folders folders(dir_.path(), Fp8Format::kChannel, kSeed);
  EXPECT_THAT(Error(folders.fp8(), Out()), AllOf(HasSubstr("quantized already"), HasSubstr("compressed-tensors")));
  fs::create_directory(Out());
  EXPECT_THAT(Error(folders.plain(), Out()), AllOf(HasSubstr("ALREADY_EXISTS"), HasSubstr("/out exists")));
  EXPECT_THAT(FilesOf(Out()), IsEmpty());
  fs::remove(Out());
  fs::create_directory(Out() + ".partial");
  EXPECT_THAT(Error(folders.plain(), Out()), AllOf(HasSubstr("ALREADY_EXISTS"), HasSubstr("/out.partial exists")));
  fs::remove(Out() + ".partial");

  // A weight that cannot be quantized, in the last matrix by name.
  const std::string name = "model.layers.1.self_attn.v_proj.weight";
  auto file = SafetensorsFile::Open(folders.plain() + "/model.safetensors");
  ASSERT_TRUE(file.ok());
  test::Fp8Tensors tensors;
  for (const auto& [each, view] : (*file)->tensors())
    tensors[each] = {view.type, view.shape, std::vector<std::byte>(view.data, view.data + view.bytes)};
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(tensors.at(name).bytes.data() + 4 * Fp8Folders::kHidden * 3, &nan, 4);
  test::WriteTensors(folders.plain(), tensors);
  EXPECT_THAT(Error(folders.plain(), Out()),
              AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr(name), HasSubstr("row 3"), HasSubstr("NaN")));
  EXPECT_THAT(FilesOf(dir_.path()), Not(Contains(HasSubstr("out"))));
  EXPECT_THAT(Error(dir_.path() + "/nowhere", Out()), HasSubstr("nowhere"));
}

}  // namespace
}  // namespace spl::engine
