#include "kernels/sampling/sample_tokens.h"

#include "kernels/common/status.h"

namespace spl::kernels {
namespace {

absl::Status ValidateRow(const SampleTokensArgs& a, size_t i) {
  const SampleRow& row = a.rows[i];
  const auto in = [](float x, float low, float high) { return x >= low && x <= high; };
  const auto wrong = [&](const char* field, auto value) {
    return InvalidCall("SampleTokens: row ", i, ": ", field, " is ", value);
  };
  if (row.logits_row < 0 || row.logits_row >= a.num_logit_rows) return wrong("logits_row", row.logits_row);
  if (!(row.temperature >= 0) || std::isinf(row.temperature)) return wrong("temperature", row.temperature);
  if (row.top_k < 0) return wrong("top_k", row.top_k);
  if (!in(row.top_p, 0, 1) || row.top_p == 0) return wrong("top_p", row.top_p);
  if (!in(row.min_p, 0, 1)) return wrong("min_p", row.min_p);
  if (!(row.repetition_penalty > 0) || std::isinf(row.repetition_penalty))
    return wrong("repetition_penalty", row.repetition_penalty);
  if (!std::isfinite(row.presence_penalty)) return wrong("presence_penalty", row.presence_penalty);
  if (!std::isfinite(row.frequency_penalty)) return wrong("frequency_penalty", row.frequency_penalty);
  if (row.num_top < -1 || row.num_top > kMaxTopTokens || row.num_top > a.top_stride)
    return wrong("num_top", row.num_top);
  if (row.num_top > 0 && a.top == nullptr) return InvalidCall("SampleTokens: null top");
  if (!row.mask.empty() && static_cast<int64_t>(row.mask.size()) != (a.width + 31) / 32)
    return wrong("mask's size", row.mask.size());
  if (row.edits_id != 0 && row.has_edits() &&
      (row.last_edit < 0 || static_cast<size_t>(row.last_edit) >= row.edits.size()))
    return wrong("last_edit", row.last_edit);
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateSampleTokens(const SampleTokensArgs& a) {
  if (a.num_logit_rows < 0 || a.width <= 0 || a.width > kMaxSampledWidth)
    return InvalidCall("SampleTokens: shape [", a.num_logit_rows, ", ", a.width, "]");
  if (!a.rows.empty() && (a.logits == nullptr || a.out == nullptr)) return InvalidCall("SampleTokens: null tensor");
  for (size_t i = 0; i < a.rows.size(); ++i) {
    if (absl::Status s = ValidateRow(a, i); !s.ok()) return s;
  }
  return absl::OkStatus();
}

}  // namespace spl::kernels
