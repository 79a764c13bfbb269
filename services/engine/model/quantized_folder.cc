#include "services/engine/model/quantized_folder.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <system_error>
#include <thread>

#include "kernels/common/ceil_div.h"
#include "services/base/status.h"
#include "services/engine/model/checkpoint.h"
#include "services/engine/model/fp8_quantization.h"
#include "services/engine/model/head_classes.h"
#include "services/engine/model/int4_quantization.h"
#include "services/engine/model/model_config.h"
#include "services/engine/model/model_identity.h"

namespace spl::engine {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

constexpr char kConfig[] = "config.json", kIndex[] = "model.safetensors.index.json",
               kHeadClasses[] = "head_classes.json";
constexpr char kWeight[] = ".weight", kScaleSuffix[] = "_scale", kEmbedding[] = "embed_tokens.weight";

absl::Status FileError(const fs::path& path, const char* what, const std::error_code& error) {
  return Errorf(absl::StatusCode::kInternal, "{}: {}: {}", path.string(), what, error.message());
}

absl::Status WriteText(const fs::path& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out << text;
  out.close();
  if (!out) return Errorf(absl::StatusCode::kInternal, "{}: cannot be written", path.string());
  return absl::OkStatus();
}

absl::StatusOr<kernels::DType> FloatType(const std::string& name, const TensorView& tensor) {
  switch (tensor.type) {
    case TensorType::kF32:
      return kernels::DType::kF32;
    case TensorType::kBF16:
      return kernels::DType::kBF16;
    case TensorType::kF16:
      return kernels::DType::kF16;
    default:
      return InvalidArgument("tensor '{}' is no matrix of f32, bf16 or f16", name);
  }
}

// Writes the shards one after the other, and remembers what the index and the configuration say about them.
class ShardWriter {
 public:
  ShardWriter(const Checkpoint& checkpoint, QuantizeTo to,
              const std::function<void(const QuantizedFolderProgress&)>& progress)
      : checkpoint_(checkpoint), to_(to), progress_(progress) {
    for (const auto& file : checkpoint.files()) {
      for (const auto& [name, tensor] : file->tensors()) at_.total_bytes += tensor.bytes;
    }
    at_.num_shards = result_.num_shards = static_cast<int>(checkpoint.files().size());
    result_.bytes_before = at_.total_bytes;
  }

  absl::Status Write(const fs::path& to) {
    for (const auto& file : checkpoint_.files()) {
      ++at_.shard;
      SPLICE_RETURN_IF_ERROR(WriteShard(*file, to / fs::path(file->name()).filename()));
    }
    if (result_.num_quantized == 0)
      return InvalidArgument("{}: no tensor is a matrix that is quantized (its name ends in _proj.weight)",
                             checkpoint_.files()[0]->name());
    return absl::OkStatus();
  }

  const QuantizedFolder& result() const { return result_; }
  const std::vector<std::string>& unquantized() const { return unquantized_; }  // modules with a matrix
  ordered_json Index() const {
    return {{"metadata", {{"total_size", result_.bytes_after}}}, {"weight_map", weight_map_}};
  }

 private:
  absl::Status WriteShard(const SafetensorsFile& file, const fs::path& path) {
    if (!file.unsupported().empty()) {
      const auto& [name, type] = *file.unsupported().begin();
      return InvalidArgument("{}: tensor '{}' has type {}, which cannot be written", file.name(), name, type);
    }
    std::vector<NamedTensor> out;
    for (const auto& [name, tensor] : file.tensors()) {
      if (tensor.shape.size() == 2 && IsQuantizedMatrix(name)) {
        SPLICE_RETURN_IF_ERROR(to_ == QuantizeTo::kInt4 ? AddInt4(name, tensor, out) : AddFp8(name, tensor, out));
      } else {
        AddUnchanged(name, tensor, out);
      }
    }
    for (const NamedTensor& tensor : out) {
      weight_map_[tensor.name] = path.filename().string();
      uint64_t bytes = TensorTypeBytes(tensor.type);
      for (const int64_t dim : tensor.shape) bytes *= static_cast<uint64_t>(dim);
      result_.bytes_after += bytes;
    }
    return WriteSafetensors(path.string(), out);
  }

  void AddUnchanged(const std::string& name, const TensorView& tensor, std::vector<NamedTensor>& out) {
    if (tensor.shape.size() == 2 && name.ends_with(kWeight) && !name.ends_with(kEmbedding))
      unquantized_.push_back(name.substr(0, name.size() - std::strlen(kWeight)));
    out.push_back({.name = name, .type = tensor.type, .shape = tensor.shape, .make = [this, tensor] {
                     Advance(tensor.bytes);
                     return std::vector<std::byte>(tensor.data, tensor.data + tensor.bytes);
                   }});
  }

  // Adds the codes, and behind them the scales that were made with them.
  absl::Status AddFp8(const std::string& name, const TensorView& tensor, std::vector<NamedTensor>& out) {
    SPLICE_ASSIGN_OR_RETURN(const kernels::DType dtype, FloatType(name, tensor));
    const FloatMatrix matrix{tensor.data, dtype, tensor.shape[0], tensor.shape[1]};
    const auto scales = std::make_shared<std::vector<std::byte>>(static_cast<size_t>(matrix.num_rows) * sizeof(float));
    const auto make_codes = [this, name, matrix, scales,
                             bytes = tensor.bytes]() -> absl::StatusOr<std::vector<std::byte>> {
      std::vector<std::byte> codes(static_cast<size_t>(matrix.num_rows * matrix.width));
      SPLICE_RETURN_IF_ERROR(
          Annotate(QuantizeRows(pool_, matrix, {0, matrix.width}, reinterpret_cast<uint8_t*>(codes.data()),
                                reinterpret_cast<float*>(scales->data())),
                   fmt::format("tensor '{}'", name)));
      Advance(bytes);
      return codes;
    };
    out.push_back({.name = name, .type = TensorType::kE4M3, .shape = tensor.shape, .make = make_codes});
    out.push_back(
        {.name = name + kScaleSuffix, .type = TensorType::kF32, .shape = {matrix.num_rows, 1}, .make = [scales] {
           return *scales;
         }});
    ++result_.num_quantized;
    return absl::OkStatus();
  }

  // The same in the layout of int4_matrix.h: words of eight codes are four bytes of two.
  absl::Status AddInt4(const std::string& name, const TensorView& tensor, std::vector<NamedTensor>& out) {
    SPLICE_ASSIGN_OR_RETURN(const kernels::DType dtype, FloatType(name, tensor));
    const FloatMatrix matrix{tensor.data, dtype, tensor.shape[0], tensor.shape[1]};
    const int64_t groups = kernels::CeilDiv(matrix.width, kInt4Group);
    const auto scales = std::make_shared<std::vector<float>>(static_cast<size_t>(matrix.num_rows * groups));
    const auto make_codes = [this, name, matrix, scales,
                             bytes = tensor.bytes]() -> absl::StatusOr<std::vector<std::byte>> {
      std::vector<std::byte> codes(static_cast<size_t>(matrix.num_rows * matrix.width / 2));
      SPLICE_RETURN_IF_ERROR(Annotate(
          QuantizeInt4Rows(pool_, matrix, {0, matrix.width}, reinterpret_cast<uint8_t*>(codes.data()), scales->data()),
          fmt::format("tensor '{}'", name)));
      Advance(bytes);
      return codes;
    };
    const auto make_scales = [scales]() -> absl::StatusOr<std::vector<std::byte>> {
      std::vector<std::byte> bytes(scales->size() * sizeof(kernels::bf16));
      for (size_t i = 0; i < scales->size(); ++i) {
        const kernels::bf16 scale = kernels::ToBf16((*scales)[i]);  // exact
        std::memcpy(bytes.data() + i * sizeof(scale), &scale, sizeof(scale));
      }
      return bytes;
    };
    const auto make_shape = [shape = tensor.shape]() -> absl::StatusOr<std::vector<std::byte>> {
      std::vector<std::byte> bytes(2 * sizeof(int64_t));
      std::memcpy(bytes.data(), shape.data(), bytes.size());
      return bytes;
    };
    out.push_back({.name = name + "_packed",
                   .type = TensorType::kI32,
                   .shape = {matrix.num_rows, matrix.width / 8},
                   .make = make_codes});
    out.push_back({.name = name + kScaleSuffix,
                   .type = TensorType::kBF16,
                   .shape = {matrix.num_rows, groups},
                   .make = make_scales});
    out.push_back({.name = name + "_shape", .type = TensorType::kI64, .shape = {2}, .make = make_shape});
    ++result_.num_quantized;
    return absl::OkStatus();
  }

  void Advance(uint64_t bytes) {
    at_.done_bytes += bytes;
    if (progress_ != nullptr) progress_(at_);
  }

  const Checkpoint& checkpoint_;
  const QuantizeTo to_;
  const std::function<void(const QuantizedFolderProgress&)>& progress_;
  kernels::ThreadPool pool_{std::max(1, static_cast<int>(std::thread::hardware_concurrency()))};
  QuantizedFolderProgress at_;
  QuantizedFolder result_;
  std::vector<std::string> unquantized_;
  ordered_json weight_map_ = ordered_json::object();
};

// The value of "quantization_config". Engines that quantize activations of FP8 folders do it for each token, as for
// other folders of this layout; Splice does not.
ordered_json QuantizationConfig(QuantizeTo to, std::vector<std::string> ignore) {
  if (std::find(ignore.begin(), ignore.end(), "lm_head") == ignore.end()) ignore.push_back("lm_head");
  const auto fp8 = [](const char* strategy, bool dynamic) {
    return ordered_json{
        {"num_bits", 8}, {"type", "float"}, {"symmetric", true}, {"strategy", strategy}, {"dynamic", dynamic}};
  };
  const bool int4 = to == QuantizeTo::kInt4;
  const ordered_json int4_weights{
      {"num_bits", 4},    {"type", "int"},      {"symmetric", true}, {"strategy", "group"}, {"group_size", kInt4Group},
      {"dynamic", false}, {"actorder", nullptr}};
  return {{"quant_method", "compressed-tensors"},
          {"format", int4 ? "pack-quantized" : "float-quantized"},
          {"quantization_status", "compressed"},
          {"kv_cache_scheme", nullptr},
          {"ignore", std::move(ignore)},
          {"config_groups",
           {{"group_0",
             {{"targets", ordered_json::array({"Linear"})},
              {"weights", int4 ? int4_weights : fp8("channel", false)},
              {"input_activations", int4 ? ordered_json(nullptr) : fp8("token", true)},
              {"output_activations", nullptr}}}}}};
}

absl::Status WriteConfig(const fs::path& from, const fs::path& to, QuantizeTo format,
                         const std::vector<std::string>& unquantized) {
  std::ifstream in(from / kConfig, std::ios::binary);
  ordered_json config = ordered_json::parse(in, nullptr, /*allow_exceptions=*/false);
  if (!config.is_object()) return InvalidArgument("{}: not a JSON object", (from / kConfig).string());
  config["quantization_config"] = QuantizationConfig(format, unquantized);
  return WriteText(to / kConfig, config.dump(2) + "\n");
}

// True for files that are written anew, and for the same weights in other formats.
bool IsLeftOut(const fs::path& file) {
  const std::string name = file.filename().string(), extension = file.extension().string();
  if (name == kConfig || name == kIndex || name == kHeadClasses || name.starts_with(".")) return true;
  for (const char* weights : {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}) {
    if (extension == weights) return true;
  }
  return false;
}

absl::Status CopyFiles(const fs::path& from, const fs::path& to, std::vector<std::string>& copied) {
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(from, error)) {
    if (!entry.is_regular_file(error) || IsLeftOut(entry.path())) continue;
    fs::copy_file(entry.path(), to / entry.path().filename(), error);
    if (error) return FileError(entry.path(), "cannot be copied", error);
    copied.push_back(entry.path().filename().string());
  }
  if (error) return FileError(from, "cannot be listed", error);
  std::sort(copied.begin(), copied.end());
  return absl::OkStatus();
}

// The classes of heads stay as they were; the map names the weights that it goes with.
absl::Status WriteHeadClasses(const fs::path& from, const fs::path& to) {
  if (!fs::exists(from / kHeadClasses)) return absl::OkStatus();
  SPLICE_ASSIGN_OR_RETURN(HeadClassMap map, HeadClassMap::Load((from / kHeadClasses).string()));
  SPLICE_ASSIGN_OR_RETURN(const ModelConfig config, LoadModelConfig(to.string()));
  SPLICE_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(to.string()));
  map.set_model_fingerprint(FolderFingerprint(config, checkpoint));
  return WriteText(to / kHeadClasses, map.ToJson());
}

absl::StatusOr<QuantizedFolder> WriteFiles(const fs::path& from, const fs::path& to, QuantizeTo format,
                                           const std::function<void(const QuantizedFolderProgress&)>& progress) {
  SPLICE_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(from.string()));
  ShardWriter shards(checkpoint, format, progress);
  SPLICE_RETURN_IF_ERROR(shards.Write(to));
  if (fs::exists(from / kIndex)) SPLICE_RETURN_IF_ERROR(WriteText(to / kIndex, shards.Index().dump(2) + "\n"));
  SPLICE_RETURN_IF_ERROR(WriteConfig(from, to, format, shards.unquantized()));
  QuantizedFolder folder = shards.result();
  SPLICE_RETURN_IF_ERROR(CopyFiles(from, to, folder.copied));
  SPLICE_RETURN_IF_ERROR(WriteHeadClasses(from, to));
  return folder;
}

}  // namespace

absl::StatusOr<QuantizedFolder> WriteQuantizedFolder(
    const std::string& model_dir, const std::string& out_dir, QuantizeTo to,
    const std::function<void(const QuantizedFolderProgress&)>& progress) {
  SPLICE_ASSIGN_OR_RETURN(const ModelConfig config, LoadModelConfig(model_dir));
  if (config.quantization.quantized())
    return InvalidArgument("{}: the weights are quantized already ({})", model_dir, config.quantization.method);
  fs::path out(out_dir);
  if (!out.has_filename()) out = out.parent_path();  // "DIR/"
  const fs::path partial(out.string() + ".partial");
  for (const fs::path& path : {out, partial}) {
    if (fs::exists(path))
      return Errorf(absl::StatusCode::kAlreadyExists, "{} exists: name a folder that does not, or remove it",
                    path.string());
  }
  std::error_code error;
  fs::create_directories(partial, error);
  if (error) return FileError(partial, "cannot be made", error);
  absl::StatusOr<QuantizedFolder> folder = WriteFiles(model_dir, partial, to, progress);
  if (folder.ok()) {
    fs::rename(partial, out, error);
    if (!error) return folder;
    folder = FileError(out, "cannot be named", error);
  }
  fs::remove_all(partial, error);
  return folder;
}

}  // namespace spl::engine
