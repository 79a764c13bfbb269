// Counter of refused tickets (KV reservations), shared by prefill and decode workers.
#pragma once

#include "services/base/metrics.h"

namespace spl::wire {

// `reason`: unknown, generation, replayed, invalid; see docs/metrics.md.
inline prometheus::Counter& RefusedTicketsCounter(Metrics& metrics, const char* reason) {
  return metrics.Counter("splice_kv_tickets_refused_total", "Tickets that were not honoured.", {{"reason", reason}});
}

}  // namespace spl::wire
