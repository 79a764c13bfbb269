// Sends the requests of a plan to an endpoint and times everything that comes back. Asynchronous: one thread drives any
// number of streams, so that the load generator is not the bottleneck.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tools/cli/api_url.h"
#include "tools/cli/load_plan.h"

namespace spl::cli {

struct LoadOptions {
  HttpUrl endpoint;
  std::string api_key;
  std::string ca_file;                         // with https://: CAs of the server's certificate; empty: the system's
  uint32_t concurrency = 1;                    // number of parallel streams; in an open loop the most
  bool open_loop = false;                      // start each request at its planned time, not when a stream is free
  std::chrono::milliseconds timeout{600'000};  // time limit of one request
  // Looked at about five times a second: once it is true the run ends at once. Null: it runs to its end. Borrowed.
  const std::atomic<bool>* stop = nullptr;
};

// Times are in seconds since the start of the run, on a steady clock.
struct RequestResult {
  std::string error;       // empty: success
  double scheduled_s = 0;  // open loop: planned start; latencies count from it (a late start is latency)
  double first_token_s = 0;
  double last_token_s = 0;
  double end_s = 0;
  std::vector<float> gaps_s;  // times between events with output
  uint32_t prompt_tokens = 0;
  uint32_t completion_tokens = 0;
  uint32_t cached_tokens = 0;
};

struct LoadProgress {
  uint32_t finished = 0, failed = 0, running = 0, total = 0;
  uint64_t output_events = 0;
  double elapsed_s = 0;
};

struct LoadOutcome {
  std::vector<RequestResult> results;  // in the order of the plan; of a stopped run those of the finished requests
  double duration_s = 0;
  bool stopped = false;  // by LoadOptions::stop, before the end of the plan
};

// Runs the whole plan on the calling thread. Calls `on_progress` (may be null) about five times a second. Unavailable:
// the endpoint cannot be resolved. InvalidArgument: the CA file cannot be used. Failures of single requests are in
// their results.
absl::StatusOr<LoadOutcome> RunLoad(const LoadOptions& options, const std::vector<PlannedRequest>& plan,
                                    const std::function<void(const LoadProgress&)>& on_progress);

// Sends one request and returns its JSON answer. A status other than 200 is an error with the server's message.
absl::StatusOr<std::string> FetchJson(const LoadOptions& options, const std::string& method, const std::string& path,
                                      const std::string& body);

}  // namespace spl::cli
