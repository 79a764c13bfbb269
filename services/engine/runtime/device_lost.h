// Handles the permanent loss of an engine's device.
#pragma once

#include <functional>

#include "absl/status/status.h"

namespace spl::engine {

// True for errors after which a device's context cannot be used again: an illegal address, a hardware fault, a GPU that
// fell off the bus. Device backends report them as DataLoss (kernels/cuda/cuda_status.h); host backends never do.
inline bool IsDeviceLost(const absl::Status& status) { return status.code() == absl::StatusCode::kDataLoss; }

// Called once, on the engine thread, after every sequence has ended with Unavailable, so that their callers start them
// again elsewhere. The process cannot use the device any more.
using OnDeviceLost = std::function<void(const absl::Status&)>;

// The default: prints one line to stderr and ends the process with code 1. A supervisor starts a new process; until
// then the router uses other workers.
void EndProcessOnDeviceLost(const absl::Status& status);

}  // namespace spl::engine
