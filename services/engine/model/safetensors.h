// Reader and writer of the safetensors format: an 8-byte little-endian header length, a JSON header, the bytes of the
// tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace spl::engine {

enum class TensorType : uint8_t { kF32, kBF16, kF16, kI32, kI64, kE4M3 };

size_t TensorTypeBytes(TensorType type);

// A tensor in an open file. Borrowed: valid while the SafetensorsFile lives. `data` may be unaligned.
struct TensorView {
  TensorType type = TensorType::kF32;
  std::vector<int64_t> shape;
  const std::byte* data = nullptr;
  size_t bytes = 0;
};

// A memory-mapped file, checked when it is opened: every tensor lies inside the file, none overlaps another, and its
// size is its shape times its type. Find fails for tensors of other types (F64, I8, …). Immutable; any thread.
class SafetensorsFile {
 public:
  // InvalidArgument names the file and the tensor. NotFound: there is no file.
  static absl::StatusOr<std::unique_ptr<SafetensorsFile>> Open(const std::string& path);
  // The same for bytes that the caller keeps alive (tests, fuzzing).
  static absl::StatusOr<std::unique_ptr<SafetensorsFile>> FromBytes(std::span<const std::byte> bytes, std::string name);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  absl::StatusOr<TensorView> Find(const std::string& name) const;
  bool Contains(const std::string& name) const { return tensors_.contains(name) || unsupported_.contains(name); }
  const std::map<std::string, TensorView>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& unsupported() const { return unsupported_; }  // name → type
  std::span<const std::byte> bytes() const { return bytes_; }
  const std::string& name() const { return name_; }

 private:
  SafetensorsFile() = default;
  absl::Status Index();

  std::string name_;
  std::span<const std::byte> bytes_;
  void* mapping_ = nullptr;  // owned; null: FromBytes
  std::map<std::string, TensorView> tensors_;
  std::map<std::string, std::string> unsupported_;  // name → type
};

struct NamedTensor {
  std::string name;
  TensorType type = TensorType::kF32;
  std::vector<int64_t> shape;
  const void* data = nullptr;
  // Without `data`: makes the bytes when it is their turn to be written, so that no more than one tensor is in memory.
  std::function<absl::StatusOr<std::vector<std::byte>>()> make = nullptr;
};

// Writes the tensors in the given order; the data section starts 64-byte aligned. Writes a temporary file, which
// replaces `path` at the end. Errors: those of NamedTensor::make; Internal: it cannot be written.
absl::Status WriteSafetensors(const std::string& path, std::span<const NamedTensor> tensors);

}  // namespace spl::engine
