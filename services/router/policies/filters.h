// Filters of the default placement profile.
#pragma once

#include "services/router/policies/policy.h"

namespace spl::router {

// Keeps workers that are not draining.
class NotDrainingFilter final : public Filter {
 public:
  bool KeepPrefill(const PlacementQuery& query, const PrefillView& prefill, size_t place) const override;
  bool KeepDecode(const PlacementQuery& query, const DecodeView& decode) const override;
};

// Keeps prefill workers whose pool fits the prompt and decode workers whose pool fits the whole sequence, if they
// report their size.
class FitsFilter final : public Filter {
 public:
  bool KeepPrefill(const PlacementQuery& query, const PrefillView& prefill, size_t place) const override;
  bool KeepDecode(const PlacementQuery& query, const DecodeView& decode) const override;
};

// For requests with structured output: keeps workers that announce that they keep to it. Others would answer without.
class KeepsToGrammarFilter final : public Filter {
 public:
  bool KeepPrefill(const PlacementQuery& query, const PrefillView& prefill, size_t place) const override;
  bool KeepDecode(const PlacementQuery& query, const DecodeView& decode) const override;
};

// For decode workers that prefill: keeps those to which the prompt is short, counted in tokens that they would have to
// compute. Drops all for requests that need something that only prefill workers have.
class ShortEnoughFilter final : public Filter {
 public:
  bool KeepPrefill(const PlacementQuery& query, const PrefillView& prefill, size_t place) const override;
};

// Drops decode workers that have just refused this request for lack of room.
class NotFullFilter final : public Filter {
 public:
  bool KeepDecode(const PlacementQuery& query, const DecodeView& decode) const override;
};

// Admission on the decode side: keeps workers whose pool would not be used beyond `max_load` with this request. The
// rest is left for running sequences to grow, so that they need not be preempted. An idle worker takes anything that
// fits.
class RoomToGrowFilter final : public Filter {
 public:
  explicit RoomToGrowFilter(double max_load) : max_load_(max_load) {}
  bool KeepDecode(const PlacementQuery& query, const DecodeView& decode) const override;

 private:
  const double max_load_;  // 0 to 1; 1: the worker alone decides
};

// Drops workers that have failed this request before. Advisory: if one worker is left, trying it again is better than
// giving up.
class NotFailedFilter final : public Filter {
 public:
  bool KeepPrefill(const PlacementQuery& query, const PrefillView& prefill, size_t place) const override;
  bool KeepDecode(const PlacementQuery& query, const DecodeView& decode) const override;
  bool advisory() const override { return true; }
};

// Drops workers that the planner takes away. Advisory.
class NotLeavingFilter final : public Filter {
 public:
  bool KeepPrefill(const PlacementQuery& query, const PrefillView& prefill, size_t place) const override;
  bool KeepDecode(const PlacementQuery& query, const DecodeView& decode) const override;
  bool advisory() const override { return true; }
};

}  // namespace spl::router
