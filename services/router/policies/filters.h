// The filters of the default profile.
#pragma once

#include "services/router/policies/policy.h"

namespace spl::router {

// The worker is not draining.
class NotDrainingFilter final : public Filter {
 public:
  bool KeepPrefill(const PlacementQuery& query, const PrefillView& prefill, size_t place) const override;
  bool KeepDecode(const PlacementQuery& query, const DecodeView& decode) const override;
};

// The prompt fits the prefill worker's pool and the whole sequence the decode worker's, where they told their size.
class FitsFilter final : public Filter {
 public:
  bool KeepPrefill(const PlacementQuery& query, const PrefillView& prefill, size_t place) const override;
  bool KeepDecode(const PlacementQuery& query, const DecodeView& decode) const override;
};

// Of decode workers that prefill: those to which the prompt is short, counting what they would have to compute. Not for
// requests that need something that only prefill workers have.
class ShortEnoughFilter final : public Filter {
 public:
  bool KeepPrefill(const PlacementQuery& query, const PrefillView& prefill, size_t place) const override;
};

// The decode worker did not just refuse this request for lack of room.
class NotFullFilter final : public Filter {
 public:
  bool KeepDecode(const PlacementQuery& query, const DecodeView& decode) const override;
};

// Admission on the decode side: with this request the worker's pool would not be used beyond `max_load`. Room is left
// for the sequences there to grow, so that they need not be preempted. An idle worker takes anything that fits.
class RoomToGrowFilter final : public Filter {
 public:
  explicit RoomToGrowFilter(double max_load) : max_load_(max_load) {}
  bool KeepDecode(const PlacementQuery& query, const DecodeView& decode) const override;

 private:
  const double max_load_;  // 0 to 1; 1: the worker alone decides
};

// The worker has not failed this request before. Advisory: with one worker left, trying it again is better than giving
// up.
class NotFailedFilter final : public Filter {
 public:
  bool KeepPrefill(const PlacementQuery& query, const PrefillView& prefill, size_t place) const override;
  bool KeepDecode(const PlacementQuery& query, const DecodeView& decode) const override;
  bool advisory() const override { return true; }
};

// The planner does not take the worker away. Advisory.
class NotLeavingFilter final : public Filter {
 public:
  bool KeepPrefill(const PlacementQuery& query, const PrefillView& prefill, size_t place) const override;
  bool KeepDecode(const PlacementQuery& query, const DecodeView& decode) const override;
  bool advisory() const override { return true; }
};

}  // namespace spl::router
