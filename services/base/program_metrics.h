// The metrics of several programs that run in one process, as one page.
#pragma once

#include <prometheus/metric_family.h>

#include <span>
#include <string>
#include <vector>

#include "services/base/metrics.h"

namespace spl {

struct ProgramMetrics {
  std::string component;       // router, prefill, decode or store; empty: the only program
  Metrics* metrics = nullptr;  // borrowed
};

// All families of a program, read at one time.
struct ProgramFamilies {
  std::string component;
  std::vector<prometheus::MetricFamily> families;
};

// Reads every program once, in order. Any thread.
std::vector<ProgramFamilies> CollectPrograms(std::span<const ProgramMetrics> programs);

// Returns the families of all programs, those of one name as one, with the label component on every series, where it is
// not empty: what scrapes of one pod for each program have.
std::vector<prometheus::MetricFamily> MergedFamilies(std::vector<ProgramFamilies> programs);

}  // namespace spl
