#include "services/router/admission/fair_queue.h"

#include <algorithm>
#include <utility>

namespace spl::router {

void FairQueue::Push(QueuedRequest request, Clock::time_point now) {
  auto [it, added] = tenants_.try_emplace(request.tenant);
  if (added) {
    ring_.push_back({.name = request.tenant});
    it->second = std::prev(ring_.end());
  }
  Tenant& tenant = *it->second;
  tenant.weight = request.weight;
  const Place place{.order = now + options_.ageing * request.priority, .sequence = next_sequence_++};
  where_[request.id] = {it->second, place};
  tenant.waiting.emplace(place, std::move(request));
}

void FairQueue::PushFront(QueuedRequest request) { front_.push_front(std::move(request)); }

std::optional<QueuedRequest> FairQueue::Pop() {
  if (!front_.empty()) {
    QueuedRequest request = std::move(front_.front());
    front_.pop_front();
    return request;
  }
  if (ring_.empty()) return std::nullopt;
  while (true) {
    const auto tenant = ring_.begin();
    const auto first = tenant->waiting.begin();
    if (tenant->deficit >= first->second.tokens) {
      tenant->deficit -= first->second.tokens;
      return Take(tenant, first);
    }
    tenant->deficit += options_.quantum_tokens * tenant->weight;
    ring_.splice(ring_.end(), ring_, tenant);
  }
}

bool FairQueue::Remove(uint64_t id) {
  const auto it = where_.find(id);
  if (it == where_.end()) return std::erase_if(front_, [id](const QueuedRequest& r) { return r.id == id; }) > 0;
  const auto [tenant, place] = it->second;
  Take(tenant, tenant->waiting.find(place));
  return true;
}

std::optional<QueuedRequest> FairQueue::Displace(const std::string& tenant) {
  if (ring_.empty()) return std::nullopt;
  const auto longest = std::max_element(
      ring_.begin(), ring_.end(), [](const Tenant& a, const Tenant& b) { return a.waiting.size() < b.waiting.size(); });
  const auto own = tenants_.find(tenant);
  const size_t own_size = own == tenants_.end() ? 0 : own->second->waiting.size();
  if (own_size + 1 >= longest->waiting.size()) return std::nullopt;
  return Take(longest, std::prev(longest->waiting.end()));
}

// A tenant with nothing waiting leaves the ring and loses its deficit: unused shares are not saved up.
std::optional<QueuedRequest> FairQueue::Take(Ring::iterator tenant, std::map<Place, QueuedRequest>::iterator place) {
  QueuedRequest request = std::move(place->second);
  where_.erase(request.id);
  tenant->waiting.erase(place);
  if (tenant->waiting.empty()) {
    tenants_.erase(tenant->name);
    ring_.erase(tenant);
  }
  return request;
}

}  // namespace spl::router
