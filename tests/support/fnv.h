// A hash that two test processes agree on.
#pragma once

#include <cstddef>
#include <cstdint>

namespace spl::testing {

inline uint64_t Fnv1a(const std::byte* data, size_t size) {
  uint64_t hash = 0xcbf29ce484222325;
  for (size_t i = 0; i < size; ++i) hash = (hash ^ static_cast<uint8_t>(data[i])) * 0x100000001b3;
  return hash;
}

}  // namespace spl::testing
