#include "services/engine/cache/segment_index.h"

#include <algorithm>
#include <cstring>

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

bool SegmentIndex::Insert(const chunk::Digest& namespace_key, std::shared_ptr<const SegmentSource> source) {
  const std::span<const int32_t> tokens = source->tokens();
  const std::vector<chunk::ChunkKey> keys = KeysOf(namespace_key, tokens);
  std::vector<uint64_t> hashes;
  for (int32_t at = 0; at + kChunk <= static_cast<int32_t>(tokens.size()); at += kChunk)
    hashes.push_back(RollingHash(kChunk, SaltOf(namespace_key)).At(tokens, at));
  std::lock_guard lock(mutex_);
  // A segment that is there to its last chunk is not kept twice.
  if (const auto last = entries_.find(keys.back()); last != entries_.end()) {
    Use(last->second.source);
    return false;
  }
  sources_.push_front({namespace_key, std::move(source), {}, {}});
  const Sources::iterator place = sources_.begin();
  for (size_t i = 0; i < keys.size(); ++i) {
    if (entries_.try_emplace(keys[i], Place{place, static_cast<int32_t>(i) * kChunk}).second)
      place->keys.push_back(keys[i]);
  }
  for (size_t i = 0; i < hashes.size(); ++i) {
    if (windows_.try_emplace(hashes[i], Place{place, static_cast<int32_t>(i) * kChunk}).second)
      place->text_hashes.push_back(hashes[i]);
  }
  return true;
}

bool SegmentIndex::Contains(std::span<const chunk::ChunkKey> keys) const {
  std::lock_guard lock(mutex_);
  return std::all_of(keys.begin(), keys.end(), [&](const auto& key) { return entries_.contains(key); });
}

std::vector<SegmentHit> SegmentIndex::FindSegment(const chunk::Digest& namespace_key, std::span<const int32_t> tokens,
                                                  PositionRange range) {
  const auto segment = tokens.subspan(static_cast<size_t>(range.begin), static_cast<size_t>(range.size()));
  const std::vector<chunk::ChunkKey> keys = KeysOf(namespace_key, segment);
  std::vector<SegmentHit> hits;
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < keys.size(); ++i) {
    const int32_t at = static_cast<int32_t>(i) * kChunk, count = std::min(kChunk, range.size() - at);
    const auto it = entries_.find(keys[i]);
    if (it == entries_.end()) break;
    const Source& found = *it->second.source;
    const auto here = found.source->tokens().subspan(static_cast<size_t>(it->second.offset));
    if (found.namespace_key != namespace_key || here.size() < static_cast<size_t>(count) ||
        !SameTokens(here.first(static_cast<size_t>(count)), segment.subspan(static_cast<size_t>(at), count)))
      break;
    Append(hits, {found.source, it->second.offset, range.begin + at, count});
    Use(it->second.source);
  }
  return hits;
}

std::vector<SegmentHit> SegmentIndex::FindText(const chunk::Digest& namespace_key, std::span<const int32_t> tokens,
                                               PositionRange range) {
  std::vector<SegmentHit> hits;
  RollingHash hash(kChunk, SaltOf(namespace_key));
  std::lock_guard lock(mutex_);
  int32_t free_from = range.begin;  // behind the last hit
  for (int32_t at = range.begin; at + kChunk <= range.end;) {
    const auto it = windows_.find(hash.At(tokens, at));
    if (it == windows_.end()) {
      ++at;
      continue;
    }
    const Source& found = *it->second.source;
    const std::span<const int32_t> text = found.source->tokens();
    int32_t offset = it->second.offset;
    if (found.namespace_key != namespace_key || !SameTokens(text.subspan(static_cast<size_t>(offset), kChunk),
                                                            tokens.subspan(static_cast<size_t>(at), kChunk))) {
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
  std::shared_ptr<const SegmentSource> dropped;  // its pages go back without the lock
  std::lock_guard lock(mutex_);
  if (sources_.empty()) return false;
  const Source& source = sources_.back();
  for (const chunk::ChunkKey& key : source.keys) entries_.erase(key);
  for (const uint64_t hash : source.text_hashes) windows_.erase(hash);
  dropped = source.source;
  sources_.pop_back();
  return true;
}

SegmentIndex::Stats SegmentIndex::stats() const {
  std::lock_guard lock(mutex_);
  Stats stats{sources_.size(), 0};
  for (const Source& source : sources_) stats.num_tokens += static_cast<int64_t>(source.source->tokens().size());
  return stats;
}

}  // namespace spl::engine
