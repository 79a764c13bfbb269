// Reads from a dispatcher what the history of the operators' page samples.
#pragma once

#include "services/router/dispatch/dispatcher.h"
#include "services/router/telemetry/history.h"

namespace spl::router {

// The bounds of the histograms that ReadHistory reads.
HistoryOptions HistoryOptionsFor(std::chrono::milliseconds period);
// Any thread. Costs some microseconds: two histograms, and a sum over the workers.
HistoryReading ReadHistory(Dispatcher& core);

}  // namespace spl::router
