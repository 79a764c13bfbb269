// A worker's report about itself as placement sees it.
#pragma once

#include "services/router/fleet/snapshot.h"
#include "spl/v1/decode.pb.h"
#include "spl/v1/prefill.pb.h"

namespace spl::router {

// Without what the router itself knows: connection, address, clock and peers.
PrefillView WorkerView(const v1::PrefillInfo& info);
DecodeView WorkerView(const v1::DecodeInfo& info);
// The decode worker as a place for short prompts. REQUIRES: info.has_local_prefill().
PrefillView LocalWorkerView(const v1::DecodeInfo& info);

}  // namespace spl::router
