// Loads the sampling parameters that a model recommends (generation_config.json), for requests that name none.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "services/router/request/request.h"

namespace spl::router {

// Reads temperature, top_k, top_p, min_p and repetition_penalty of DIR/generation_config.json; do_sample: false means
// temperature 0. Members that are absent or null keep the values of Sampling; so does everything if there is no such
// file. All other members are ignored: tokenizer and engine read the end tokens.
// InvalidArgument names the file and the member: not JSON, or a value that no request may have.
absl::StatusOr<Sampling> LoadSamplingDefaults(const std::string& model_dir);

}  // namespace spl::router
