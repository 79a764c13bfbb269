// Names that the fields of a request have in gRPC, for errors.
#pragma once

#include "services/router/request/field_names.h"
#include "spl/v1/inference.pb.h"

namespace spl::router {

// Checks name fields as the HTTP API does: "splice.reuse", "max_tokens", "messages". Maps these to the fields of
// v1.GenerateRequest: "reuse.policy", "sampling.max_tokens", "prompt.chat.messages". `kind`: the request's prompt, on
// which the place of segments depends. Made once; any thread.
const FieldNames& ProtoNames(v1::Prompt::KindCase kind);

}  // namespace spl::router
