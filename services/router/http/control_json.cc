#include "services/router/http/control_json.h"

#include <fmt/format.h>

#include <cmath>
#include <string>

#include "services/base/clock.h"

namespace spl::router {
namespace {

OrderedJson RanJson(const std::optional<RequestRan>& ran) {
  if (!ran.has_value()) return nullptr;
  return {{"reuse", ran->reuse},
          {"decode", ran->decode},
          {"exact", ran->exact},
          {"prefill", ran->prefill_place},
          {"transport", ran->transport},
          {"transfer_seconds", ran->transfer_seconds},
          {"tokens",
           {{"prefix", ran->prefix_tokens},
            {"stored", ran->stored_tokens},
            {"aligned", ran->aligned_tokens},
            {"recomputed", ran->recomputed_tokens},
            {"computed", ran->computed_tokens}}},
          {"bytes", {{"fetched", ran->bytes_fetched}, {"moved", ran->bytes_moved}}}};
}

OrderedJson FiveDigits(double value) {
  if (std::isnan(value)) return nullptr;
  return std::stod(fmt::format("{:.5g}", value));
}

}  // namespace

OrderedJson RecordJson(const RequestRecord& r) {
  OrderedJson out;
  out["request_id"] = r.request_id;
  out["trace_id"] = r.trace_id;
  out["traced"] = r.traced;
  out["caller"] = r.caller;
  out["api"] = r.api;
  out["stage"] = r.stage;
  if (!r.status.empty()) out["status"] = r.status;
  out["reuse"] = r.reuse;
  out["decode"] = r.decode;
  out["ran"] = RanJson(r.ran);
  out["started_unix_ms"] = r.started_unix_ms;
  out["seconds"] = {{"total", r.seconds}, {"queue", r.queue_seconds}, {"ttft", r.ttft_seconds}};
  if (!r.ttft_stages.empty()) out["seconds"]["ttft_stages"] = r.ttft_stages;
  out["tokens"] = {{"prompt", r.prompt_tokens}, {"cached", r.cached_tokens}, {"completion", r.completion_tokens}};
  out["workers"] = {{"prefill", r.prefill_worker}, {"decode", r.decode_worker}};
  out["attempts"] = r.attempts;
  out["migrations"] = r.migrations;
  return out;
}

OrderedJson ClockJson(const std::optional<ClockOffset>& clock) {
  if (!clock.has_value()) return nullptr;
  return {{"offset_seconds", clock->seconds}, {"bound_seconds", clock->bound_s}};
}

OrderedJson QualityJson(const QualityRecord& record, SteadyTime now) {
  const v1::ChoiceReceipt& choice = record.choice;
  const auto known = [](bool has, double value) { return has ? OrderedJson(value) : OrderedJson(nullptr); };
  return {{"namespace", record.name_space},
          {"caller", record.caller},
          {"worker", record.worker},
          {"method", choice.method()},
          {"verdict", choice.why()},
          {"quality", known(choice.has_quality(), choice.quality())},
          {"agreement", known(choice.has_agreement(), choice.agreement())},
          {"agreement_low", known(choice.has_agreement_low(), choice.agreement_low())},
          {"comparisons", choice.comparisons()},
          {"seconds_ago", std::chrono::duration<double>(now - record.seen).count()}};
}

OrderedJson HistoryJson(const History& history, std::chrono::milliseconds age) {
  const std::vector<HistorySample> samples = history.Samples(age);
  // From the monotonic clock: a system clock that was set meanwhile must not fold the time line.
  const int64_t now_ms = UnixNanos() / 1'000'000;
  const SteadyTime now = std::chrono::steady_clock::now();
  OrderedJson out;
  out["period_seconds"] = std::chrono::duration<double>(history.period()).count();
  out["unix_ms"] = OrderedJson::array();
  for (const HistorySample& sample : samples)
    out["unix_ms"].push_back(now_ms - std::chrono::duration_cast<std::chrono::milliseconds>(now - sample.end).count());
  for (const HistoryColumn& column : HistoryColumns()) {
    OrderedJson& values = out["columns"][std::string(column.name)] = OrderedJson::array();
    for (const HistorySample& sample : samples) values.push_back(FiveDigits(sample.*column.value));
  }
  return out;
}

}  // namespace spl::router
