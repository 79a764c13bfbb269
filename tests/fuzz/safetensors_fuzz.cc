// Any bytes as a safetensors file: indexed within bounds, or refused; every tensor found can be read to its last byte.
#include <cstddef>
#include <cstdint>
#include <span>

#include "services/engine/model/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto file = spl::engine::SafetensorsFile::FromBytes({reinterpret_cast<const std::byte*>(data), size}, "fuzz");
  if (!file.ok()) return 0;
  unsigned sum = 0;
  for (const auto& [name, tensor] : (*file)->tensors()) {
    for (size_t i = 0; i < tensor.bytes; ++i) sum += static_cast<unsigned>(tensor.data[i]);
    if (!(*file)->Find(name).ok()) __builtin_trap();
  }
  volatile unsigned sink = sum;
  (void)sink;
  return 0;
}
