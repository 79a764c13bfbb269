// Waits until a prefill engine computes nothing, for requests or in the background.
#pragma once

#include <chrono>

#include "services/engine/runtime/prefill_engine.h"
#include "tests/support/eventually.h"

namespace spl::test {

inline bool BackgroundIdle(const engine::PrefillEngine& engine) {
  return engine.load().queued_requests == 0 && engine.canonical_stats().num_queued == 0;
}

// False: not within a minute.
inline bool WaitBackgroundIdle(const engine::PrefillEngine& engine) {
  return Eventually([&] { return BackgroundIdle(engine); }, std::chrono::minutes(1));
}

}  // namespace spl::test
