// Keys to remote memory as they come from another program: nothing but what FrameRkey made gets through to UCX.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "services/transport/rkey_frame.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string framed(reinterpret_cast<const char*>(data), size);
  const auto frame = spl::transport::UnframeRkey(framed);
  if (frame.ok() ? spl::transport::FrameRkey(*frame) != framed
                 : frame.status().code() != absl::StatusCode::kInvalidArgument)
    std::abort();
  if (framed.empty()) return 0;  // a key without bytes is none
  const auto own = spl::transport::UnframeRkey(spl::transport::FrameRkey({framed, static_cast<uint16_t>(size)}));
  if (!own.ok() || own->packed != framed || own->local_port != static_cast<uint16_t>(size)) std::abort();
  return 0;
}
