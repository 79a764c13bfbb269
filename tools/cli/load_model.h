// Loads the model of a command that runs it in its own process.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "services/worker_flags/worker_flags.h"

namespace spl::cli {

// LoadModel, and from two seconds on a line on standard error that says how far it is. Errors are those of LoadModel.
absl::StatusOr<std::shared_ptr<const engine::Model>> LoadModelAndShow(const ModelSource& source,
                                                                      const std::string& backend,
                                                                      const std::string& kv_dtype, int32_t tp = 1);

}  // namespace spl::cli
