// Metrics under the names that vLLM gives them, for gateways, autoscaler rules and dashboards that were made for it.
#pragma once

#include <prometheus/metric_family.h>

#include <span>
#include <string>
#include <vector>

#include "services/base/metrics.h"
#include "services/base/program_metrics.h"

namespace spl {

// Returns the families of `own` that vLLM has, too, under vLLM's names and with the label model_name on every series.
// Values are copied, so that both names say the same in one scrape. A family that is missing in `own` is missing in the
// result. docs/metrics.md has the list.
std::vector<prometheus::MetricFamily> VllmFamilies(const std::vector<prometheus::MetricFamily>& own,
                                                   const std::string& model_name);

// Returns Metrics::Render(), and behind it the text of VllmFamilies where vllm_model_name is not empty. Any thread.
std::string RenderMetrics(Metrics& metrics, const std::string& vllm_model_name);

// The same for several programs of one process: MergedFamilies, and each family of VllmFamilies once, as the first of
// the programs that has it says it. REQUIRES: there is one.
std::string RenderMetrics(std::span<const ProgramMetrics> programs, const std::string& vllm_model_name);

}  // namespace spl
