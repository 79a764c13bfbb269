#include "services/engine/cache/session_table.h"

#include <algorithm>
#include <utility>

#include "services/base/status.h"

namespace spl::engine {

absl::Status SessionTable::Check(std::string_view id, const chunk::Digest& namespace_key, Time now) {
  if (id.size() > kSessionIdBytesMax)
    return InvalidArgument("session is {} bytes long, at most {} are taken", id.size(), kSessionIdBytesMax);
  std::lock_guard lock(mutex_);
  ExpireLocked(now);
  const auto it = by_id_.find(id);
  if (it == by_id_.end() || it->second->namespace_key == namespace_key) return absl::OkStatus();
  return Errorf(absl::StatusCode::kPermissionDenied, "session '{}' belongs to another caller or namespace", id);
}

SessionTable::Match SessionTable::Find(std::string_view id, const chunk::Digest& namespace_key,
                                       std::span<const int32_t> tokens, std::string_view policy, Time now) {
  std::lock_guard lock(mutex_);
  ExpireLocked(now);
  const auto it = by_id_.find(id);
  if (it == by_id_.end() || it->second->namespace_key != namespace_key) return {};
  Session& session = *it->second;
  session.used = now;
  sessions_.splice(sessions_.begin(), sessions_, it->second);
  auto usable = static_cast<int64_t>(
      std::mismatch(tokens.begin(), tokens.end(), session.tokens.begin(), session.tokens.end()).first - tokens.begin());
  usable = std::min({usable, static_cast<int64_t>(tokens.size()) - 1, session.kv->num_tokens()});
  if (session.policy != policy) usable = std::min(usable, session.kv->exact_tokens());
  const auto pages = static_cast<int32_t>(std::max<int64_t>(usable, 0) / kernels::kPageTokens);
  if (pages == 0) return {};
  return {session.kv, pages};
}

void SessionTable::Keep(std::string_view id, const chunk::Digest& namespace_key, std::span<const int32_t> tokens,
                        std::string_view policy, std::shared_ptr<const SequenceKv> kv, Time now) {
  std::lock_guard lock(mutex_);
  if (const auto it = by_id_.find(id); it != by_id_.end()) {
    if (it->second->namespace_key != namespace_key) return;  // somebody else was faster with this id
    Drop(it->second);
  }
  if (kv->num_pages() > max_pages_) return;
  stats_.num_pages += kv->num_pages();
  sessions_.push_front({.id = std::string(id),
                        .namespace_key = namespace_key,
                        .policy = std::string(policy),
                        .tokens = {tokens.begin(), tokens.end()},
                        .kv = std::move(kv),
                        .used = now});
  by_id_.emplace(sessions_.front().id, sessions_.begin());
  while (stats_.num_pages > max_pages_) {
    Drop(std::prev(sessions_.end()));
    ++stats_.num_evicted;
  }
}

bool SessionTable::EvictOne() {
  std::lock_guard lock(mutex_);
  if (sessions_.empty()) return false;
  Drop(std::prev(sessions_.end()));
  ++stats_.num_evicted;
  return true;
}

void SessionTable::Expire(Time now) {
  std::lock_guard lock(mutex_);
  ExpireLocked(now);
}

SessionTable::Stats SessionTable::stats() const {
  std::lock_guard lock(mutex_);
  Stats stats = stats_;
  stats.num_sessions = sessions_.size();
  return stats;
}

void SessionTable::Drop(Sessions::iterator session) {
  stats_.num_pages -= session->kv->num_pages();
  by_id_.erase(session->id);
  sessions_.erase(session);
}

void SessionTable::ExpireLocked(Time now) {
  while (!sessions_.empty() && now - sessions_.back().used > lease_) {
    Drop(std::prev(sessions_.end()));
    ++stats_.num_expired;
  }
}

}  // namespace spl::engine
