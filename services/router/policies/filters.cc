#include "services/router/policies/filters.h"

#include "services/router/policies/scorers.h"

namespace spl::router {

bool NotDrainingFilter::KeepPrefill(const PlacementQuery&, const PrefillView& prefill, size_t) const {
  return !prefill.draining;
}
bool NotDrainingFilter::KeepDecode(const PlacementQuery&, const DecodeView& decode) const { return !decode.draining; }

bool FitsFilter::KeepPrefill(const PlacementQuery& query, const PrefillView& prefill, size_t) const {
  return prefill.max_prompt_tokens == 0 || query.prompt_tokens <= prefill.max_prompt_tokens;
}
bool FitsFilter::KeepDecode(const PlacementQuery& query, const DecodeView& decode) const {
  return decode.max_sequence_tokens == 0 || query.total_tokens <= decode.max_sequence_tokens;
}

bool KeepsToGrammarFilter::KeepPrefill(const PlacementQuery& query, const PrefillView& prefill, size_t) const {
  return !query.structured_output || prefill.structured_output;
}
bool KeepsToGrammarFilter::KeepDecode(const PlacementQuery& query, const DecodeView& decode) const {
  return !query.structured_output || decode.structured_output;
}

bool ShortEnoughFilter::KeepPrefill(const PlacementQuery& query, const PrefillView& prefill, size_t place) const {
  return !prefill.local.has_value() ||
         ComputeScorer::TokensToCompute(query, place) <= static_cast<double>(prefill.local->max_new_tokens);
}

bool NotFullFilter::KeepDecode(const PlacementQuery& query, const DecodeView& decode) const {
  return query.full == nullptr || !query.full->contains(decode.worker_id);
}

bool RoomToGrowFilter::KeepDecode(const PlacementQuery& query, const DecodeView& decode) const {
  const bool idle = decode.sequences == 0 && query.loads.Of(decode.worker_id).sequences == 0;
  return max_load_ >= 1 || idle || PageLoad(query, decode) <= max_load_;
}

bool NotLeavingFilter::KeepPrefill(const PlacementQuery& query, const PrefillView& prefill, size_t) const {
  return query.leaving == nullptr || !query.leaving->contains(prefill.worker_id);
}
bool NotLeavingFilter::KeepDecode(const PlacementQuery& query, const DecodeView& decode) const {
  return query.leaving == nullptr || !query.leaving->contains(decode.worker_id);
}

bool NotFailedFilter::KeepPrefill(const PlacementQuery& query, const PrefillView& prefill, size_t) const {
  return query.failed == nullptr || !query.failed->contains(prefill.worker_id);
}
bool NotFailedFilter::KeepDecode(const PlacementQuery& query, const DecodeView& decode) const {
  return query.failed == nullptr || !query.failed->contains(decode.worker_id);
}

}  // namespace spl::router
