// Fields of a JSON body that say what an answer looks like: OpenAI's response_format, vLLM's structured_outputs and
// guided_*.
#pragma once

#include "services/router/request/json_reader.h"
#include "services/router/request/request.h"

namespace spl::router {

// Reads all of them into `out`. At most one may ask for something. Whether it
// can be kept to is checked later (dispatch/request_grammar.h).
void ReadStructuredOutput(ObjectReader& reader, Sampling* out);

}  // namespace spl::router
