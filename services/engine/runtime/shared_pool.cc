#include "services/engine/runtime/shared_pool.h"

#include <algorithm>
#include <utility>

namespace spl::engine {

void SharedPool::AttachCache(Cache cache) {
  std::lock_guard lock(cache_mutex_);
  cache_ = std::move(cache);
}

void SharedPool::DetachCache() {
  std::lock_guard lock(cache_mutex_);
  cache_ = {};
}

void SharedPool::AttachDecoder(Decoder decoder) {
  std::lock_guard lock(decoder_mutex_);
  decoder_ = std::move(decoder);
}

void SharedPool::DetachDecoder() {
  {
    std::lock_guard lock(decoder_mutex_);
    decoder_ = {};
  }
  std::lock_guard lock(mutex_);
  given_.clear();
}

bool SharedPool::MakeRoom(int64_t num_pages) {
  std::lock_guard lock(cache_mutex_);
  return cache_.make_room ? cache_.make_room(num_pages) : pool_.num_free() >= num_pages;
}

bool SharedPool::MakeRoom(std::span<const int64_t> counts) {
  if (pool_.HasFree(counts)) return true;
  if (!pool_.HasAvailable(counts)) return false;
  // The pool counts as free what the fullest rank has, times the ranks.
  return MakeRoom(*std::max_element(counts.begin(), counts.end()) * static_cast<int64_t>(counts.size()));
}

bool SharedPool::PromptsWait() {
  std::lock_guard lock(cache_mutex_);
  return cache_.prompts_wait && cache_.prompts_wait();
}

void SharedPool::PagesFreed() {
  std::lock_guard lock(cache_mutex_);
  if (cache_.on_pages_freed) cache_.on_pages_freed();
}

std::optional<int64_t> SharedPool::GrowthPages() const {
  std::lock_guard lock(decoder_mutex_);
  const int64_t pages = decoder_.growth_pages ? decoder_.growth_pages() : 0;
  return pages < 0 ? std::nullopt : std::optional(pages);
}

int32_t SharedPool::max_decode_rows() const {
  std::lock_guard lock(decoder_mutex_);
  return decoder_.max_rows;
}

void SharedPool::Give(const RandomId& ticket, std::shared_ptr<const SequenceKv> kv) {
  std::lock_guard lock(mutex_);
  given_[ticket] = std::move(kv);
}

std::shared_ptr<const SequenceKv> SharedPool::Take(const RandomId& ticket) {
  std::lock_guard lock(mutex_);
  const auto node = given_.extract(ticket);
  return node.empty() ? nullptr : std::move(node.mapped());
}

}  // namespace spl::engine
