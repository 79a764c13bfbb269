// Which of several stores keeps a chunk: rendezvous hashing (highest random weight, Thaler and Ravishankar 1998).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "services/chunk/chunk.h"

namespace spl::chunk {

// Every member scores every key with a hash of both; the highest score keeps the chunk, the next one is its second
// choice, and so on. A member that leaves gives its keys to their second choices, evenly; one that comes takes its
// share from all; no other key moves. Equal lists in any order give equal placements: names, not places, are hashed.
class Rendezvous {
 public:
  explicit Rendezvous(std::span<const std::string> members);

  size_t size() const { return member_hashes_.size(); }
  // Indices of `members`, best first. Cost: size() hashes and a sort.
  std::vector<size_t> Rank(const ChunkKey& key) const;

 private:
  uint64_t Score(size_t member, const ChunkKey& key) const;

  std::vector<uint64_t> member_hashes_;
};

}  // namespace spl::chunk
