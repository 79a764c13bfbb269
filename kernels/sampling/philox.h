// Counter-based random numbers: Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3;
// SC 2011). There is no state: a number is a function of counter and key.
#pragma once

#include <array>
#include <cstdint>

namespace spl::kernels {

inline std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xd2511f53} * counter[0], b = uint64_t{0xcd9e8d57} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key[0] += 0x9e3779b9;
    key[1] += 0xbb67ae85;
  }
  return counter;
}

// The 64 random bits that draw output token `output_index` of continuation `fork`.
inline uint64_t SamplingRandom(uint64_t seed, uint32_t fork, uint64_t output_index) {
  const std::array<uint32_t, 4> words =
      Philox4x32({static_cast<uint32_t>(output_index), static_cast<uint32_t>(output_index >> 32), fork, 0},
                 {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  return words[0] | uint64_t{words[1]} << 32;
}

}  // namespace spl::kernels
