// Models without a checkpoint, for measurements: the shape of a published model and seeded weights that are the same
// on every machine, device and number of threads.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend/backend.h"
#include "services/engine/model/model_config.h"
#include "services/engine/model/weight_source.h"

namespace spl::engine {

struct RandomModel {
  ModelConfig config;  // name: the shape's
  uint64_t seed = 0;
};

// "SHAPE" or "SHAPE:SEED"; SHAPE is one of RandomShapeNames() or the path of a config.json (named after its folder; of
// another name: after the file).
// InvalidArgument lists the names; a file's errors are those of ParseModelConfig.
absl::StatusOr<RandomModel> ParseRandomModel(const std::string& spec);
std::vector<std::string> RandomShapeNames();

// The number of a tensor's stream (kernels/fill/fill.h): XXH3-64 of its name, seeded. A format: results that name a
// seed depend on it.
uint64_t RandomStream(uint64_t seed, std::string_view tensor_name);

// Every tensor that is asked for, in the type of the configuration: norm weights are 1, all others about normal with
// standard deviation 0.02, made in place on the device. `backend` outlives the source.
absl::StatusOr<std::unique_ptr<WeightSource>> MakeRandomSource(const RandomModel& model,
                                                               const kernels::Backend& backend);

}  // namespace spl::engine
