#include "services/base/vllm_metrics.h"

#include <prometheus/text_serializer.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <string_view>
#include <utility>

namespace spl {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;

struct Alias {
  std::string_view vllm;
  std::string_view own;
};

// Both names of a pair mean the same in the same unit. gpu_cache_usage_perc and time_per_output_token_seconds are
// vLLM's older names.
constexpr Alias kAliases[] = {
    {"vllm:num_requests_running", metric::kNumRequestsRunning},
    {"vllm:num_requests_waiting", metric::kNumRequestsWaiting},
    {"vllm:kv_cache_usage_perc", metric::kKvCacheUsagePerc},
    {"vllm:gpu_cache_usage_perc", metric::kKvCacheUsagePerc},
    {"vllm:time_to_first_token_seconds", metric::kTimeToFirstTokenSeconds},
    {"vllm:inter_token_latency_seconds", metric::kInterTokenLatencySeconds},
    {"vllm:time_per_output_token_seconds", metric::kInterTokenLatencySeconds},
    {"vllm:e2e_request_latency_seconds", metric::kE2eRequestLatencySeconds},
    {"vllm:prompt_tokens_total", metric::kPromptTokensTotal},
    {"vllm:generation_tokens_total", metric::kGenerationTokensTotal},
    {"vllm:request_success_total", metric::kRequestSuccessTotal},
    {"vllm:num_preemptions_total", metric::kNumPreemptionsTotal},
};

constexpr std::string_view kCacheQueries = "vllm:prefix_cache_queries_total",
                           kCacheHits = "vllm:prefix_cache_hits_total";

MetricFamily Renamed(const MetricFamily& own, std::string_view name, const std::string& model_name) {
  MetricFamily family = own;
  family.name = name;
  family.help = own.name + " under vLLM's name.";
  for (ClientMetric& series : family.metric) series.label.push_back({"model_name", model_name});
  return family;
}

// Sums the kinds of splice_reuse_tokens_total: all of them, or without those that were computed.
MetricFamily SumOfKinds(const MetricFamily& reuse, std::string_view name, bool with_misses,
                        const std::string& model_name) {
  std::map<std::vector<ClientMetric::Label>, double> sums;  // by the other labels
  for (const ClientMetric& series : reuse.metric) {
    std::vector<ClientMetric::Label> others;
    bool is_miss = false;
    for (const ClientMetric::Label& label : series.label) {
      if (label.name == "kind")
        is_miss = label.value == "miss";
      else
        others.push_back(label);
    }
    sums[others] += with_misses || !is_miss ? series.counter.value : 0;
  }
  MetricFamily sum;
  sum.type = reuse.type;
  sum.name = reuse.name;
  for (const auto& [labels, value] : sums) {
    ClientMetric& series = sum.metric.emplace_back();
    series.label = labels;
    series.counter.value = value;
  }
  return Renamed(sum, name, model_name);
}

}  // namespace

std::vector<MetricFamily> VllmFamilies(const std::vector<MetricFamily>& own, const std::string& model_name) {
  std::map<std::string_view, const MetricFamily*> by_name;
  for (const MetricFamily& family : own) by_name[family.name] = &family;
  std::vector<MetricFamily> families;
  for (const Alias& alias : kAliases) {
    if (const auto found = by_name.find(alias.own); found != by_name.end())
      families.push_back(Renamed(*found->second, alias.vllm, model_name));
  }
  if (const auto reuse = by_name.find(metric::kReuseTokensTotal); reuse != by_name.end()) {
    families.push_back(SumOfKinds(*reuse->second, kCacheQueries, true, model_name));
    families.push_back(SumOfKinds(*reuse->second, kCacheHits, false, model_name));
  }
  return families;
}

std::string RenderMetrics(Metrics& metrics, const std::string& vllm_model_name) {
  const ProgramMetrics alone[] = {{"", &metrics}};
  return RenderMetrics(alone, vllm_model_name);
}

std::string RenderMetrics(std::span<const ProgramMetrics> programs, const std::string& vllm_model_name) {
  std::vector<ProgramFamilies> collected = CollectPrograms(programs);
  std::vector<MetricFamily> vllm;
  std::set<std::string> known;
  for (const ProgramFamilies& program : collected) {
    if (vllm_model_name.empty()) break;
    for (MetricFamily& family : VllmFamilies(program.families, vllm_model_name)) {
      if (known.insert(family.name).second) vllm.push_back(std::move(family));
    }
  }
  std::vector<MetricFamily> families = MergedFamilies(std::move(collected));
  std::move(vllm.begin(), vllm.end(), std::back_inserter(families));
  return prometheus::TextSerializer().Serialize(families);
}

}  // namespace spl
