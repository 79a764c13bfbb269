// A channel into memory of this process: writes without a wire, behind the interface that all others have.
#pragma once

#include <memory>
#include <span>

#include "services/transport/kv_transport.h"

namespace spl::transport {

// `memory` outlives the channel. Copies on the calling thread, where `done` runs, too, before Put or Get returns; a
// write is visible when Put returns, so that Flush has nothing to wait for. Any thread may call; two calls at once must
// not write the same bytes. Carrier "memory".
std::unique_ptr<KvChannel> MakeOwnMemoryChannel(std::span<std::byte> memory);

}  // namespace spl::transport
