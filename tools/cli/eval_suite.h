// Named lists of methods for `splice eval --suite`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace spl::cli {

// Values for --reuse and --decode. Every pair is evaluated; pairs that the cluster refuses are reported with the
// reason.
struct EvalSuite {
  std::vector<std::string> reuse, decode;
};

// "methods": all prefill methods × all decode methods and their baselines. Methods that choose tokens get a budget of a
// sixteenth of the context, and bands the published windows, or half of a context below 8,192 tokens.
// "recovery": exact, sparsex with dense layers, and sparsex with probes of half to all of the model's `num_layers`,
// each with three shares of recomputed tokens (recovery_choice.h). InvalidArgument: another name, or "recovery" without
// a number of layers.
absl::StatusOr<EvalSuite> FindEvalSuite(const std::string& name, int32_t num_layers = 0);

}  // namespace spl::cli
