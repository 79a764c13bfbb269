// The command line of splice-router, turned into RouterOptions.
#pragma once

#include <CLI/App.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/base/tls.h"
#include "services/membership/membership_flags.h"
#include "services/router/router_server.h"

namespace spl::router {

// The targets of CLI11's parsing; must live as long as the app parses.
struct RouterFlags {
  void Register(CLI::App& app);
  // InvalidArgument: an address is malformed, a value is out of range, or a file of --tls-… or --public-tls-… has the
  // wrong contents.
  absl::StatusOr<RouterOptions> ToOptions() const;

  std::string log_level = "info";

 private:
  RouterOptions options_;
  membership::MembershipFlags membership_;
  PeerTlsOptions tls_;
  std::vector<std::string> prefill_;
  std::vector<std::string> decode_;
  std::string placement_ = "splice";
  uint32_t ttft_target_ms_ = 1'000;
  uint32_t tpot_target_ms_ = 50;
  uint32_t scale_down_after_s_ = 300;
  uint32_t priority_ageing_ms_ = 10'000;
  uint32_t request_timeout_ms_ = 600'000;
  uint32_t drain_timeout_ms_ = 30'000;
  uint32_t poll_interval_ms_ = 200;
  uint32_t ticket_ttl_ms_ = 60'000;
};

}  // namespace spl::router
