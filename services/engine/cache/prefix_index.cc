#include "services/engine/cache/prefix_index.h"

#include <algorithm>
#include <iterator>

#include "services/base/check.h"

namespace spl::engine {

PrefixIndex::~PrefixIndex() {
  for (const auto& [key, entry] : entries_) Release(entry);
}

void PrefixIndex::Release(const Entry& entry) {
  pool_.UnmarkCached(entry.pages);
  pool_.Release(entry.pages);
}

size_t PrefixIndex::AppendLeading(std::span<const chunk::ChunkKey> keys, SequenceKv& kv) {
  SPLICE_CHECK(kv.is_whole(), "a prefix is shared by sequences that keep everything");
  std::lock_guard lock(mutex_);
  std::vector<Entry*> hits;
  for (const chunk::ChunkKey& key : keys) {
    const auto it = entries_.find(key);
    if (it == entries_.end()) break;
    kv.AppendShared(it->second.pages);
    hits.push_back(&it->second);
  }
  // Touches the deepest chunk first, so that the start of the prompt is the most recent and is evicted last.
  for (auto hit = hits.rbegin(); hit != hits.rend(); ++hit)
    recency_.splice(recency_.begin(), recency_, (*hit)->recency);
  return hits.size();
}

size_t PrefixIndex::CountLeading(std::span<const chunk::ChunkKey> keys) const {
  std::lock_guard lock(mutex_);
  size_t count = 0;
  while (count < keys.size() && entries_.contains(keys[count])) ++count;
  return count;
}

void PrefixIndex::Insert(std::span<const chunk::ChunkKey> keys, const SequenceKv& kv) {
  SPLICE_CHECK(kv.is_whole(), "a view is no source of a prefix");
  const size_t full = std::min<size_t>(keys.size(), static_cast<size_t>(kv.exact_tokens() / kernels::kPageTokens));
  std::lock_guard lock(mutex_);
  for (size_t i = full; i-- > 0;) {
    auto [it, inserted] = entries_.try_emplace(keys[i]);
    if (!inserted) {
      recency_.splice(recency_.begin(), recency_, it->second.recency);
      continue;
    }
    it->second.pages = kv.PagesOfChunk(static_cast<int32_t>(i));
    pool_.Share(it->second.pages);
    pool_.MarkCached(it->second.pages);
    recency_.push_front(keys[i]);
    it->second.recency = recency_.begin();
    if (observer_ != nullptr) observer_(true, keys.subspan(i, 1));
  }
}

bool PrefixIndex::EvictUntilFree(int64_t num_free) {
  std::lock_guard lock(mutex_);
  for (size_t left = recency_.size(); left > 0 && pool_.num_free() < num_free; --left) {
    const auto oldest = std::prev(recency_.end());
    const auto entry = entries_.find(*oldest);
    // Checking one page is enough: the pages of a chunk are shared and released together. Entries of sequences that run
    // for long would gather at this end, and every call would walk over them.
    if (pool_.owners(entry->second.pages.front()) > 1) {
      recency_.splice(recency_.begin(), recency_, oldest);
      continue;
    }
    Release(entry->second);
    entries_.erase(entry);
    if (observer_ != nullptr) observer_(false, std::span(&*oldest, 1));
    recency_.erase(oldest);
  }
  return pool_.num_free() >= num_free;
}

size_t PrefixIndex::size() const {
  std::lock_guard lock(mutex_);
  return entries_.size();
}

}  // namespace spl::engine
