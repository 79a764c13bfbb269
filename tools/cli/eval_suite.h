// Named lists of methods for `splice eval --suite`.
#pragma once

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
// sixteenth of the context. InvalidArgument: another name.
absl::StatusOr<EvalSuite> FindEvalSuite(const std::string& name);

}  // namespace spl::cli
