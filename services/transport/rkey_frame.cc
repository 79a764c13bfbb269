#include "services/transport/rkey_frame.h"

#include <cstdint>
#include <cstring>

#include "services/base/status.h"

namespace spl::transport {
namespace {

constexpr char kMagic[] = {'S', 'P', 'L', 'R', 'K', 'E', 'Y', '1'};
constexpr size_t kChecksumAt = sizeof(kMagic);
constexpr size_t kPortAt = kChecksumAt + sizeof(uint64_t);  // the checksum covers everything from here on
constexpr size_t kPackedAt = kPortAt + sizeof(uint16_t);

// FNV-1a: protects against accidents, not forgery; a peer that may send an rkey may write the memory anyway.
uint64_t Checksum(const std::string& framed) {
  uint64_t hash = 0xcbf29ce484222325;
  for (size_t i = kPortAt; i < framed.size(); ++i) hash = (hash ^ static_cast<uint8_t>(framed[i])) * 0x100000001b3;
  return hash;
}

}  // namespace

std::string FrameRkey(const RkeyFrame& frame) {
  std::string framed(kPackedAt, '\0');
  std::memcpy(framed.data(), kMagic, sizeof(kMagic));
  std::memcpy(framed.data() + kPortAt, &frame.local_port, sizeof(frame.local_port));
  framed += frame.packed;
  const uint64_t checksum = Checksum(framed);
  std::memcpy(framed.data() + kChecksumAt, &checksum, sizeof(checksum));
  return framed;
}

absl::StatusOr<RkeyFrame> UnframeRkey(const std::string& framed) {
  if (framed.size() <= kPackedAt || std::memcmp(framed.data(), kMagic, sizeof(kMagic)) != 0) {
    return InvalidArgument("the peer's rkey ({} bytes) is not one of this transport", framed.size());
  }
  uint64_t checksum = 0;
  std::memcpy(&checksum, framed.data() + kChecksumAt, sizeof(checksum));
  if (Checksum(framed) != checksum) return InvalidArgument("the peer's rkey is damaged");
  RkeyFrame frame;
  std::memcpy(&frame.local_port, framed.data() + kPortAt, sizeof(frame.local_port));
  frame.packed = framed.substr(kPackedAt);
  return frame;
}

}  // namespace spl::transport
