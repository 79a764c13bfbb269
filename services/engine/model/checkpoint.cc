#include "services/engine/model/checkpoint.h"

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "services/base/status.h"

namespace spl::engine {
namespace {

std::string ShapeText(const std::vector<int64_t>& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

// The index: tensor → name of its shard file.
absl::StatusOr<std::map<std::string, std::string>> ReadIndex(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  const nlohmann::json root = nlohmann::json::parse(in, nullptr, /*allow_exceptions=*/false);
  if (root.is_discarded() || !root.is_object()) return InvalidArgument("{}: not a JSON object", path);
  const auto map = root.find("weight_map");
  if (map == root.end() || !map->is_object() || map->empty())
    return InvalidArgument("{}: 'weight_map' is not an object with entries", path);
  std::map<std::string, std::string> shard_of;
  for (const auto& [tensor, shard] : map->items()) {
    if (!shard.is_string()) return InvalidArgument("{}: the shard of '{}' is not a string", path, tensor);
    const std::string name = shard.get<std::string>();
    if (name.empty() || name.find('/') != std::string::npos)
      return InvalidArgument("{}: shard '{}' is not a plain file name", path, name);
    shard_of[tensor] = name;
  }
  return shard_of;
}

}  // namespace

absl::StatusOr<Checkpoint> Checkpoint::Open(const std::string& model_dir) {
  Checkpoint checkpoint;
  checkpoint.dir_ = model_dir;
  const std::string single = model_dir + "/model.safetensors", index = single + ".index.json";
  if (!std::filesystem::exists(index)) {
    SPLICE_ASSIGN_OR_RETURN(auto file, SafetensorsFile::Open(single));
    checkpoint.files_.push_back(std::move(file));
    return checkpoint;
  }
  SPLICE_ASSIGN_OR_RETURN(const auto shard_of, ReadIndex(index));
  std::map<std::string, const SafetensorsFile*> open;
  for (const auto& [tensor, shard] : shard_of) {
    if (!open.contains(shard)) {
      SPLICE_ASSIGN_OR_RETURN(auto file, SafetensorsFile::Open(model_dir + "/" + shard));
      open[shard] = file.get();
      checkpoint.files_.push_back(std::move(file));
    }
    if (!open[shard]->Contains(tensor)) return InvalidArgument("{}: tensor '{}' is not in {}", index, tensor, shard);
  }
  return checkpoint;
}

bool Checkpoint::Contains(const std::string& name) const {
  for (const auto& file : files_) {
    if (file->Contains(name)) return true;
  }
  return false;
}

absl::StatusOr<TensorView> Checkpoint::Find(const std::string& name) const {
  for (const auto& file : files_) {
    if (file->Contains(name)) return file->Find(name);
  }
  return Errorf(absl::StatusCode::kNotFound, "{}: tensor '{}' is missing", dir_, name);
}

absl::StatusOr<TensorView> Checkpoint::Find(const std::string& name, const std::vector<int64_t>& shape) const {
  for (const auto& file : files_) {
    if (!file->Contains(name)) continue;
    SPLICE_ASSIGN_OR_RETURN(TensorView tensor, file->Find(name));
    if (tensor.shape != shape)
      return InvalidArgument("{}: tensor '{}' has shape {}, config.json asks for {}", file->name(), name,
                             ShapeText(tensor.shape), ShapeText(shape));
    return tensor;
  }
  return Errorf(absl::StatusCode::kNotFound, "{}: tensor '{}' is missing", dir_, name);
}

}  // namespace spl::engine
