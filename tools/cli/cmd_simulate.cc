#include "tools/cli/cmd_simulate.h"

#include <fmt/format.h>

#include <fstream>

#include "services/base/status.h"

namespace spl::cli {
namespace {

absl::Status Write(const std::string& path, const std::string& text) {
  if (path == "-") {
    fmt::print("{}", text);
    return absl::OkStatus();
  }
  std::ofstream file(path);
  file << text;
  file.close();
  return file ? absl::OkStatus() : Errorf(absl::StatusCode::kUnavailable, "{}: cannot be written", path);
}

}  // namespace

void SimulateFlags::Register(CLI::App& app) {
  auto* on = app.add_flag("--simulate", simulate,
                          "Simulate the router's placement over modelled workers instead, for --trace or --make-trace");
  const auto add = [&](CLI::Option* option) { return option->needs(on)->capture_default_str(); };
  add(app.add_option("--make-trace", make_trace, "With --simulate: rag, chat, hot or day instead of --trace"))
      ->check(CLI::IsMember({"rag", "chat", "hot", "day"}));
  add(app.add_option("--write-trace", write_trace, "With --simulate: write the trace and exit"));
  add(app.add_option("--policies", policies, "With --simulate: placements to compare"))->delimiter(',');
  add(app.add_option("--prefill-workers", options.prefill_workers, "With --simulate"))->check(CLI::Range(1, 100'000));
  add(app.add_option("--decode-workers", options.decode_workers, "With --simulate"))->check(CLI::Range(1, 100'000));
  add(app.add_option("--pod-size", options.pod_size,
                     "With --simulate: decode workers that a prefill worker is connected to; 0: all"));
  add(app.add_option("--placement-temperature", options.placement.temperature, "With --simulate: see splice-router"))
      ->check(CLI::NonNegativeNumber);
  add(app.add_option("--placement-credit-decay", options.placement.scorer.credit_decay,
                     "With --simulate: see splice-router"))
      ->check(CLI::NonNegativeNumber);
  add(app.add_option("--decode-admission-load", options.placement.max_decode_load,
                     "With --simulate: see splice-router"))
      ->check(CLI::Range(0.0, 1.0));
  add(app.add_option("--sim-prefill-kv-tokens", options.model.prefill_kv_tokens, "With --simulate: a worker's pool"));
  add(app.add_option("--sim-decode-kv-tokens", options.model.decode_kv_tokens, "With --simulate: a worker's pool"));
  add(app.add_option("--sim-prompt-s", options.model.prompt_token_s, "With --simulate: seconds per computed token"));
  add(app.add_option("--sim-step-s", options.model.step_fixed_s, "With --simulate: seconds of an empty decode step"));
  add(app.add_option("--sim-wire-gb-per-s", wire_gb_per_s, "With --simulate: rate of a link"))
      ->check(CLI::PositiveNumber);
  add(app.add_option("--sim-fetch-gb-per-s", fetch_gb_per_s, "With --simulate: rate of a chunk store; 0: no store"));
  add(app.add_option("--sim-wire-share", options.model.wire_share,
                     "With --simulate: share of KV that is sent with head classes"))
      ->check(CLI::Range(0.0, 1.0));
  auto* scales = app.add_flag("--scale", scale, "With --simulate: the planner moves both pools")->needs(on);
  const auto add_scale = [&](CLI::Option* option) { return option->needs(scales)->capture_default_str(); };
  add_scale(app.add_option("--ttft-target-s", scaling.planner.ttft_target_s, "With --scale"));
  add_scale(app.add_option("--tpot-target-s", scaling.planner.tpot_target_s, "With --scale"));
  add_scale(app.add_option("--max-replicas", scaling.planner.prefill.max_replicas,
                           "With --scale: most workers of each pool"));
  add_scale(app.add_option("--worker-start-s", scaling.start_s, "With --scale: seconds until a new worker serves"));
  add(app.add_option("--figure", figure, "With --simulate: also write the figure as SVG"));
}

absl::Status RunSimulations(const SimulateFlags& flags, const std::string& trace, double rate_per_s,
                            uint32_t num_requests, uint64_t seed, const std::string& json_file) {
  SimTraceOptions made{.seed = seed};
  if (rate_per_s > 0) made.rate_per_s = rate_per_s;
  if (num_requests > 0) made.num_requests = num_requests;
  absl::StatusOr<std::vector<SimRequest>> requests =
      trace.empty() ? MakeSimTrace(flags.make_trace, made) : ReadSimTrace(trace, rate_per_s, num_requests);
  SPLICE_RETURN_IF_ERROR(requests.status());
  if (!flags.write_trace.empty()) return Write(flags.write_trace, TraceText(*requests));
  SimOptions options = flags.options;
  options.seed = options.placement.seed = seed;
  options.model.wire_bytes_per_s = 1e9 * flags.wire_gb_per_s;
  options.model.fetch_bytes_per_s = 1e9 * flags.fetch_gb_per_s;
  if (flags.scale) {
    options.scaling = flags.scaling;
    options.scaling->planner.decode.max_replicas = flags.scaling.planner.prefill.max_replicas;
  }
  std::vector<SimReport> reports;
  for (const std::string& name : flags.policies) {
    SPLICE_ASSIGN_OR_RETURN(options.placement.policy, router::ParsePlacementPolicy(name));
    SPLICE_ASSIGN_OR_RETURN(reports.emplace_back(), Simulate(*requests, options));
  }
  if (json_file != "-") fmt::print("{}", SimText(reports));
  if (!json_file.empty()) SPLICE_RETURN_IF_ERROR(Write(json_file, SimJson(reports).dump(2) + "\n"));
  if (flags.figure.empty()) return absl::OkStatus();
  const std::string what = trace.empty() ? flags.make_trace : trace.substr(trace.find_last_of('/') + 1);
  const std::string title = fmt::format("{}: {} requests, {} prefill and {} decode workers", what, requests->size(),
                                        options.prefill_workers, options.decode_workers);
  return Write(flags.figure,
               flags.scale ? ScaleFigure(what + ": what the planner does", reports.back(), options.scaling->planner)
                           : SimFigure(title, reports));
}

}  // namespace spl::cli
