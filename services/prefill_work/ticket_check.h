// Checks a ticket before anything is written to the pages that it names.
#pragma once

#include <span>

#include "absl/status/status.h"
#include "services/chunk/chunk.h"
#include "services/engine/engine.h"
#include "spl/v1/decode.pb.h"

namespace spl::prefill {

// InvalidArgument: the ticket is not for a sequence of this model, for this number of tokens, and for pages inside the
// peer's pool; or it keeps less than the head classes of the request do (`classes`; null: none).
absl::Status ValidateTicket(const v1::Ticket& ticket, const v1::DecodeEndpoint& endpoint, const engine::Model& model,
                            int64_t num_tokens, const engine::StreamClasses* classes);

// For a ticket whose decode worker holds the prompt's first tokens, which are not sent. InvalidArgument: they are not
// the prompt's, not whole pages, all of it, or the ticket has holes. Cost: a SHA-256 over them.
absl::Status CheckHeldTokens(const v1::Ticket& ticket, const engine::Model& model, const chunk::Digest& namespace_key,
                             std::span<const int32_t> tokens);

}  // namespace spl::prefill
