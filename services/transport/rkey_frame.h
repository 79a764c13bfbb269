// UCX trusts the bytes of a packed rkey, so they travel in a frame that a damaged or foreign string does not pass.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace spl::transport {

struct RkeyFrame {
  std::string packed;       // UCX's bytes
  uint16_t local_port = 0;  // on 127.0.0.1: the peer's listener for shared memory; 0 when it has none
};

std::string FrameRkey(const RkeyFrame& frame);
// InvalidArgument when `framed` was not made by FrameRkey.
absl::StatusOr<RkeyFrame> UnframeRkey(const std::string& framed);

}  // namespace spl::transport
