// Whose conversation a session id names. The KV itself is the prefill workers' (engine/cache/session_table.h); where a
// turn runs is decided by placement, as for every prompt that begins like an earlier one.
#pragma once

#include <chrono>
#include <cstdint>
#include <list>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "absl/status/status.h"
#include "services/chunk/chunk.h"

namespace spl::router {

// An id belongs to the namespace that first used it, until it was not used for kTtl or kMaxSessions others were.
// Thread-safe.
class SessionOwners {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::hours kTtl{1};
  static constexpr size_t kMaxSessions = 65536;

  // No id: OK. PermissionDenied: another namespace's, with the parameter's name.
  absl::Status Claim(std::string_view id, const chunk::Digest& namespace_key, Clock::time_point now);
  size_t size() const;

 private:
  struct Owned {
    std::string id;
    chunk::Digest namespace_key{};
    Clock::time_point used;
  };

  mutable std::mutex mutex_;                                                // guards the two below
  std::list<Owned> owned_;                                                  // most recently used first
  std::unordered_map<std::string_view, std::list<Owned>::iterator> by_id_;  // keys are the entries' own strings
};

}  // namespace spl::router
