// The filters of the default profile.
#pragma once

#include "services/router/policies/policy.h"

namespace spl::router {

// Neither side is draining.
class NotDrainingFilter final : public Filter {
 public:
  bool Keep(const PlacementQuery& query, const Candidate& candidate) const override;
};

// The prompt fits the prefill worker's pool and the whole sequence the decode worker's, where they told their size.
class FitsFilter final : public Filter {
 public:
  bool Keep(const PlacementQuery& query, const Candidate& candidate) const override;
};

// The decode worker did not just refuse this request for lack of room.
class NotFullFilter final : public Filter {
 public:
  bool Keep(const PlacementQuery& query, const Candidate& candidate) const override;
};

// Neither side has failed this request before. Advisory: with one worker left, trying it again is better than giving
// up.
class NotFailedFilter final : public Filter {
 public:
  bool Keep(const PlacementQuery& query, const Candidate& candidate) const override;
  bool advisory() const override { return true; }
};

}  // namespace spl::router
