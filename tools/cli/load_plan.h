// What a load run sends: one body per request, and when.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace spl::cli {

struct PlannedRequest {
  std::string path = "/v1/completions";
  std::string body;
  std::chrono::nanoseconds at{0};  // since the start of the run; of open-loop runs
};

struct LoadPlanOptions {
  std::string model;              // empty: the server's only model
  std::vector<int32_t> alphabet;  // token ids that prompts are drawn from; not empty
  uint32_t input_tokens = 512;
  uint32_t shared_prefix_tokens = 0;  // of input_tokens, equal in all requests
  uint32_t output_tokens = 128;
  uint32_t num_requests = 100;
  double rate_per_s = 0;  // Poisson arrivals; 0: closed loop, `at` stays 0
  uint64_t seed = 1;
  double temperature = 0;
};

// Random prompts of exact length. The same options give the same plan.
std::vector<PlannedRequest> MakeSyntheticPlan(const LoadPlanOptions& options);

// One request per line of a JSONL trace:
//   {"prompt": TEXT | "messages": […] | "input_length": N, "output_length": M, "timestamp": MS, "hash_ids": [ID, …]}
// ("input_tokens"/"output_tokens" are other names for the lengths.) Each hash id stands for a block of 512 prompt
// tokens that is equal wherever the id is: traces that carry them show their real reuse. Lengths that are missing come
// from `options`, and so does the rate; without a rate the timestamps are kept. At most options.num_requests lines are
// taken (0: all). InvalidArgument names file and line.
absl::StatusOr<std::vector<PlannedRequest>> ReadTracePlan(const std::string& path, const LoadPlanOptions& options,
                                                          bool keep_timestamps);

}  // namespace spl::cli
