// Named lists of methods for `splice eval --suite`.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace spl::cli {

// In the words of --reuse and --decode; every pair of one each is asked for, and what the cluster refuses is reported
// with its reason.
struct EvalSuite {
  std::vector<std::string> reuse, decode;
};

// "methods": all prefill methods by all decode methods and their baselines, with budgets of a sixteenth of the context
// where tokens are chosen. InvalidArgument: another name.
absl::StatusOr<EvalSuite> FindEvalSuite(const std::string& name);

}  // namespace spl::cli
