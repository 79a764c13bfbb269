#include "services/base/ids.h"

#include <sys/random.h>

#include <cstdlib>
#include <cstring>

#include "services/base/status.h"

namespace spl {
namespace {

int HexDigit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

}  // namespace

RandomId RandomId::Make() {
  RandomId id;
  // Up to 256 bytes getrandom never returns short once the pool is seeded; without randomness no id may be given out.
  if (getrandom(id.bytes.data(), id.bytes.size(), 0) != static_cast<ssize_t>(id.bytes.size())) std::abort();
  return id;
}

absl::StatusOr<RandomId> RandomId::FromBytes(std::string_view raw) {
  RandomId id;
  if (raw.size() != id.bytes.size()) return InvalidArgument("an id has {} bytes, not {}", id.bytes.size(), raw.size());
  std::memcpy(id.bytes.data(), raw.data(), raw.size());
  return id;
}

std::string RandomId::ToHex() const { return HexEncode(bytes); }

size_t RandomIdHash::operator()(const RandomId& id) const {
  size_t hash;
  std::memcpy(&hash, id.bytes.data(), sizeof(hash));
  return hash;
}

std::string HexEncode(std::span<const uint8_t> bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string hex;
  hex.reserve(bytes.size() * 2);
  for (const uint8_t byte : bytes) {
    hex.push_back(kDigits[byte >> 4]);
    hex.push_back(kDigits[byte & 15]);
  }
  return hex;
}

absl::StatusOr<std::string> HexDecode(std::string_view hex) {
  if (hex.size() % 2 != 0) return InvalidArgument("hex text has the odd length {}", hex.size());
  std::string raw(hex.size() / 2, '\0');
  for (size_t i = 0; i < raw.size(); ++i) {
    const int high = HexDigit(hex[2 * i]);
    const int low = HexDigit(hex[2 * i + 1]);
    if (high < 0 || low < 0) return InvalidArgument("hex text has another character than 0-9a-f at {}", 2 * i);
    raw[i] = static_cast<char>(high * 16 + low);
  }
  return raw;
}

}  // namespace spl
