// The plan of a load run: the body of each request and its time.
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
  std::chrono::nanoseconds at{0};  // open loop: start, since the start of the run
};

struct LoadPlanOptions {
  std::string model;              // empty: the server's only model
  std::vector<int32_t> alphabet;  // token ids that prompts are drawn from; must not be empty
  uint32_t input_tokens = 512;
  uint32_t shared_prefix_tokens = 0;  // first of input_tokens, equal in all requests
  uint32_t output_tokens = 128;
  uint32_t num_requests = 100;
  double rate_per_s = 0;  // Poisson arrivals; 0: closed loop, `at` stays 0
  uint64_t seed = 1;
  double temperature = 0;
};

// Makes random prompts of exact length. Equal options give equal plans.
std::vector<PlannedRequest> MakeSyntheticPlan(const LoadPlanOptions& options);

// One request per line of a JSONL trace:
//   {"prompt": TEXT | "messages": […] | "input_length": N, "output_length": M, "timestamp": MS, "hash_ids": [ID, …]}
// "input_tokens" and "output_tokens" are other names for the lengths. Each hash id stands for a block of 512 prompt
// tokens, equal wherever the id occurs, so that a trace with hash ids shows its real reuse. Missing lengths and the
// rate come from `options`; without a rate the timestamps are kept. Takes at most options.num_requests lines (0: all).
// InvalidArgument names file and line.
absl::StatusOr<std::vector<PlannedRequest>> ReadTracePlan(const std::string& path, const LoadPlanOptions& options,
                                                          bool keep_timestamps);

}  // namespace spl::cli
