// Classifies failed calls on workers: whose fault they are, and the status for the client.
#pragma once

#include <cstdint>

#include "absl/status/status.h"

namespace spl::router {

// The request itself is at fault: another worker would say the same.
bool IsRequestsFault(absl::StatusCode code);

// The prefill worker gave up and said so itself, so its writes have ended; other codes may come from a broken
// connection.
bool GivenUpByWorker(absl::StatusCode code);

// The failure counts against the worker. A full worker, one that has not this model, and a request that ran out of time
// do not.
bool IsWorkersFault(absl::StatusCode code);

// The client's view of a failure inside the cluster: it may try again. A deadline inside the cluster, of a ticket for
// example, is not the client's.
absl::Status ToClientStatus(const absl::Status& status, uint32_t attempts);

}  // namespace spl::router
