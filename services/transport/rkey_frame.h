// Frames packed rkeys: UCX trusts the bytes of an rkey, and the frame refuses damaged or foreign strings.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace spl::transport {

struct RkeyFrame {
  std::string packed;       // port on 127.0.0.1 of the peer's listener for shared memory; 0: none
  uint16_t local_port = 0;  // on 127.0.0.1: the peer's listener for shared memory; 0 when it has none
};

std::string FrameRkey(const RkeyFrame& frame);
// InvalidArgument: `framed` was not made by FrameRkey.
absl::StatusOr<RkeyFrame> UnframeRkey(const std::string& framed);

}  // namespace spl::transport
