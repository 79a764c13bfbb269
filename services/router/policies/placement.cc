#include "services/router/policies/placement.h"

#include <algorithm>

#include "services/base/status.h"
#include "services/router/policies/filters.h"
#include "services/router/policies/picker.h"

namespace spl::router {
namespace {

std::vector<Candidate> ConnectedPairs(const FleetSnapshot& fleet) {
  std::vector<Candidate> pairs;
  for (size_t i = 0; i < fleet.prefill.size(); ++i) {
    for (const DecodeView& d : fleet.decode) {
      const auto link = fleet.prefill[i].peers.find(d.worker_id);
      if (link == fleet.prefill[i].peers.end() || link->second.decode_epoch != d.epoch) continue;
      pairs.push_back({.prefill_idx = i, .prefill = &fleet.prefill[i], .decode = &d, .link = &link->second});
    }
  }
  return pairs;
}

}  // namespace

Placement::Placement(const PlacementOptions& options)
    : picker_(std::make_unique<SoftmaxPicker>(options.temperature)),
      random_(options.seed != 0 ? options.seed : std::random_device()()) {
  filters_.push_back(std::make_unique<NotDrainingFilter>());
  filters_.push_back(std::make_unique<FitsFilter>());
  filters_.push_back(std::make_unique<NotFullFilter>());
  filters_.push_back(std::make_unique<NotFailedFilter>());
  scorers_.push_back(std::make_unique<QueueScorer>(options.scorer));
  scorers_.push_back(std::make_unique<ComputeScorer>(options.scorer));
  scorers_.push_back(std::make_unique<WireScorer>(options.scorer));
  scorers_.push_back(std::make_unique<PressureScorer>(options.scorer));
}

absl::StatusOr<Candidate> Placement::Place(const PlacementQuery& query) const {
  std::vector<Candidate> candidates = ConnectedPairs(query.fleet);
  for (const auto& filter : filters_) {
    std::vector<Candidate> kept;
    std::copy_if(candidates.begin(), candidates.end(), std::back_inserter(kept),
                 [&](const Candidate& c) { return filter->Keep(query, c); });
    if (!kept.empty() || !filter->advisory()) candidates = std::move(kept);
  }
  if (candidates.empty()) {
    if (query.full != nullptr && !query.full->empty()) {
      return Errorf(absl::StatusCode::kResourceExhausted, "every decode worker is full");
    }
    return Errorf(
        absl::StatusCode::kUnavailable,
        "no prefill worker that is connected to a decode worker can take the request ({} prefill and {} decode "
        "workers answer)",
        query.fleet.prefill.size(), query.fleet.decode.size());
  }
  for (Candidate& c : candidates) {
    for (const auto& scorer : scorers_) c.cost_s += scorer->Seconds(query, c);
  }
  std::lock_guard lock(mutex_);
  return candidates[picker_->Pick(candidates, random_)];
}

}  // namespace spl::router
