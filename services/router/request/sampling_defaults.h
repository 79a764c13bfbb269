// Sampling parameters that a model recommends, for requests that name none (generation_config.json).
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "services/router/request/request.h"

namespace spl::router {

// Reads temperature, top_k, top_p, min_p and repetition_penalty of DIR/generation_config.json; do_sample: false means
// temperature 0. Members that are absent or null, and everything if there is no such file, keep the values of Sampling.
// All other members are left alone: end tokens are read by tokenizer and engine.
// InvalidArgument names the file and the member: not JSON, or a value that no request may have.
absl::StatusOr<Sampling> LoadSamplingDefaults(const std::string& model_dir);

}  // namespace spl::router
