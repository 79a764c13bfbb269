// Random identities (requests, tickets, workers) and hex.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace spl {

// 128 random bits from the kernel's generator: unguessable, so that a ticket id may serve as a capability.
struct RandomId {
  std::array<uint8_t, 16> bytes{};

  static RandomId Make();
  // Takes the 16 raw bytes of a proto field. InvalidArgument: another length.
  static absl::StatusOr<RandomId> FromBytes(std::string_view raw);

  std::string ToBytes() const { return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()); }
  std::string ToHex() const;
  bool operator==(const RandomId&) const = default;
};

struct RandomIdHash {
  size_t operator()(const RandomId& id) const;
};

// Lower-case, two digits per byte.
std::string HexEncode(std::span<const uint8_t> bytes);
// InvalidArgument: odd length, or a character other than 0-9 a-f A-F.
absl::StatusOr<std::string> HexDecode(std::string_view hex);

}  // namespace spl
