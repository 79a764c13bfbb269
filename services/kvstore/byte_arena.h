// Tracks the free ranges of a fixed piece of memory.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

namespace spl::kvstore {

// Best fit; joins neighbours when ranges come back. Any thread may call. Cost: logarithmic in the number of free
// ranges, which is small while chunks have few sizes.
class ByteArena {
 public:
  explicit ByteArena(uint64_t size);

  // Returns the offset of a range of `bytes` bytes, or nothing if no free range is that long. `bytes` must not be 0.
  std::optional<uint64_t> Take(uint64_t bytes);
  // Returns a range that Take gave.
  void Give(uint64_t offset, uint64_t bytes);

  uint64_t size() const { return size_; }
  uint64_t used() const;
  // Aborts if the two views of the free ranges disagree. For tests.
  void CheckInvariants() const;

 private:
  const uint64_t size_;
  mutable std::mutex mutex_;                               // guards all below
  std::map<uint64_t, uint64_t> free_;                      // offset → bytes
  std::set<std::pair<uint64_t, uint64_t>> free_by_bytes_;  // (bytes, offset)
  uint64_t used_ = 0;
};

}  // namespace spl::kvstore
