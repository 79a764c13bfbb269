// Models without a checkpoint, for measurements. They have the shape of a published model, and seeded weights that are
// the same on every machine, device and number of threads.
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
  ModelConfig config;  // config.name is the shape's
  uint64_t seed = 0;
};

// Parses "SHAPE" or "SHAPE:SEED". SHAPE is one of RandomShapeNames(), or the path of a config.json: the model is named
// after its folder, or after the file if the file has another name. InvalidArgument lists the names; errors of a file
// are those of ParseModelConfig.
absl::StatusOr<RandomModel> ParseRandomModel(const std::string& spec);
std::vector<std::string> RandomShapeNames();

// Random stream of a tensor (kernels/fill/fill.h): XXH3-64 of its name, seeded. It must not change: published results
// that name a seed depend on it.
uint64_t RandomStream(uint64_t seed, std::string_view tensor_name);

// Generates every tensor on request, in place on the device, in the type of the configuration. Norm weights are 1; all
// others are about normal with standard deviation 0.02. `backend` must outlive the source.
absl::StatusOr<std::unique_ptr<WeightSource>> MakeRandomSource(const RandomModel& model,
                                                               const kernels::Backend& backend);

}  // namespace spl::engine
