#include "services/engine/model/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "services/base/status.h"

namespace spl::engine {
namespace {

using nlohmann::json;

// Headers of real shards with 1000 tensors have some hundred KB. The reference implementation's limit is 100 MiB.
constexpr uint64_t kMaxHeaderBytes = 100ull << 20;

std::optional<TensorType> ParseType(const std::string& name) {
  if (name == "F32") return TensorType::kF32;
  if (name == "BF16") return TensorType::kBF16;
  if (name == "F16") return TensorType::kF16;
  if (name == "I32") return TensorType::kI32;
  if (name == "I64") return TensorType::kI64;
  if (name == "F8_E4M3") return TensorType::kE4M3;
  return std::nullopt;
}

const char* TypeName(TensorType type) {
  switch (type) {
    case TensorType::kF32:
      return "F32";
    case TensorType::kBF16:
      return "BF16";
    case TensorType::kF16:
      return "F16";
    case TensorType::kI32:
      return "I32";
    case TensorType::kI64:
      return "I64";
    case TensorType::kE4M3:
      return "F8_E4M3";
  }
  return "?";
}

// Product of the dimensions times the element size, or nothing on overflow.
std::optional<uint64_t> BytesOf(const std::vector<int64_t>& shape, size_t element_bytes) {
  uint64_t bytes = element_bytes;
  for (int64_t dim : shape) {
    if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(dim), &bytes)) return std::nullopt;
  }
  return bytes;
}

struct Entry {
  std::string type;
  std::vector<int64_t> shape;
  uint64_t begin = 0, end = 0;
};

// One member of the header, e.g. {"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}.
absl::StatusOr<Entry> ParseEntry(const std::string& tensor, const json& value) {
  if (!value.is_object()) return InvalidArgument("tensor '{}': the header entry is not an object", tensor);
  const auto dtype = value.find("dtype"), shape = value.find("shape"), offsets = value.find("data_offsets");
  if (dtype == value.end() || !dtype->is_string()) return InvalidArgument("tensor '{}': no dtype", tensor);
  if (shape == value.end() || !shape->is_array() || shape->size() > 8)
    return InvalidArgument("tensor '{}': shape is not an array of at most 8 numbers", tensor);
  if (offsets == value.end() || !offsets->is_array() || offsets->size() != 2 || !(*offsets)[0].is_number_unsigned() ||
      !(*offsets)[1].is_number_unsigned())
    return InvalidArgument("tensor '{}': data_offsets is not a pair of numbers", tensor);
  Entry entry;
  entry.type = dtype->get<std::string>();
  for (const json& dim : *shape) {
    if (!dim.is_number_unsigned() || dim.get<uint64_t>() > (1ull << 40))
      return InvalidArgument("tensor '{}': a dimension is not a sensible number", tensor);
    entry.shape.push_back(dim.get<int64_t>());
  }
  entry.begin = (*offsets)[0].get<uint64_t>();
  entry.end = (*offsets)[1].get<uint64_t>();
  return entry;
}

}  // namespace

size_t TensorTypeBytes(TensorType type) {
  switch (type) {
    case TensorType::kF32:
    case TensorType::kI32:
      return 4;
    case TensorType::kBF16:
    case TensorType::kF16:
      return 2;
    case TensorType::kI64:
      return 8;
    case TensorType::kE4M3:
      return 1;
  }
  return 0;
}

absl::StatusOr<std::unique_ptr<SafetensorsFile>> SafetensorsFile::Open(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return Errorf(absl::StatusCode::kNotFound, "{}: cannot open: {}", path, std::strerror(errno));
  struct stat info {};
  if (::fstat(fd, &info) != 0 || info.st_size < 8) {
    ::close(fd);
    return InvalidArgument("{}: {} bytes is too short for a safetensors file", path, info.st_size);
  }
  const size_t size = info.st_size;
  void* mapping = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
  ::close(fd);
  if (mapping == MAP_FAILED) return Errorf(absl::StatusCode::kInternal, "{}: mmap: {}", path, std::strerror(errno));
  auto file = std::unique_ptr<SafetensorsFile>(new SafetensorsFile);
  file->name_ = path;
  file->mapping_ = mapping;
  file->bytes_ = {static_cast<const std::byte*>(mapping), size};
  SPLICE_RETURN_IF_ERROR(file->Index());
  return file;
}

absl::StatusOr<std::unique_ptr<SafetensorsFile>> SafetensorsFile::FromBytes(std::span<const std::byte> bytes,
                                                                            std::string name) {
  auto file = std::unique_ptr<SafetensorsFile>(new SafetensorsFile);
  file->name_ = std::move(name);
  file->bytes_ = bytes;
  SPLICE_RETURN_IF_ERROR(file->Index());
  return file;
}

SafetensorsFile::~SafetensorsFile() {
  if (mapping_ != nullptr) ::munmap(mapping_, bytes_.size());
}

absl::Status SafetensorsFile::Index() {
  if (bytes_.size() < 8) return InvalidArgument("{}: too short for a safetensors file", name_);
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes_.data(), 8);
  if (header_bytes > kMaxHeaderBytes || header_bytes > bytes_.size() - 8)
    return InvalidArgument("{}: the header claims {} bytes, the file has {} (truncated, or not safetensors)", name_,
                           header_bytes, bytes_.size());
  const char* text = reinterpret_cast<const char*>(bytes_.data()) + 8;
  const json header = json::parse(text, text + header_bytes, nullptr, /*allow_exceptions=*/false);
  if (header.is_discarded() || !header.is_object())
    return InvalidArgument("{}: the header is not a JSON object", name_);

  const std::byte* data = bytes_.data() + 8 + header_bytes;
  const uint64_t data_bytes = bytes_.size() - 8 - header_bytes;
  std::vector<std::pair<uint64_t, std::pair<uint64_t, std::string>>> ranges;  // begin → (end, name), to find overlaps
  for (const auto& [tensor, value] : header.items()) {
    if (tensor == "__metadata__") continue;
    absl::StatusOr<Entry> parsed = ParseEntry(tensor, value);
    if (!parsed.ok()) return Annotate(parsed.status(), name_);
    Entry& entry = *parsed;
    if (entry.begin > entry.end || entry.end > data_bytes)
      return InvalidArgument("{}: tensor '{}' at [{}, {}) lies outside the {} data bytes (truncated shard?)", name_,
                             tensor, entry.begin, entry.end, data_bytes);
    ranges.push_back({entry.begin, {entry.end, tensor}});
    const std::optional<TensorType> type = ParseType(entry.type);
    if (!type) {
      unsupported_[tensor] = entry.type;
      continue;
    }
    const std::optional<uint64_t> expected = BytesOf(entry.shape, TensorTypeBytes(*type));
    if (!expected || *expected != entry.end - entry.begin)
      return InvalidArgument("{}: tensor '{}' has {} bytes, its shape and type need {}", name_, tensor,
                             entry.end - entry.begin, expected.value_or(std::numeric_limits<uint64_t>::max()));
    tensors_[tensor] = TensorView{*type, std::move(entry.shape), data + entry.begin, entry.end - entry.begin};
  }
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].first < ranges[i - 1].second.first)
      return InvalidArgument("{}: tensors '{}' and '{}' overlap", name_, ranges[i - 1].second.second,
                             ranges[i].second.second);
  }
  return absl::OkStatus();
}

absl::StatusOr<TensorView> SafetensorsFile::Find(const std::string& name) const {
  if (auto it = tensors_.find(name); it != tensors_.end()) return it->second;
  if (auto it = unsupported_.find(name); it != unsupported_.end())
    return InvalidArgument("{}: tensor '{}' has type {}, which is not supported (F32, BF16, F16, F8_E4M3)", name_, name,
                           it->second);
  return Errorf(absl::StatusCode::kNotFound, "{}: no tensor '{}'", name_, name);
}

absl::Status WriteSafetensors(const std::string& path, std::span<const NamedTensor> tensors) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  header["__metadata__"] = {{"format", "pt"}};  // readers elsewhere ask for it
  uint64_t offset = 0;
  for (const NamedTensor& t : tensors) {
    const std::optional<uint64_t> bytes = BytesOf(t.shape, TensorTypeBytes(t.type));
    if (!bytes) return InvalidArgument("{}: tensor '{}' is too large", path, t.name);
    header[t.name] = {{"dtype", TypeName(t.type)}, {"shape", t.shape}, {"data_offsets", {offset, offset + *bytes}}};
    offset += *bytes;
  }
  std::string text = header.dump();
  text.append((64 - (8 + text.size()) % 64) % 64, ' ');  // data starts 64-byte aligned
  const std::string temporary = path + ".tmp";
  std::ofstream out(temporary, std::ios::binary | std::ios::trunc);
  const uint64_t header_bytes = text.size();
  out.write(reinterpret_cast<const char*>(&header_bytes), 8);
  out.write(text.data(), static_cast<std::streamsize>(text.size()));
  for (const NamedTensor& t : tensors) {
    const uint64_t bytes = *BytesOf(t.shape, TensorTypeBytes(t.type));
    const void* data = t.data;
    std::vector<std::byte> made;
    if (data == nullptr && t.make != nullptr) {
      SPLICE_ASSIGN_OR_RETURN(made, t.make());
      if (made.size() != bytes)
        return InvalidArgument("{}: tensor '{}' was made with {} bytes, not {}", path, t.name, made.size(), bytes);
      data = made.data();
    }
    out.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
  }
  out.close();
  if (!out) return Errorf(absl::StatusCode::kInternal, "{}: write failed: {}", temporary, std::strerror(errno));
  if (std::rename(temporary.c_str(), path.c_str()) != 0)
    return Errorf(absl::StatusCode::kInternal, "{}: rename: {}", path, std::strerror(errno));
  return absl::OkStatus();
}

}  // namespace spl::engine
