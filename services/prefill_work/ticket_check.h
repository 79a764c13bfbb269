// Checks a ticket before anything is written to the pages that it names.
#pragma once

#include "absl/status/status.h"
#include "services/engine/engine.h"
#include "spl/v1/decode.pb.h"

namespace spl::prefill {

// InvalidArgument: the ticket is not for a sequence of this model, for this number of tokens, and for pages inside the
// peer's pool; or it keeps less than the head classes of the request do (`classes`; null: none).
absl::Status ValidateTicket(const v1::Ticket& ticket, const v1::DecodeEndpoint& endpoint, const engine::Model& model,
                            int64_t num_tokens, const engine::StreamClasses* classes);

}  // namespace spl::prefill
