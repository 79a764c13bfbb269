#include "kernels/kv_copy/crc32c.h"

namespace spl::kernels::ref {

uint32_t Crc32cExtend(uint32_t crc, const void* data, size_t size) {
  constexpr uint32_t kPolynomial = 0x82f63b78u;  // Castagnoli, reflected
  const auto* p = static_cast<const uint8_t*>(data);
  crc = ~crc;
  for (size_t i = 0; i < size; ++i) {
    crc ^= p[i];
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? kPolynomial : 0);
  }
  return ~crc;
}

}  // namespace spl::kernels::ref
