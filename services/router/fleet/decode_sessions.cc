#include "services/router/fleet/decode_sessions.h"

#include <utility>

namespace spl::router {

void DecodeSessions::Note(const std::string& conversation, HeldPrompt held) {
  std::lock_guard lock(mutex_);
  if (const auto it = by_conversation_.find(conversation); it != by_conversation_.end()) {
    it->second->held = std::move(held);
    entries_.splice(entries_.begin(), entries_, it->second);
    return;
  }
  entries_.push_front({conversation, std::move(held)});
  by_conversation_.emplace(conversation, entries_.begin());
  if (entries_.size() <= capacity_) return;
  by_conversation_.erase(entries_.back().conversation);
  entries_.pop_back();
}

std::optional<HeldPrompt> DecodeSessions::Find(const std::string& conversation) const {
  std::lock_guard lock(mutex_);
  const auto it = by_conversation_.find(conversation);
  if (it == by_conversation_.end()) return std::nullopt;
  return it->second->held;
}

size_t DecodeSessions::size() const {
  std::lock_guard lock(mutex_);
  return entries_.size();
}

}  // namespace spl::router
