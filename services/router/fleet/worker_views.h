// A member as placement sees it: its last report, and what the router knows of it.
#pragma once

#include "services/router/fleet/snapshot.h"
#include "services/router/fleet/worker_slot.h"

namespace spl::router {

// Without peers.
PrefillView WorkerView(const PrefillSlot& slot);
DecodeView WorkerView(const DecodeSlot& slot);
// The decode worker as a place for short prompts, with itself as its only peer. REQUIRES: its report has local_prefill.
PrefillView LocalWorkerView(const DecodeSlot& slot);

}  // namespace spl::router
