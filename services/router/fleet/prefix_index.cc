#include "services/router/fleet/prefix_index.h"

#include <algorithm>
#include <optional>

namespace spl::router {
namespace {

constexpr size_t kPresencesPerChunk = 4;
// Worker names may be new after every restart. Forgetting all of them makes the index empty, once in a long life.
constexpr uint32_t kMaxHolders = 65'536;
// Age classes of a worker's pages: it is predicted to have evicted a sixty-fourth of them too early at most.
constexpr uint64_t kAgeClasses = 64;

std::span<const chunk::ChunkKey> ExactPrefix(const PromptKeys& keys, uint32_t exact_tokens) {
  return std::span(keys.prefix).first(std::min<size_t>(keys.prefix.size(), exact_tokens / chunk::kChunkTokens));
}

}  // namespace

std::vector<chunk::ChunkKey> MakeSegmentKeys(const chunk::Digest& model_fingerprint, const chunk::Digest& namespace_key,
                                             std::span<const int32_t> tokens) {
  std::vector<chunk::ChunkKey> keys;
  while (!tokens.empty()) {
    const auto piece = tokens.first(std::min<size_t>(tokens.size(), chunk::kChunkTokens));
    keys.push_back(chunk::MakeChunkKey(chunk::ChainKind::kSegment, model_fingerprint, namespace_key,
                                       keys.empty() ? nullptr : &keys.back(), piece));
    tokens = tokens.subspan(piece.size());
  }
  return keys;
}

chunk::ChunkKey MakeSegmentKey(const chunk::Digest& model_fingerprint, const chunk::Digest& namespace_key,
                               std::span<const int32_t> tokens) {
  const std::vector<chunk::ChunkKey> keys = MakeSegmentKeys(model_fingerprint, namespace_key, tokens);
  return keys.empty() ? chunk::ChunkKey() : keys.back();
}

PrefixIndex::Seconds PrefixIndex::SecondsAt(Clock::time_point time) const {
  return static_cast<Seconds>(
      std::max<int64_t>(0, std::chrono::duration_cast<std::chrono::seconds>(time - options_.epoch).count()));
}

uint32_t PrefixIndex::InternLocked(const Holder& holder) {
  const auto it = holders_.find(holder.worker_id);
  if (it != holders_.end() && it->second.epoch == holder.epoch) return it->second.id;
  if (pools_.size() >= kMaxHolders) {
    entries_.clear();
    newest_ = oldest_ = nullptr;
    num_presences_ = 0;
    holders_.clear();
    pools_.clear();
  }
  const auto id = static_cast<uint32_t>(pools_.size());
  holders_[holder.worker_id] = {.epoch = holder.epoch, .id = id};
  pools_.emplace_back();
  return id;
}

// Interned id → place in `holders`, or -1.
std::vector<int32_t> PrefixIndex::PositionsLocked(std::span<const Holder> holders) const {
  std::vector<int32_t> positions(pools_.size(), -1);
  for (size_t i = 0; i < holders.size(); ++i) {
    const auto it = holders_.find(holders[i].worker_id);
    if (it != holders_.end() && it->second.epoch == holders[i].epoch) positions[it->second.id] = static_cast<int>(i);
  }
  return positions;
}

PrefixIndex::Leading PrefixIndex::CountLeadingLocked(std::span<const chunk::ChunkKey> keys,
                                                     const std::vector<int32_t>& positions, size_t num_holders,
                                                     Seconds now) {
  Leading leading{.of_holder = std::vector<uint32_t>(num_holders, 0)};
  for (uint32_t i = 0; i < keys.size(); ++i) {
    Entry* const entry = FindLocked(keys[i]);
    if (entry == nullptr) break;
    bool held = false;
    for (const Presence& presence : entry->holders) {
      const int32_t position = positions[presence.holder];
      if (position < 0 || !HasLocked(presence, now) || leading.of_holder[position] != i) continue;
      leading.of_holder[position] = i + 1;
      held = true;
    }
    if (leading.stored == i && entry->stored_until > now) {
      leading.stored = i + 1;
      held = true;
    }
    if (!held) break;
    MakeNewestLocked(*entry);
  }
  return leading;
}

std::vector<size_t> PrefixIndex::CountLeading(std::span<const chunk::ChunkKey> keys, std::span<const Holder> holders,
                                              Clock::time_point now) {
  std::lock_guard lock(mutex_);
  const Leading leading = CountLeadingLocked(keys, PositionsLocked(holders), holders.size(), SecondsAt(now));
  return {leading.of_holder.begin(), leading.of_holder.end()};
}

std::vector<std::vector<uint8_t>> PrefixIndex::HoldsSegments(std::span<const SegmentKey> segments,
                                                             std::span<const Holder> holders, Clock::time_point now) {
  std::vector<std::vector<uint8_t>> held(holders.size(), std::vector<uint8_t>(segments.size(), 0));
  std::lock_guard lock(mutex_);
  const std::vector<int32_t> positions = PositionsLocked(holders);
  for (size_t s = 0; s < segments.size(); ++s) {
    const Entry* const entry = FindLocked(segments[s].key);
    if (entry == nullptr) continue;
    for (const Presence& presence : entry->holders) {
      const int32_t position = positions[presence.holder];
      if (position >= 0 && HasLocked(presence, SecondsAt(now))) held[position][s] = 1;
    }
  }
  return held;
}

std::vector<PredictedReuse> PrefixIndex::Predict(const PromptKeys& keys, std::span<const Holder> holders,
                                                 Clock::time_point now_point, std::span<const KnownCache> known) {
  const Seconds now = SecondsAt(now_point);
  std::vector<PredictedReuse> reuse(holders.size());
  std::lock_guard lock(mutex_);
  const std::vector<int32_t> positions = PositionsLocked(holders);
  const Leading leading = CountLeadingLocked(keys.prefix, positions, holders.size(), now);
  for (size_t i = 0; i < holders.size(); ++i) {
    const uint32_t own = !known.empty() && known[i].leading.has_value() ? static_cast<uint32_t>(*known[i].leading)
                                                                        : leading.of_holder[i];
    const uint32_t stored = holders[i].reads_store ? leading.stored : 0;
    reuse[i].prefix_tokens = std::max(own, stored) * chunk::kChunkTokens;
    if (stored > own) reuse[i].fetched_tokens = (stored - own) * chunk::kChunkTokens;
  }
  std::vector<uint8_t> held(holders.size());
  for (size_t s = 0; s < keys.segments.size(); ++s) {
    const SegmentKey& segment = keys.segments[s];
    Entry* const entry = FindLocked(segment.key);
    std::fill(held.begin(), held.end(), uint8_t{0});
    if (entry != nullptr) {
      for (const Presence& presence : entry->holders) {
        const int32_t position = positions[presence.holder];
        if (position >= 0 && HasLocked(presence, now)) held[position] = 1;
      }
      MakeNewestLocked(*entry);
    }
    const bool stored = entry != nullptr && entry->stored_until > now;
    for (size_t i = 0; i < holders.size(); ++i) {
      const bool is_known = !known.empty() && known[i].segments.has_value();
      const uint32_t own = is_known ? (*known[i].segments)[s] : held[i] != 0 ? segment.end - segment.begin : 0;
      // If the worker fetches a segment, the part that it has already is not fetched.
      const uint32_t own_end = segment.begin + own, end = stored && holders[i].reads_store ? segment.end : own_end;
      const uint32_t begin = std::max(segment.begin, reuse[i].prefix_tokens);
      if (end <= begin) continue;
      reuse[i].aligned_tokens += end - begin;
      reuse[i].exact_tokens = std::min(reuse[i].exact_tokens, begin);
      reuse[i].fetched_tokens += end - std::clamp(own_end, begin, end);
    }
  }
  return reuse;
}

void PrefixIndex::Insert(std::span<const chunk::ChunkKey> keys, const Holder& holder, Clock::time_point now) {
  std::lock_guard lock(mutex_);
  const uint32_t id = InternLocked(holder);
  AddChainLocked(keys, id, holder, SecondsAt(now));
  EvictLocked();
}

void PrefixIndex::Insert(const PromptKeys& keys, const Holder& holder, uint32_t exact_tokens, Clock::time_point now) {
  std::lock_guard lock(mutex_);
  const uint32_t id = InternLocked(holder);
  AddChainLocked(ExactPrefix(keys, exact_tokens), id, holder, SecondsAt(now));
  for (const SegmentKey& segment : keys.segments) {
    const uint32_t chunks = (segment.end - segment.begin + chunk::kChunkTokens - 1) / chunk::kChunkTokens;
    AddPresenceLocked(segment.key, id, holder, chunks, SecondsAt(now));
  }
  EvictLocked();
}

void PrefixIndex::InsertStored(const PromptKeys& keys, uint32_t exact_tokens, Clock::time_point now) {
  const Seconds until = SecondsAt(now) + static_cast<Seconds>(options_.stored_ttl.count());
  std::lock_guard lock(mutex_);
  for (const chunk::ChunkKey& key : ExactPrefix(keys, exact_tokens)) AddLocked(key).stored_until = until;
  for (const SegmentKey& segment : keys.segments) {
    if (segment.end <= exact_tokens) AddLocked(segment.key).stored_until = until;
  }
  EvictLocked();
}

// The start of the prompt counts as used last: a worker evicts the deepest chunks first.
void PrefixIndex::AddChainLocked(std::span<const chunk::ChunkKey> keys, uint32_t id, const Holder& holder,
                                 Seconds now) {
  for (size_t i = keys.size(); i-- > 0;) AddPresenceLocked(keys[i], id, holder, 1, now);
}

void PrefixIndex::AddPresenceLocked(const chunk::ChunkKey& key, uint32_t id, const Holder& holder, uint32_t chunks,
                                    Seconds now) {
  const Seconds expires = now + static_cast<Seconds>(options_.ttl.count());
  Entry& entry = AddLocked(key);
  Presence* stale = nullptr;
  for (Presence& presence : entry.holders) {
    if (presence.holder == id) {
      presence = {
          .holder = id, .expires = expires, .age_class = UsePoolLocked(id, holder.max_chunks, &presence, chunks)};
      return;
    }
    if (!HasLocked(presence, now)) stale = &presence;
  }
  const Presence added{
      .holder = id, .expires = expires, .age_class = UsePoolLocked(id, holder.max_chunks, nullptr, chunks)};
  if (stale != nullptr) {
    *stale = added;
    return;
  }
  entry.holders.push_back(added);
  ++num_presences_;
}

uint32_t PrefixIndex::UsePoolLocked(uint32_t id, uint64_t max_chunks, const Presence* presence, uint32_t chunks) {
  Pool& pool = pools_[id];
  // The numbers end after days of the heaviest use: then all guesses about this worker are kept until they expire.
  if (pool.classes.rbegin()->first == std::numeric_limits<uint32_t>::max()) pool = {};
  const uint32_t newest = pool.classes.rbegin()->first;
  if (max_chunks == 0) return newest;
  const auto before = presence != nullptr ? pool.classes.find(presence->age_class) : pool.classes.end();
  if (before != pool.classes.end()) {
    const uint64_t moved = std::min<uint64_t>(before->second, chunks);
    before->second -= moved;
    pool.chunks -= moved;
    if (before->second == 0 && before->first != newest) pool.classes.erase(before);
  }
  uint64_t& last = pool.classes.rbegin()->second;
  last += chunks;
  pool.chunks += chunks;
  if (last * kAgeClasses >= max_chunks) pool.classes.emplace_hint(pool.classes.end(), newest + 1, 0);
  while (pool.chunks > max_chunks && pool.classes.size() > 1) {
    pool.chunks -= pool.classes.begin()->second;
    pool.classes.erase(pool.classes.begin());
  }
  return newest;
}

PrefixIndex::Entry* PrefixIndex::FindLocked(const chunk::ChunkKey& key) {
  const auto it = entries_.find(key);
  return it == entries_.end() ? nullptr : &it->second;
}

PrefixIndex::Entry& PrefixIndex::AddLocked(const chunk::ChunkKey& key) {
  const auto [it, added] = entries_.try_emplace(key);
  Entry& entry = it->second;
  if (added) entry.key = &it->first;
  MakeNewestLocked(entry);
  return entry;
}

void PrefixIndex::MakeNewestLocked(Entry& entry) {
  if (newest_ == &entry) return;
  UnlinkLocked(entry);
  entry.older = newest_;
  if (newest_ != nullptr) newest_->newer = &entry;
  newest_ = &entry;
  if (oldest_ == nullptr) oldest_ = &entry;
}

// Nothing happens to an entry that is in no list yet.
void PrefixIndex::UnlinkLocked(Entry& entry) {
  if (entry.newer != nullptr) entry.newer->older = entry.older;
  if (entry.older != nullptr) entry.older->newer = entry.newer;
  if (newest_ == &entry) newest_ = entry.older;
  if (oldest_ == &entry) oldest_ = entry.newer;
  entry.newer = entry.older = nullptr;
}

void PrefixIndex::EvictLocked() {
  while (entries_.size() > options_.capacity || num_presences_ > kPresencesPerChunk * options_.capacity) {
    Entry& victim = *oldest_;
    UnlinkLocked(victim);
    num_presences_ -= victim.holders.size();
    entries_.erase(entries_.find(*victim.key));
  }
}

size_t PrefixIndex::size() const {
  std::lock_guard lock(mutex_);
  return entries_.size();
}

}  // namespace spl::router
