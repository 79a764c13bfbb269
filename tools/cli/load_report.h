// Percentiles from a load run; no means.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tools/cli/load_client.h"

namespace spl::cli {

struct Percentiles {
  double p50 = 0, p95 = 0, p99 = 0;
  size_t count = 0;
};
// Percentiles by linear interpolation between order statistics; zeros if there are no values.
Percentiles PercentilesOf(std::vector<double> values);

// A request counts as good if it meets both bounds. nullopt: no bound.
struct Slo {
  std::optional<double> ttft_ms;
  std::optional<double> tpot_ms;
};

struct LoadReport {
  size_t num_requests = 0;
  size_t num_ok = 0;
  std::map<std::string, size_t> errors;  // message → count; at most 16 messages, the rest under "other"
  double duration_s = 0;
  double requests_per_s = 0;
  double input_tokens_per_s = 0;
  double output_tokens_per_s = 0;
  uint64_t prompt_tokens = 0, completion_tokens = 0, cached_tokens = 0;
  Percentiles ttft_ms;  // time to the first event with output
  Percentiles tpot_ms;  // per request: (last - first) / (tokens - 1)
  Percentiles itl_ms;   // time between two events with output
  Percentiles e2e_ms;
  double goodput_per_s = 0;  // good requests per second
  double good_fraction = 0;
};

LoadReport MakeReport(const LoadOutcome& outcome, const Slo& slo);
nlohmann::ordered_json ToJson(const LoadReport& report, const Slo& slo);
// A table for people.
std::string ToText(const LoadReport& report, const Slo& slo);

}  // namespace spl::cli
