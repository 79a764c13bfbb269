#include "tools/cli/load_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace spl::cli {
namespace {

constexpr size_t kMaxErrorKinds = 16;

double At(const std::vector<double>& sorted, double quantile) {
  const double position = quantile * static_cast<double>(sorted.size() - 1);
  const size_t below = static_cast<size_t>(std::floor(position));
  const size_t above = std::min(below + 1, sorted.size() - 1);
  const double share = position - static_cast<double>(below);
  return sorted[below] * (1 - share) + sorted[above] * share;
}

void CountError(const std::string& error, std::map<std::string, size_t>* errors) {
  const bool known = errors->contains(error) || errors->size() < kMaxErrorKinds;
  ++(*errors)[known ? error : "other"];
}

nlohmann::ordered_json ToJson(const Percentiles& p) { return {{"p50", p.p50}, {"p95", p.p95}, {"p99", p.p99}}; }

nlohmann::ordered_json OrNull(const std::optional<double>& value) {
  return value.has_value() ? nlohmann::ordered_json(*value) : nlohmann::ordered_json(nullptr);
}

}  // namespace

Percentiles PercentilesOf(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  return {.p50 = At(values, 0.50), .p95 = At(values, 0.95), .p99 = At(values, 0.99), .count = values.size()};
}

LoadReport MakeReport(const LoadOutcome& outcome, const Slo& slo) {
  LoadReport report{.num_requests = outcome.results.size(), .duration_s = outcome.duration_s};
  std::vector<double> ttft, tpot, itl, e2e;
  size_t good = 0;
  for (const RequestResult& r : outcome.results) {
    if (!r.error.empty()) {
      CountError(r.error, &report.errors);
      continue;
    }
    ++report.num_ok;
    report.prompt_tokens += r.prompt_tokens;
    report.completion_tokens += r.completion_tokens;
    report.cached_tokens += r.cached_tokens;
    const double ttft_ms = (r.first_token_s - r.scheduled_s) * 1e3;
    const double tpot_ms =
        r.completion_tokens > 1 ? (r.last_token_s - r.first_token_s) * 1e3 / (r.completion_tokens - 1) : 0;
    ttft.push_back(ttft_ms);
    if (r.completion_tokens > 1) tpot.push_back(tpot_ms);
    e2e.push_back((r.end_s - r.scheduled_s) * 1e3);
    for (const float gap : r.gaps_s) itl.push_back(gap * 1e3);
    const bool met = ttft_ms <= slo.ttft_ms.value_or(ttft_ms) && tpot_ms <= slo.tpot_ms.value_or(tpot_ms);
    good += met ? 1 : 0;
  }
  report.ttft_ms = PercentilesOf(std::move(ttft));
  report.tpot_ms = PercentilesOf(std::move(tpot));
  report.itl_ms = PercentilesOf(std::move(itl));
  report.e2e_ms = PercentilesOf(std::move(e2e));
  const double seconds = std::max(outcome.duration_s, 1e-9);
  report.requests_per_s = static_cast<double>(report.num_ok) / seconds;
  report.input_tokens_per_s = static_cast<double>(report.prompt_tokens) / seconds;
  report.output_tokens_per_s = static_cast<double>(report.completion_tokens) / seconds;
  report.goodput_per_s = static_cast<double>(good) / seconds;
  report.good_fraction = static_cast<double>(good) / static_cast<double>(std::max<size_t>(report.num_requests, 1));
  return report;
}

nlohmann::ordered_json ToJson(const LoadReport& r, const Slo& slo) {
  nlohmann::ordered_json out;
  out["requests"] = {{"total", r.num_requests}, {"ok", r.num_ok}, {"failed", r.num_requests - r.num_ok}};
  out["errors"] = nlohmann::ordered_json::object();
  for (const auto& [message, count] : r.errors) out["errors"][message] = count;
  out["duration_s"] = r.duration_s;
  out["throughput"] = {{"requests_per_s", r.requests_per_s},
                       {"input_tokens_per_s", r.input_tokens_per_s},
                       {"output_tokens_per_s", r.output_tokens_per_s}};
  out["tokens"] = {{"prompt", r.prompt_tokens}, {"cached", r.cached_tokens}, {"completion", r.completion_tokens}};
  out["ttft_ms"] = ToJson(r.ttft_ms);
  out["tpot_ms"] = ToJson(r.tpot_ms);
  out["itl_ms"] = ToJson(r.itl_ms);
  out["e2e_ms"] = ToJson(r.e2e_ms);
  out["goodput"] = {{"requests_per_s", r.goodput_per_s},
                    {"fraction", r.good_fraction},
                    {"slo_ttft_ms", OrNull(slo.ttft_ms)},
                    {"slo_tpot_ms", OrNull(slo.tpot_ms)}};
  return out;
}

std::string ToText(const LoadReport& r, const Slo& slo) {
  std::string out =
      fmt::format("requests    {} ok, {} failed, in {:.2f} s\n", r.num_ok, r.num_requests - r.num_ok, r.duration_s);
  for (const auto& [message, count] : r.errors) out += fmt::format("  {} x {}\n", count, message);
  out += fmt::format("throughput  {:.2f} requests/s, {:.1f} input tokens/s, {:.1f} output tokens/s\n", r.requests_per_s,
                     r.input_tokens_per_s, r.output_tokens_per_s);
  out += fmt::format("tokens      {} prompt ({} cached), {} output\n", r.prompt_tokens, r.cached_tokens,
                     r.completion_tokens);
  out += fmt::format("{:<12}{:>10}{:>10}{:>10}\n", "ms", "p50", "p95", "p99");
  const auto row = [&](const char* name, const Percentiles& p) {
    out += fmt::format("{:<12}{:>10.2f}{:>10.2f}{:>10.2f}\n", name, p.p50, p.p95, p.p99);
  };
  row("TTFT", r.ttft_ms);
  row("TPOT", r.tpot_ms);
  row("ITL", r.itl_ms);
  row("E2E", r.e2e_ms);
  if (slo.ttft_ms.has_value() || slo.tpot_ms.has_value()) {
    const auto bound = [](const std::optional<double>& ms) {
      return ms ? fmt::format("{} ms", *ms) : std::string("any");
    };
    out += fmt::format("goodput     {:.2f} requests/s, {:.1f} % of all (TTFT {}, TPOT {})\n", r.goodput_per_s,
                       r.good_fraction * 100, bound(slo.ttft_ms), bound(slo.tpot_ms));
  }
  return out;
}

}  // namespace spl::cli
