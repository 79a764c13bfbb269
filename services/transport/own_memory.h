// A channel into memory of this process: writes without a wire, behind the common interface.
#pragma once

#include <memory>
#include <span>

#include "services/transport/kv_transport.h"

namespace spl::transport {

// `memory` must outlive the channel. Copies on the calling thread, where `done` also runs, before Put or Get returns. A
// write is visible when Put returns, so Flush has nothing to wait for. Any thread may call; two concurrent calls must
// not write the same bytes. The carrier is "memory".
std::unique_ptr<KvChannel> MakeOwnMemoryChannel(std::span<std::byte> memory);

}  // namespace spl::transport
