#include "services/router/dispatch/failures.h"

#include "services/base/status.h"

namespace spl::router {

bool IsRequestsFault(absl::StatusCode code) {
  return code == absl::StatusCode::kInvalidArgument || code == absl::StatusCode::kUnimplemented ||
         code == absl::StatusCode::kOutOfRange || code == absl::StatusCode::kPermissionDenied;
}

bool GivenUpByWorker(absl::StatusCode code) {
  return IsRequestsFault(code) || code == absl::StatusCode::kResourceExhausted ||
         code == absl::StatusCode::kFailedPrecondition || code == absl::StatusCode::kAborted ||
         code == absl::StatusCode::kDataLoss;
}

bool IsWorkersFault(absl::StatusCode code) {
  return code == absl::StatusCode::kUnavailable || code == absl::StatusCode::kInternal ||
         code == absl::StatusCode::kUnknown || code == absl::StatusCode::kDataLoss;
}

absl::Status ToClientStatus(const absl::Status& status, uint32_t attempts) {
  if (IsRequestsFault(status.code()) || status.code() == absl::StatusCode::kResourceExhausted) return status;
  return Errorf(absl::StatusCode::kUnavailable, "the request failed after {} attempts: {}", attempts,
                MessageOf(status));
}

}  // namespace spl::router
