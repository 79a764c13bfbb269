#include "tools/cli/interrupt.h"

#include <cstdint>
#include <ctime>

namespace spl::cli {
namespace {

constexpr int64_t kSameMs = 300;

std::atomic<bool> was_noted{false};
std::atomic<int64_t> noted_at_ms{0};
static_assert(std::atomic<bool>::is_always_lock_free && std::atomic<int64_t>::is_always_lock_free);  // set by a handler

int64_t MonotonicMs() {
  timespec now = {};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1000 + now.tv_nsec / 1'000'000;
}

void OnSignal(int signal) {
  if (!was_noted.exchange(true)) {
    noted_at_ms.store(MonotonicMs());
  } else if (MonotonicMs() - noted_at_ms.load() > kSameMs) {
    ::signal(signal, SIG_DFL);
    ::raise(signal);
  }
}

}  // namespace

Interrupt::Interrupt(std::initializer_list<int> signals) {
  was_noted = false;
  struct sigaction action {};
  action.sa_handler = OnSignal;
  for (const int signal : signals) {
    old_.push_back({.signal = signal, .action = {}});
    ::sigaction(signal, &action, &old_.back().action);
  }
}

Interrupt::~Interrupt() {
  for (const Old& old : old_) ::sigaction(old.signal, &old.action, nullptr);
}

const std::atomic<bool>& Interrupt::noted() { return was_noted; }

}  // namespace spl::cli
