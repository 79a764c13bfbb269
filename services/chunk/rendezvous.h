// Chooses the store that keeps a chunk: rendezvous hashing (highest random weight, Thaler and Ravishankar 1998).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "services/chunk/chunk.h"

namespace spl::chunk {

// Every member scores every key with a hash of both; the highest score keeps the chunk, the next one is its second
// choice, and so on. The keys of a member that leaves go to their second choices, evenly; a new member takes its share
// from all; no other key moves. Names are hashed, not indices: equal lists in any order give equal placements.
class Rendezvous {
 public:
  explicit Rendezvous(std::span<const std::string> members);

  size_t size() const { return member_hashes_.size(); }
  // Returns indices of `members`, best first. Cost: size() hashes and a sort.
  std::vector<size_t> Rank(const ChunkKey& key) const;

 private:
  uint64_t Score(size_t member, const ChunkKey& key) const;

  std::vector<uint64_t> member_hashes_;
};

}  // namespace spl::chunk
