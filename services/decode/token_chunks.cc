#include "services/decode/token_chunks.h"

#include <fmt/format.h>

#include <string>

#include "services/base/log.h"
#include "services/wire/convert.h"

namespace spl::decode {
namespace {

prometheus::Counter& TokenCounter(Metrics& metrics, const char* step) {
  return metrics.Counter("splice_decode_adaptive_tokens_total",
                         "Tokens of sequences with the decode method adaptive, by the kind of their step.",
                         {{"step", step}});
}

void LogCosts(const engine::StepCosts& costs) {
  if (costs.is_built_in()) return;
  for (const engine::StepCosts::Row& row : costs.rows()) {
    std::string points;
    for (const engine::StepCosts::Point& point : row.points)
      points += fmt::format("{}{}: {:.2f} {:.2f} {:.2f}", points.empty() ? "" : ", ", point.sequences,
                            point.dense_s * 1e3, point.chosen_s * 1e3, point.change_s * 1e3);
    log::Info("decode.step_costs", log::F("positions", row.length), log::F("sequences_dense_chosen_change_ms", points));
  }
}

v1::DecodeChoiceReceipt ReceiptOf(const engine::DecodeChoiceReport& report) {
  v1::DecodeChoiceReceipt receipt;
  receipt.set_dense_tokens(static_cast<uint64_t>(report.dense_tokens));
  receipt.set_chosen_tokens(static_cast<uint64_t>(report.chosen_tokens));
  receipt.set_changes(static_cast<uint32_t>(report.changes));
  receipt.set_guarded_heads(static_cast<uint32_t>(report.guarded_heads));
  if (report.least_mass.has_value()) receipt.set_least_mass(*report.least_mass);
  return receipt;
}

}  // namespace

TokenChunks::TokenChunks(const engine::StepCosts& costs, Metrics& metrics)
    : dense_(TokenCounter(metrics, "dense")),
      chosen_(TokenCounter(metrics, "chosen")),
      guarded_(metrics.Counter("splice_decode_guarded_heads_total",
                               "KV heads of a layer whose chosen tokens held too little of their attention.")) {
  LogCosts(costs);
}

v1::StreamChunk TokenChunks::Of(std::span<const engine::DecodeToken> tokens,
                                engine::DecodeChoiceCounter& counts) const {
  v1::StreamChunk chunk;
  const engine::DecodeChoiceReport before = counts.report();
  for (const engine::DecodeToken& token : tokens) {
    auto* out = chunk.add_tokens();
    out->set_index(static_cast<uint32_t>(token.fork));
    *out->mutable_token() = wire::ToProto(token.token);
    counts.Add(token.fork, token.step);
  }
  const engine::DecodeChoiceReport& now = counts.report();
  if (now.empty()) return chunk;
  dense_.Increment(static_cast<double>(now.dense_tokens - before.dense_tokens));
  chosen_.Increment(static_cast<double>(now.chosen_tokens - before.chosen_tokens));
  guarded_.Increment(static_cast<double>(now.guarded_heads - before.guarded_heads));
  *chunk.mutable_choice() = ReceiptOf(now);
  return chunk;
}

}  // namespace spl::decode
