#include "services/engine/cache/session_table.h"

#include <algorithm>
#include <iterator>

#include "services/base/status.h"

namespace spl::engine {

absl::Status CheckSessionName(std::string_view name) {
  if (name.size() <= kSessionIdBytesMax) return absl::OkStatus();
  return InvalidArgument("session is {} bytes long, at most {} are taken", name.size(), kSessionIdBytesMax);
}

SessionTable::Match SessionTable::Find(const SessionId& id, std::span<const chunk::ChunkKey> blocks,
                                       std::string_view method, Time now) {
  std::lock_guard lock(mutex_);
  ExpireLocked(now);
  const auto it = by_id_.find(KeyOf(id));
  if (it == by_id_.end()) return {};
  Session& session = *it->second;
  session.used = now;
  sessions_.splice(sessions_.begin(), sessions_, it->second);
  const auto equal = std::mismatch(blocks.begin(), blocks.end(), session.blocks.begin(), session.blocks.end()).first;
  const SequenceKv& kv = *session.kv;
  const int64_t usable = session.method == method ? kv.num_tokens() : kv.exact_tokens();
  const auto pages = static_cast<int32_t>(
      std::min<int64_t>(equal - blocks.begin(), std::max<int64_t>(usable, 0) / kernels::kPageTokens));
  if (pages == 0) return {};
  return {session.kv, pages};
}

void SessionTable::Keep(const SessionId& id, std::span<const chunk::ChunkKey> blocks, std::string_view method,
                        std::shared_ptr<const SequenceKv> kv, Time now) {
  std::lock_guard lock(mutex_);
  if (const auto it = by_id_.find(KeyOf(id)); it != by_id_.end()) Drop(it->second);
  if (kv->num_pages() == 0) return;
  sessions_.push_front({.name = std::string(id.name),
                        .id = id,
                        .method = std::string(method),
                        .blocks = {blocks.begin(), blocks.end()},
                        .kv = std::move(kv),
                        .used = now});
  const auto kept = sessions_.begin();
  kept->id.name = kept->name;
  by_id_.emplace(KeyOf(kept->id), kept);
  Add(kept);
  while (stats_.num_pages > max_pages_) {
    const Sessions::iterator victim = Victim();
    if (victim == kept) return TrimTo(kept, kept->kv->num_pages() - (stats_.num_pages - max_pages_));
    Drop(victim);
    ++stats_.num_evicted;
  }
}

bool SessionTable::EvictOne() {
  std::lock_guard lock(mutex_);
  if (sessions_.empty()) return false;
  Drop(Victim());
  ++stats_.num_gave_way;
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

SessionTable::~SessionTable() {
  while (!sessions_.empty()) Drop(sessions_.begin());
}

void SessionTable::Add(Sessions::iterator session) {
  for (const std::vector<int32_t>& pages : session->kv->streams()) session->kv->pool().MarkCached(pages);
  stats_.num_pages += session->kv->num_pages();
  pages_by_owner_[session->id.owner] += session->kv->num_pages();
}

void SessionTable::Subtract(Sessions::iterator session) {
  for (const std::vector<int32_t>& pages : session->kv->streams()) session->kv->pool().UnmarkCached(pages);
  stats_.num_pages -= session->kv->num_pages();
  const auto owned = pages_by_owner_.find(session->id.owner);
  owned->second -= session->kv->num_pages();
  if (owned->second == 0) pages_by_owner_.erase(owned);
}

// REQUIRES: there are sessions.
SessionTable::Sessions::iterator SessionTable::Victim() {
  const auto largest = std::max_element(pages_by_owner_.begin(), pages_by_owner_.end(),
                                        [](const auto& a, const auto& b) { return a.second < b.second; });
  const auto oldest = std::find_if(sessions_.rbegin(), sessions_.rend(),
                                   [&](const Session& session) { return session.id.owner == largest->first; });
  return std::prev(oldest.base());
}

// A conversation that needs more pages than the budget keeps its beginning; the next turn computes the rest.
void SessionTable::TrimTo(Sessions::iterator session, int64_t num_pages) {
  const auto pages_each = static_cast<int32_t>(num_pages / session->kv->shape().num_streams());
  if (pages_each <= 0) return Drop(session);
  auto leading = std::make_shared<SequenceKv>(session->kv->pool(), session->kv->shape());
  leading->AppendLeading(*session->kv, pages_each);
  Subtract(session);
  session->kv = std::move(leading);
  Add(session);
}

void SessionTable::Drop(Sessions::iterator session) {
  Subtract(session);
  by_id_.erase(KeyOf(session->id));
  sessions_.erase(session);
}

void SessionTable::ExpireLocked(Time now) {
  while (!sessions_.empty() && now - sessions_.back().used > lease_) {
    Drop(std::prev(sessions_.end()));
    ++stats_.num_expired;
  }
}

}  // namespace spl::engine
