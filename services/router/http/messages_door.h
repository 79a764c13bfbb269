// The door of Anthropic's /v1/messages.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/router/http/generation_api.h"
#include "services/router/request/served_model.h"

namespace spl::router {

// Reads a body. Its answer has an id made of `request_id`. The call borrows the model.
absl::StatusOr<GenerationCall> ReadMessagesCall(const std::string& body, const std::string& request_id,
                                                const ServedModel& model);

}  // namespace spl::router
