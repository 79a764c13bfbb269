#include "services/chunk/rendezvous.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace spl::chunk {
namespace {

// The finalizer of SplitMix64: every input bit reaches every output bit.
uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

Rendezvous::Rendezvous(std::span<const std::string> members) {
  for (const std::string& name : members) {
    uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
    for (const char c : name) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
    member_hashes_.push_back(Mix(hash));
  }
}

uint64_t Rendezvous::Score(size_t member, const ChunkKey& key) const {
  uint64_t word;  // keys are SHA-256: any eight bytes are random; not the first, which the maps use
  std::memcpy(&word, key.bytes.data() + 16, sizeof(word));
  return Mix(word ^ member_hashes_[member]);
}

std::vector<size_t> Rendezvous::Rank(const ChunkKey& key) const {
  std::vector<uint64_t> scores(size());
  for (size_t i = 0; i < size(); ++i) scores[i] = Score(i, key);
  std::vector<size_t> ranked(size());
  std::iota(ranked.begin(), ranked.end(), size_t{0});
  std::sort(ranked.begin(), ranked.end(), [&](size_t a, size_t b) { return scores[a] > scores[b]; });
  return ranked;
}

}  // namespace spl::chunk
