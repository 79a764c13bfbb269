// The prompt of a gRPC request as plain values.
#pragma once

#include "absl/status/statusor.h"
#include "services/router/request/request.h"
#include "spl/v1/inference.pb.h"

namespace spl::router {

// InvalidArgument names the field.
absl::StatusOr<Prompt> FromProto(const v1::Prompt& prompt);

}  // namespace spl::router
