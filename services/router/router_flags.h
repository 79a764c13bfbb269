// The command line of splice-router → RouterOptions.
#pragma once

#include <CLI/App.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/router/router_server.h"

namespace spl::router {

// Holds what CLI11 parses into; must live as long as the app parses.
struct RouterFlags {
  void Register(CLI::App& app);
  // InvalidArgument: an address is malformed, or a value is out of range.
  absl::StatusOr<RouterOptions> ToOptions() const;

  std::string log_level = "info";

 private:
  RouterOptions options_;
  std::vector<std::string> prefill_;
  std::vector<std::string> decode_;
  uint32_t request_timeout_ms_ = 600'000;
  uint32_t drain_timeout_ms_ = 30'000;
  uint32_t poll_interval_ms_ = 200;
};

}  // namespace spl::router
