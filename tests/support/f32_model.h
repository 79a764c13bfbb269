// A copy of a bf16 checkpoint in f32. Products of f32 are the same in whatever company a row is computed, and a near
// tie of two logits is as good as never: answers can be compared whatever has become of a request on its way.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace spl::test {

// One safetensors file, tensor by tensor in the order of its bytes. False: it is not one of bf16 alone.
inline bool ConvertToF32(const std::filesystem::path& from, const std::filesystem::path& to) {
  std::ifstream in(from, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  uint64_t header_bytes = 0;
  if (bytes.size() < sizeof(header_bytes)) return false;
  std::memcpy(&header_bytes, bytes.data(), sizeof(header_bytes));
  if (header_bytes > bytes.size() - sizeof(header_bytes)) return false;
  const char* const data = bytes.data() + sizeof(header_bytes) + header_bytes;
  auto header = nlohmann::json::parse(bytes.data() + sizeof(header_bytes), data, nullptr, false);
  if (!header.is_object()) return false;
  for (auto& [name, tensor] : header.items()) {
    if (name == "__metadata__") continue;
    if (tensor["dtype"] != "BF16") return false;
    tensor["dtype"] = "F32";
    for (auto& offset : tensor["data_offsets"]) offset = 2 * offset.get<uint64_t>();
  }
  const size_t num_values = static_cast<size_t>(bytes.data() + bytes.size() - data) / sizeof(uint16_t);
  std::vector<float> values(num_values);
  for (size_t i = 0; i < num_values; ++i) {
    uint16_t bf16;
    std::memcpy(&bf16, data + i * sizeof(bf16), sizeof(bf16));
    values[i] = std::bit_cast<float>(uint32_t{bf16} << 16);
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t text_bytes = text.size();
  std::ofstream out(to, std::ios::binary);
  out.write(reinterpret_cast<const char*>(&text_bytes), sizeof(text_bytes));
  out.write(text.data(), static_cast<std::streamsize>(text.size()));
  out.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(num_values * sizeof(float)));
  return out.good();
}

// Into the directory `to`, which is made. Without a map of head classes: that one belongs to the other weights.
inline bool CopyModelAsF32(const std::filesystem::path& from, const std::filesystem::path& to) {
  std::filesystem::create_directories(to);
  for (const auto& file : std::filesystem::directory_iterator(from)) {
    const std::filesystem::path target = to / file.path().filename();
    if (file.path().extension() == ".safetensors") {
      if (!ConvertToF32(file.path(), target)) return false;
    } else if (file.path().filename() == "config.json") {
      std::ifstream in(file.path());
      auto config = nlohmann::json::parse(in, nullptr, false);
      if (!config.is_object()) return false;
      config["torch_dtype"] = "float32";
      std::ofstream(target) << config.dump(2);
    } else if (file.path().filename() != "head_classes.json") {
      std::filesystem::copy_file(file.path(), target);
    }
  }
  return true;
}

}  // namespace spl::test
