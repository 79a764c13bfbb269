// Device memory that grows when a pass needs more than any before it.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "kernels/backend/backend.h"
#include "kernels/backend/session.h"
#include "services/base/status.h"

namespace spl::engine {

// Makes `buffer` at least `bytes` long; what it held is lost when it grows. Waits for the session then, which may be
// using the old one. ResourceExhausted when the device has no room.
inline absl::Status GrowBuffer(const kernels::Backend& backend, kernels::Session& session,
                               std::unique_ptr<kernels::Buffer>& buffer, size_t bytes) {
  if (buffer != nullptr && buffer->size() >= bytes) return absl::OkStatus();
  SPLICE_RETURN_IF_ERROR(session.Synchronize());
  SPLICE_ASSIGN_OR_RETURN(buffer, backend.Allocate(bytes));
  return absl::OkStatus();
}

}  // namespace spl::engine
