// For what a test can only look at: state of another thread or process that nobody announces.
#pragma once

#include <chrono>
#include <functional>
#include <thread>

namespace spl::test {

// Looks again and again until `done` holds; false when it does not within `limit`. What happens in which order must not
// depend on it.
inline bool Eventually(const std::function<bool()>& done,
                       std::chrono::milliseconds limit = std::chrono::milliseconds(20'000)) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (!done()) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

}  // namespace spl::test
