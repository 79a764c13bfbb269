// Loading a checkpoint reports its bytes: never less than before, and all of them in the end.
#include "services/engine/model/load_progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <utility>
#include <vector>

#include "services/engine/engine.h"
#include "tests/support/paths.h"

namespace spl::engine {
namespace {

using Reports = std::vector<std::pair<uint64_t, uint64_t>>;

uint64_t TensorBytes(const Checkpoint& checkpoint) {
  uint64_t bytes = 0;
  for (const auto& file : checkpoint.files()) {
    for (const auto& [name, tensor] : file->tensors()) bytes += tensor.bytes;
  }
  return bytes;
}

Reports LoadAndRecord(int num_ranks, QuantizeTo quantize) {
  Reports reports;
  Devices devices;
  for (int r = 0; r < num_ranks; ++r) devices.push_back(kernels::MakeCpuBackend());
  ModelOptions options;
  options.quantize = quantize;
  options.head_classes = options.recovery_profile = "none";
  options.on_progress = [&](uint64_t done, uint64_t total) { reports.emplace_back(done, total); };
  const auto model = Model::Load(test::kTinyModel, devices, options);
  EXPECT_TRUE(model.ok()) << model.status();
  return reports;
}

TEST(LoadProgressTest, CountsEveryTensorOnce) {
  const auto checkpoint = Checkpoint::Open(test::kTinyModel);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const uint64_t bytes = TensorBytes(*checkpoint);
  for (const int num_ranks : {1, 2}) {
    for (const QuantizeTo quantize : {QuantizeTo::kNone, QuantizeTo::kFp8}) {
      const Reports reports = LoadAndRecord(num_ranks, quantize);
      ASSERT_GT(reports.size(), 20u) << "one for each tensor of each rank";
      uint64_t before = 0;
      for (const auto& [done, total] : reports) {
        EXPECT_EQ(total, bytes);
        EXPECT_GE(done, before);
        EXPECT_LE(done, total);
        before = done;
      }
      // The model reads all tensors: the last one makes it complete, before Finish says so.
      EXPECT_EQ(reports[reports.size() - 2].first, bytes) << num_ranks << " ranks";
      EXPECT_EQ(reports.back().first, bytes);
      EXPECT_LT(reports[reports.size() / 4].first, bytes);
    }
  }
}

// Writes nothing; the names are what counts.
class NoSource final : public WeightSource {
 public:
  bool Contains(const std::string&) const override { return true; }
  absl::StatusOr<MatrixType> TypeOf(const std::string&, const std::vector<int64_t>&) const override {
    return MatrixType{};
  }
  absl::Status Write(const MatrixPart& part, void*, MatrixScales&) override {
    return part.name == "broken.weight" ? absl::DataLossError("broken") : absl::OkStatus();
  }
  absl::StatusOr<std::vector<float>> Floats(const std::string&, const std::vector<int64_t>&) override {
    return std::vector<float>();
  }
};

TEST(LoadProgressTest, CountsScalesWithTheirMatrix) {
  const std::string path = ::testing::TempDir() + "/load_progress_scales";
  std::filesystem::create_directories(path);
  const std::vector<std::byte> zeros(64);
  const std::vector<NamedTensor> tensors = {{"a.weight", TensorType::kE4M3, {16}, zeros.data()},
                                            {"a.weight_scale_inv", TensorType::kF32, {1}, zeros.data()},
                                            {"b.qweight", TensorType::kI32, {2}, zeros.data()},
                                            {"b.scales", TensorType::kF16, {4}, zeros.data()},
                                            {"b.bias", TensorType::kF32, {2}, zeros.data()},
                                            {"broken.weight", TensorType::kF32, {4}, zeros.data()},
                                            {"unused.weight", TensorType::kF32, {8}, zeros.data()}};
  ASSERT_TRUE(WriteSafetensors(path + "/model.safetensors", tensors).ok());
  const auto checkpoint = Checkpoint::Open(path);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  Reports reports;
  LoadProgress progress(*checkpoint, 1, [&](uint64_t done, uint64_t total) { reports.emplace_back(done, total); });
  const auto source = progress.Count(std::make_unique<NoSource>());
  MatrixScales scales;
  const uint64_t total = 16 + 4 + 8 + 8 + 8 + 16 + 32;
  EXPECT_TRUE(source->Write(MatrixPart::Whole("a.weight", 4, 4), nullptr, scales).ok());
  EXPECT_TRUE(source->Write(MatrixPart::Whole("a.weight", 4, 4), nullptr, scales).ok());
  EXPECT_TRUE(source->Write(MatrixPart::Whole("b.weight", 4, 4), nullptr, scales).ok());
  EXPECT_TRUE(source->Floats("b.bias", {2}).ok());
  EXPECT_FALSE(source->Write(MatrixPart::Whole("broken.weight", 2, 2), nullptr, scales).ok());
  progress.Finish();
  EXPECT_EQ(reports, (Reports{{20, total}, {36, total}, {44, total}, {total, total}}));
  std::filesystem::remove_all(path);
}

}  // namespace
}  // namespace spl::engine
