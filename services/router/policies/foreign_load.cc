#include "services/router/policies/foreign_load.h"

#include <utility>

namespace spl::router {

void ForeignLoad::Update(std::shared_ptr<const FleetSnapshot> fleet, const LoadTracker& loads) {
  auto tokens = std::make_shared<std::vector<uint64_t>>();
  std::map<std::string, Seen> seen;
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < fleet->num_places(); ++i) {
    const PrefillView& p = fleet->place(i);
    const auto old = seen_.find(p.worker_id);
    const bool known = old != seen_.end() && old->second.epoch == p.epoch;
    Seen now = known ? old->second : Seen{.epoch = p.epoch};
    if (!known || now.queued_tokens != p.queued_tokens) {
      const uint64_t ours = loads.PrefillTokensSince(p.worker_id, p.asked_at);
      now.foreign_tokens = p.queued_tokens > ours ? p.queued_tokens - ours : 0;
    }
    now.queued_tokens = p.queued_tokens;
    tokens->push_back(now.foreign_tokens);
    seen.emplace(p.worker_id, now);
  }
  seen_ = std::move(seen);
  fleet_ = std::move(fleet);
  tokens_ = std::move(tokens);
}

std::shared_ptr<const std::vector<uint64_t>> ForeignLoad::Of(const FleetSnapshot& fleet) const {
  std::lock_guard lock(mutex_);
  if (fleet_.get() == &fleet) return tokens_;
  auto tokens = std::make_shared<std::vector<uint64_t>>();
  for (size_t i = 0; i < fleet.num_places(); ++i) {
    const PrefillView& p = fleet.place(i);
    const auto seen = seen_.find(p.worker_id);
    const bool known = seen != seen_.end() && seen->second.epoch == p.epoch;
    tokens->push_back(known ? seen->second.foreign_tokens : p.queued_tokens);
  }
  return tokens;
}

}  // namespace spl::router
