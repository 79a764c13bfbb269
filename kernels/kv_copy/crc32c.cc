#include "kernels/kv_copy/crc32c.h"

#include <array>
#include <cstring>

#include "kernels/kv_copy/crc32c_portable.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace spl::kernels {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78u;  // Castagnoli, reflected

// kTables[k][b]: the CRC of byte b followed by k zero bytes ("slicing by 8").
using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables MakeTables() {
  Tables t{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t crc = b;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? kPolynomial : 0);
    t[0][b] = crc;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (uint32_t b = 0; b < 256; ++b) t[k][b] = t[k - 1][b] >> 8 ^ t[0][t[k - 1][b] & 0xff];
  }
  return t;
}

constexpr Tables kTables = MakeTables();

uint32_t ExtendPortable(uint32_t crc, const uint8_t* p, size_t size) {
  for (; size >= 8; p += 8, size -= 8) {
    uint64_t word;
    std::memcpy(&word, p, 8);
    word ^= crc;
    crc = 0;
    for (int k = 0; k < 8; ++k) crc ^= kTables[7 - k][word >> (8 * k) & 0xff];
  }
  for (; size > 0; ++p, --size) crc = crc >> 8 ^ kTables[0][(crc ^ *p) & 0xff];
  return crc;
}

#if defined(__x86_64__)
// The crc32 instruction takes 8 bytes per cycle but answers after 3 cycles, so three streams run side by side. To join
// them, each CRC is moved over the bytes of the later streams: linear in the CRC's bits, so four table look-ups do it.
struct ShiftTable {
  std::array<std::array<uint32_t, 256>, 4> t{};
};

// crc moved over `zeros` zero bytes, for each value of each of its four bytes.
constexpr ShiftTable MakeShift(size_t zeros) {
  ShiftTable s;
  std::array<uint32_t, 32> bit{};  // where each single bit goes
  for (size_t i = 0; i < 32; ++i) {
    uint32_t crc = uint32_t{1} << i;
    for (size_t z = 0; z < zeros; ++z) crc = crc >> 8 ^ kTables[0][crc & 0xff];
    bit[i] = crc;
  }
  for (size_t byte = 0; byte < 4; ++byte) {
    for (uint32_t v = 0; v < 256; ++v) {
      for (size_t i = 0; i < 8; ++i) s.t[byte][v] ^= v >> i & 1 ? bit[byte * 8 + i] : 0;
    }
  }
  return s;
}

uint32_t Shift(const ShiftTable& s, uint32_t crc) {
  return s.t[0][crc & 0xff] ^ s.t[1][crc >> 8 & 0xff] ^ s.t[2][crc >> 16 & 0xff] ^ s.t[3][crc >> 24];
}

// Long stretches for bulk (the joins vanish in 12 KiB), short ones for the rest.
constexpr size_t kLong = 4096;
constexpr size_t kShort = 256;

uint64_t Word(const uint8_t* p) {
  uint64_t word;
  std::memcpy(&word, p, 8);
  return word;
}

template <size_t kStretch>
__attribute__((target("sse4.2"))) uint32_t ExtendThreeWay(uint32_t crc, const uint8_t*& p, size_t& size,
                                                          const ShiftTable& shift) {
  while (size >= 3 * kStretch) {
    uint64_t a = crc, b = 0, c = 0;
    for (size_t i = 0; i < kStretch; i += 8) {
      a = _mm_crc32_u64(a, Word(p + i));
      b = _mm_crc32_u64(b, Word(p + kStretch + i));
      c = _mm_crc32_u64(c, Word(p + 2 * kStretch + i));
    }
    crc = Shift(shift, Shift(shift, static_cast<uint32_t>(a)) ^ static_cast<uint32_t>(b)) ^ static_cast<uint32_t>(c);
    p += 3 * kStretch;
    size -= 3 * kStretch;
  }
  return crc;
}

__attribute__((target("sse4.2"))) uint32_t ExtendSse42(uint32_t crc, const uint8_t* p, size_t size) {
  static const ShiftTable long_shift = MakeShift(kLong);
  static const ShiftTable short_shift = MakeShift(kShort);
  crc = ExtendThreeWay<kLong>(crc, p, size, long_shift);
  crc = ExtendThreeWay<kShort>(crc, p, size, short_shift);
  uint64_t a = crc;
  for (; size >= 8; p += 8, size -= 8) a = _mm_crc32_u64(a, Word(p));
  crc = static_cast<uint32_t>(a);
  for (; size > 0; ++p, --size) crc = _mm_crc32_u8(crc, *p);
  return crc;
}
#endif

}  // namespace

uint32_t Crc32cExtend(uint32_t crc, const void* data, size_t size) {
  const auto* p = static_cast<const uint8_t*>(data);
#if defined(__x86_64__)
  static const bool sse42 = __builtin_cpu_supports("sse4.2");
  if (sse42) return ~ExtendSse42(~crc, p, size);
#endif
  return ~ExtendPortable(~crc, p, size);
}

uint32_t portable::Crc32cExtend(uint32_t crc, const void* data, size_t size) {
  return ~ExtendPortable(~crc, static_cast<const uint8_t*>(data), size);
}

}  // namespace spl::kernels
