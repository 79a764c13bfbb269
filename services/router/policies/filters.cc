#include "services/router/policies/filters.h"

namespace spl::router {

bool NotDrainingFilter::Keep(const PlacementQuery&, const Candidate& candidate) const {
  return !candidate.prefill->draining && !candidate.decode->draining;
}

bool FitsFilter::Keep(const PlacementQuery& query, const Candidate& candidate) const {
  const uint64_t prompt_room = candidate.prefill->max_prompt_tokens;
  const uint64_t sequence_room = candidate.decode->max_sequence_tokens;
  return (prompt_room == 0 || query.prompt_tokens <= prompt_room) &&
         (sequence_room == 0 || query.total_tokens <= sequence_room);
}

bool NotFullFilter::Keep(const PlacementQuery& query, const Candidate& candidate) const {
  return query.full == nullptr || !query.full->contains(candidate.decode->worker_id);
}

bool NotFailedFilter::Keep(const PlacementQuery& query, const Candidate& candidate) const {
  return query.failed == nullptr || (!query.failed->contains(candidate.prefill->worker_id) &&
                                     !query.failed->contains(candidate.decode->worker_id));
}

}  // namespace spl::router
