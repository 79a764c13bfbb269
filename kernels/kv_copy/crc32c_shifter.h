// Moves CRCs over a fixed number of bytes, many times, to join the checksums of a prompt's pages.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/kv_copy/crc32c.h"

namespace spl::kernels {

// shifter(crc) == Crc32cMultiply(Crc32cShift(size), crc), by four look-ups instead of 32 steps. The product is linear
// in the CRC, so it is the sum of the products of its bytes. Construction takes 1,024 multiplications.
class Crc32cShifter {
 public:
  explicit Crc32cShifter(size_t size) {
    const uint32_t shift = Crc32cShift(size);
    for (int byte = 0; byte < 4; ++byte) {
      for (uint32_t value = 0; value < 256; ++value) table_[byte][value] = Crc32cMultiply(shift, value << (8 * byte));
    }
  }
  uint32_t operator()(uint32_t crc) const {
    return table_[0][crc & 0xff] ^ table_[1][crc >> 8 & 0xff] ^ table_[2][crc >> 16 & 0xff] ^ table_[3][crc >> 24];
  }

 private:
  std::array<std::array<uint32_t, 256>, 4> table_;
};

}  // namespace spl::kernels
