// The door of OpenAI's /v1/chat/completions and /v1/completions.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "services/router/http/generation_api.h"
#include "services/router/request/served_model.h"

namespace spl::router {

// Reads a body of one of the two. Its answer has an id made of `request_id`. The call borrows the model.
absl::StatusOr<GenerationCall> ReadOpenAiCall(const std::string& body, const std::string& request_id,
                                              const ServedModel& model, bool chat);

}  // namespace spl::router
