#include "tools/cli/load_model.h"

#include "tools/cli/progress_line.h"

namespace spl::cli {

absl::StatusOr<std::shared_ptr<const engine::Model>> LoadModelAndShow(const ModelSource& source,
                                                                      const std::string& backend,
                                                                      const std::string& kv_dtype, int32_t tp) {
  StageLine stage;
  stage.Begin("loading the weights");
  return LoadModel(source, backend, kv_dtype, tp,
                   [&](uint64_t done_bytes, uint64_t total_bytes) { stage.Update(done_bytes, total_bytes); });
}

}  // namespace spl::cli
