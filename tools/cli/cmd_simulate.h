// The part of `splice bench` that needs no endpoint: --simulate.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "tools/cli/simulate.h"

namespace spl::cli {

struct SimulateFlags {
  bool simulate = false;
  std::string make_trace;   // `kind` of MakeSimTrace
  std::string write_trace;  // file
  std::string figure;       // file
  std::vector<std::string> policies = {"round-robin", "least-loaded", "prefix-only", "splice"};
  SimOptions options;
  bool scale = false;
  SimScaling scaling;
  double wire_gb_per_s = 40, fetch_gb_per_s = 0;

  void Register(CLI::App& app);
};

// Runs the simulations of all policies. `trace`: a file; "": make_trace. Prints the table, unless json_file is "-".
absl::Status RunSimulations(const SimulateFlags& flags, const std::string& trace, double rate_per_s,
                            uint32_t num_requests, uint64_t seed, const std::string& json_file);

}  // namespace spl::cli
