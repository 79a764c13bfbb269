// CRC32C (Castagnoli, reflected, as iSCSI and RocksDB use it): the checksum of every KV byte that crosses a border.
#pragma once

#include <cstddef>
#include <cstdint>

namespace spl::kernels {

// Extends `crc` by `size` bytes; start with 0. Extend(Extend(0, a), b) == Extend(0, ab). Cost: about 1/3 cycle per byte
// with SSE4.2 (three interleaved streams), a table otherwise. Thread-safe.
uint32_t Crc32cExtend(uint32_t crc, const void* data, size_t size);

// Polynomials over GF(2) modulo Castagnoli's, reflected: bit 31 is x^0. A CRC is linear in its input; moving it over n
// bytes of input multiplies it by x^(8n).
constexpr uint32_t Crc32cMultiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = b & 1 ? b >> 1 ^ 0x82f63b78u : b >> 1;
  }
  return product;
}
constexpr uint32_t Crc32cShift(size_t size) {  // x^(8 size)
  uint32_t power = 1u << 31, square = 1u << 23;
  for (; size != 0; size >>= 1) {
    if (size & 1) power = Crc32cMultiply(power, square);
    square = Crc32cMultiply(square, square);
  }
  return power;
}

namespace ref {
uint32_t Crc32cExtend(uint32_t crc, const void* data, size_t size);
}

}  // namespace spl::kernels
