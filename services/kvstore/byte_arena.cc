#include "services/kvstore/byte_arena.h"

#include "services/base/check.h"

namespace spl::kvstore {

ByteArena::ByteArena(uint64_t size) : size_(size) {
  if (size == 0) return;
  free_[0] = size;
  free_by_bytes_.insert({size, 0});
}

std::optional<uint64_t> ByteArena::Take(uint64_t bytes) {
  SPLICE_CHECK(bytes > 0, "a range has bytes");
  std::lock_guard lock(mutex_);
  const auto fit = free_by_bytes_.lower_bound({bytes, 0});
  if (fit == free_by_bytes_.end()) return std::nullopt;
  const auto [range_bytes, offset] = *fit;
  free_by_bytes_.erase(fit);
  free_.erase(offset);
  if (range_bytes > bytes) {
    free_[offset + bytes] = range_bytes - bytes;
    free_by_bytes_.insert({range_bytes - bytes, offset + bytes});
  }
  used_ += bytes;
  return offset;
}

void ByteArena::Give(uint64_t offset, uint64_t bytes) {
  std::lock_guard lock(mutex_);
  used_ -= bytes;
  auto next = free_.lower_bound(offset);
  SPLICE_CHECK(next == free_.end() || offset + bytes <= next->first, "a range is given back once");
  if (next != free_.end() && next->first == offset + bytes) {
    bytes += next->second;
    free_by_bytes_.erase({next->second, next->first});
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    SPLICE_CHECK(previous->first + previous->second <= offset, "a range is given back once");
    if (previous->first + previous->second == offset) {
      offset = previous->first;
      bytes += previous->second;
      free_by_bytes_.erase({previous->second, previous->first});
      free_.erase(previous);
    }
  }
  free_[offset] = bytes;
  free_by_bytes_.insert({bytes, offset});
}

uint64_t ByteArena::used() const {
  std::lock_guard lock(mutex_);
  return used_;
}

void ByteArena::CheckInvariants() const {
  std::lock_guard lock(mutex_);
  uint64_t sum = 0, end = 0;
  bool first = true;
  for (const auto& [offset, bytes] : free_) {
    SPLICE_CHECK(first || offset > end, "free ranges are apart from each other");
    SPLICE_CHECK(free_by_bytes_.count({bytes, offset}) == 1, "both views have every range");
    end = offset + bytes;
    sum += bytes;
    first = false;
  }
  SPLICE_CHECK(end <= size_ && free_.size() == free_by_bytes_.size(), "free ranges lie inside");
  SPLICE_CHECK(sum + used_ == size_, "used and free bytes add up");
}

}  // namespace spl::kvstore
