#include "services/router/session_owners.h"

#include <iterator>

#include "services/router/api_error.h"

namespace spl::router {

absl::Status SessionOwners::Claim(std::string_view id, const chunk::Digest& namespace_key, Clock::time_point now) {
  if (id.empty()) return absl::OkStatus();
  std::lock_guard lock(mutex_);
  while (!owned_.empty() && (owned_.size() > kMaxSessions || now - owned_.back().used > kTtl)) {
    by_id_.erase(owned_.back().id);
    owned_.pop_back();
  }
  if (const auto it = by_id_.find(id); it != by_id_.end()) {
    if (it->second->namespace_key != namespace_key)
      return SetParam(Errorf(absl::StatusCode::kPermissionDenied,
                             "session \"{}\" belongs to another caller or namespace; choose another name", id),
                      "session");
    it->second->used = now;
    owned_.splice(owned_.begin(), owned_, it->second);
    return absl::OkStatus();
  }
  owned_.push_front({std::string(id), namespace_key, now});
  by_id_.emplace(owned_.front().id, owned_.begin());
  return absl::OkStatus();
}

size_t SessionOwners::size() const {
  std::lock_guard lock(mutex_);
  return owned_.size();
}

}  // namespace spl::router
