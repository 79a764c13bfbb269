#include "services/engine/cache/segment_index.h"

#include <algorithm>
#include <cstring>

#include "services/base/check.h"
#include "services/engine/cache/rolling_hash.h"

namespace spl::engine {
namespace {

constexpr int32_t kChunk = chunk::kChunkTokens;

bool SameTokens(std::span<const int32_t> a, std::span<const int32_t> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

// Two hits that continue each other in prompt and source become one.
void Append(std::vector<SegmentHit>& hits, const SegmentHit& hit) {
  if (!hits.empty()) {
    SegmentHit& last = hits.back();
    if (last.source == hit.source && last.target + last.num_tokens == hit.target &&
        last.offset + last.num_tokens == hit.offset) {
      last.num_tokens += hit.num_tokens;
      return;
    }
  }
  hits.push_back(hit);
}

}  // namespace

std::vector<chunk::ChunkKey> SegmentIndex::KeysOf(const chunk::Digest& namespace_key,
                                                  std::span<const int32_t> tokens) const {
  std::vector<chunk::ChunkKey> keys;
  for (size_t at = 0; at < tokens.size(); at += kChunk) {
    const auto part = tokens.subspan(at, std::min<size_t>(kChunk, tokens.size() - at));
    keys.push_back(chunk::MakeChunkKey(chunk::ChainKind::kSegment, fingerprint_, namespace_key,
                                       keys.empty() ? nullptr : &keys.back(), part));
  }
  return keys;
}

uint64_t SegmentIndex::SaltOf(const chunk::Digest& namespace_key) {
  uint64_t salt;
  std::memcpy(&salt, namespace_key.data(), sizeof(salt));
  return salt;
}

int64_t SegmentIndex::Source::num_pages() const { return source->num_pages(); }

void SegmentIndex::Source::Mark() const {
  for (int32_t stream = 0; stream < source->num_streams(); ++stream) source->pool().MarkCached(source->pages(stream));
}

void SegmentIndex::Source::Unmark() const {
  for (int32_t stream = 0; stream < source->num_streams(); ++stream) source->pool().UnmarkCached(source->pages(stream));
}

SegmentIndex::~SegmentIndex() {
  for (const Sources* const sources : {&sources_, &frozen_}) {
    for (const Source& source : *sources) source.Unmark();
  }
}

void SegmentIndex::Use(Sources::iterator source) {
  if (!source->frozen) {
    sources_.splice(sources_.begin(), sources_, source);
    return;
  }
  const uint64_t rank = std::max(source->order->first, frozen_age_) + 1;
  frozen_order_.erase(source->order);
  source->order = frozen_order_.emplace(rank, source);
}

void SegmentIndex::Freeze(Sources::iterator source) {
  if (source->frozen) return;
  source->frozen = true;
  frozen_.splice(frozen_.begin(), sources_, source);
  source->order = frozen_order_.emplace(frozen_age_ + 1, source);
  frozen_pages_ += source->num_pages();
}

template <typename Map, typename Key>
void SegmentIndex::Claim(Map& entries, const Key& key, const Place& place, Dropped& dropped) {
  const auto [entry, is_new] = entries.try_emplace(key, place);
  if (is_new) {
    Tell(true, key);
  } else {
    const Sources::iterator holder = entry->second.source;
    if (holder == place.source || (holder->frozen && !place.source->frozen)) return;
    entry->second = place;
    if (--holder->num_entries == 0) Drop(holder, dropped);
  }
  ++place.source->num_entries;
}

template <typename Map, typename Keys>
void SegmentIndex::Forget(Map& entries, const Keys& keys, Sources::iterator source) {
  for (const auto& key : keys) {
    const auto entry = entries.find(key);
    if (entry == entries.end() || entry->second.source != source) continue;
    entries.erase(entry);
    Tell(false, key);
  }
}

void SegmentIndex::Drop(Sources::iterator source, Dropped& dropped) {
  Forget(entries_, source->keys, source);
  Forget(windows_, source->text_hashes, source);
  source->Unmark();
  dropped.push_back(std::move(source->source));
  if (!source->frozen) {
    sources_.erase(source);
    return;
  }
  frozen_pages_ -= dropped.back()->num_pages();
  frozen_order_.erase(source->order);
  frozen_.erase(source);
}

SegmentIndex::Source SegmentIndex::SourceFor(const chunk::Digest& namespace_key,
                                             std::shared_ptr<const SegmentSource> source) const {
  SPLICE_CHECK(source->is_whole(), "what lacks KV is nobody else's");
  const std::span<const int32_t> tokens = source->tokens();
  std::vector<uint64_t> hashes;
  for (int32_t at = 0; at + kChunk <= static_cast<int32_t>(tokens.size()); at += kChunk)
    hashes.push_back(RollingHash(kChunk, SaltOf(namespace_key)).At(tokens, at));
  return {namespace_key, std::move(source), KeysOf(namespace_key, tokens), std::move(hashes)};
}

void SegmentIndex::Add(Source source, bool frozen, Dropped& dropped) {
  source.Mark();
  sources_.push_front(std::move(source));
  const Sources::iterator place = sources_.begin();
  if (frozen) Freeze(place);
  for (size_t i = 0; i < place->keys.size(); ++i)
    Claim(entries_, place->keys[i], {place, static_cast<int32_t>(i) * kChunk}, dropped);
  for (size_t i = 0; i < place->text_hashes.size(); ++i)
    Claim(windows_, place->text_hashes[i], {place, static_cast<int32_t>(i) * kChunk}, dropped);
}

bool SegmentIndex::Insert(const chunk::Digest& namespace_key, std::shared_ptr<const SegmentSource> source,
                          bool frozen) {
  Source added = SourceFor(namespace_key, std::move(source));
  Dropped dropped;
  std::lock_guard lock(mutex_);
  if (ContainsLocked(added.keys)) {
    Sources::iterator last = sources_.end();
    for (const chunk::ChunkKey& key : added.keys) {
      const Sources::iterator holder = entries_.at(key).source;
      if (holder == last) continue;
      last = holder;
      if (frozen) Freeze(holder);
      Use(holder);
    }
    return false;
  }
  Add(std::move(added), frozen, dropped);
  return true;
}

void SegmentIndex::Replace(const chunk::Digest& namespace_key, std::shared_ptr<const SegmentSource> source,
                           bool frozen) {
  Source added = SourceFor(namespace_key, std::move(source));
  Dropped dropped;
  std::lock_guard lock(mutex_);
  for (const chunk::ChunkKey& key : added.keys) {
    const auto entry = entries_.find(key);
    frozen |= entry != entries_.end() && entry->second.source->frozen;
  }
  Add(std::move(added), frozen, dropped);
}

bool SegmentIndex::ContainsLocked(std::span<const chunk::ChunkKey> keys) const {
  return std::all_of(keys.begin(), keys.end(), [&](const auto& key) { return entries_.contains(key); });
}

bool SegmentIndex::Contains(std::span<const chunk::ChunkKey> keys) const {
  std::lock_guard lock(mutex_);
  return ContainsLocked(keys);
}

bool SegmentIndex::ContainsFirst(std::span<const chunk::ChunkKey> keys) const {
  std::lock_guard lock(mutex_);
  return std::all_of(keys.begin(), keys.end(), [&](const auto& key) {
    const auto entry = entries_.find(key);
    return entry != entries_.end() && entry->second.source->source->began_prompt();
  });
}

std::vector<SegmentHit> SegmentIndex::FindSegment(const chunk::Digest& namespace_key, std::span<const int32_t> tokens,
                                                  PositionRange range, bool freeze) {
  const auto segment = tokens.subspan(range.begin, range.size());
  const std::vector<chunk::ChunkKey> keys = KeysOf(namespace_key, segment);
  std::vector<SegmentHit> hits;
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < keys.size(); ++i) {
    const int32_t at = static_cast<int32_t>(i) * kChunk, count = std::min(kChunk, range.size() - at);
    const auto it = entries_.find(keys[i]);
    if (it == entries_.end()) break;
    const Source& found = *it->second.source;
    const auto here = found.source->tokens().subspan(it->second.offset);
    if (found.namespace_key != namespace_key || here.size() < static_cast<size_t>(count) ||
        !SameTokens(here.first(count), segment.subspan(at, count)))
      break;
    const size_t num_hits = hits.size();
    Append(hits, {found.source, it->second.offset, range.begin + at, count});
    if (hits.size() == num_hits) continue;  // the same source continues: counts as one use
    if (freeze) Freeze(it->second.source);
    Use(it->second.source);
  }
  return hits;
}

std::vector<SegmentHit> SegmentIndex::FindText(const chunk::Digest& namespace_key, std::span<const int32_t> tokens,
                                               PositionRange range) {
  std::vector<SegmentHit> hits;
  RollingHash hash(kChunk, SaltOf(namespace_key));
  std::lock_guard lock(mutex_);
  int32_t free_from = range.begin;  // position behind the last hit
  for (int32_t at = range.begin; at + kChunk <= range.end;) {
    const auto it = windows_.find(hash.At(tokens, at));
    if (it == windows_.end()) {
      ++at;
      continue;
    }
    const Source& found = *it->second.source;
    const std::span<const int32_t> text = found.source->tokens();
    int32_t offset = it->second.offset;
    if (found.namespace_key != namespace_key || !SameTokens(text.subspan(offset, kChunk), tokens.subspan(at, kChunk))) {
      ++at;
      continue;
    }
    int32_t begin = at, end = at + kChunk;
    while (begin > free_from && offset > 0 && text[offset - 1] == tokens[begin - 1]) --begin, --offset;
    while (end < range.end && offset + end - begin < static_cast<int32_t>(text.size()) &&
           text[offset + end - begin] == tokens[end])
      ++end;
    hits.push_back({found.source, offset, begin, end - begin});
    Use(it->second.source);
    at = free_from = end;
  }
  return hits;
}

bool SegmentIndex::EvictOne() {
  Dropped dropped;
  std::lock_guard lock(mutex_);
  if (sources_.empty()) return false;
  Drop(std::prev(sources_.end()), dropped);
  return true;
}

bool SegmentIndex::EvictFrozen() {
  Dropped dropped;
  std::lock_guard lock(mutex_);
  if (frozen_order_.empty()) return false;
  const auto [rank, victim] = *frozen_order_.begin();
  frozen_age_ = rank;
  ++num_frozen_dropped_;
  Drop(victim, dropped);
  return true;
}

int64_t SegmentIndex::frozen_pages() const {
  std::lock_guard lock(mutex_);
  return frozen_pages_;
}

SegmentIndex::Stats SegmentIndex::stats() const {
  std::lock_guard lock(mutex_);
  Stats stats{.num_sources = sources_.size() + frozen_.size(),
              .num_tokens = 0,
              .num_frozen = frozen_.size(),
              .frozen_pages = frozen_pages_,
              .num_frozen_dropped = num_frozen_dropped_};
  const auto tokens_of = [](const Source& source) { return static_cast<int64_t>(source.source->tokens().size()); };
  for (const Source& source : frozen_) stats.frozen_tokens += tokens_of(source);
  stats.num_tokens = stats.frozen_tokens;
  for (const Source& source : sources_) stats.num_tokens += tokens_of(source);
  return stats;
}

void SegmentIndex::CheckInvariants() const {
  std::lock_guard lock(mutex_);
  std::unordered_map<const Source*, size_t> entries;
  for (const auto& [key, place] : entries_) ++entries[&*place.source];
  for (const auto& [hash, place] : windows_) ++entries[&*place.source];
  size_t num_alive = 0;
  int64_t pages = 0;
  for (const Sources* const list : {&sources_, &frozen_}) {
    for (const Source& source : *list) {
      SPLICE_CHECK(source.frozen == (list == &frozen_), "a frozen source is in the frozen pool");
      SPLICE_CHECK(source.num_entries > 0, "a source without entries is gone");
      SPLICE_CHECK(entries[&source] == source.num_entries, "a source counts the entries that lead to it");
      if (source.frozen) {
        SPLICE_CHECK(&*source.order->second == &source, "the frozen order leads back");
        pages += source.num_pages();
      }
      ++num_alive;
    }
  }
  SPLICE_CHECK(entries.size() == num_alive, "every entry leads to a source that is here");
  SPLICE_CHECK(frozen_order_.size() == frozen_.size(), "the frozen order lists every frozen source once");
  SPLICE_CHECK(pages == frozen_pages_, "frozen pages are those of the frozen sources");
}

}  // namespace spl::engine
