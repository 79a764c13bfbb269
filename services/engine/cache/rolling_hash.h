// Hashes every window of a fixed number of tokens, in constant time per step (Rabin and Karp).
#pragma once

#include <cstdint>
#include <span>

namespace spl::engine {

// `salt` separates namespaces: a party that does not know it cannot provoke collisions. After a hit the caller must
// still compare tokens.
class RollingHash {
 public:
  // REQUIRES: window > 0.
  RollingHash(int32_t window, uint64_t salt) : window_(window), salt_(salt) {
    for (int32_t i = 1; i < window; ++i) oldest_power_ *= kBase;
  }

  // Hash of tokens[at, at + window). Cost: constant if `at` is one more than in the last call, otherwise `window`
  // steps.
  uint64_t At(std::span<const int32_t> tokens, int32_t at) {
    if (started_ && at == at_ + 1) {
      hash_ = (hash_ - Mix(tokens[at_]) * oldest_power_) * kBase + Mix(tokens[at_ + window_]);
    } else {
      hash_ = 0;
      for (int32_t i = 0; i < window_; ++i) hash_ = hash_ * kBase + Mix(tokens[at + i]);
    }
    started_ = true;
    at_ = at;
    return hash_;
  }

 private:
  static constexpr uint64_t kBase = 0x9fb21c651e98df25ull;

  uint64_t Mix(int32_t token) const {  // splitmix64
    uint64_t x = (static_cast<uint64_t>(static_cast<uint32_t>(token)) ^ salt_) + 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
  }

  const int32_t window_;
  const uint64_t salt_;
  uint64_t oldest_power_ = 1;
  uint64_t hash_ = 0;
  int32_t at_ = 0;
  bool started_ = false;
};

}  // namespace spl::engine
