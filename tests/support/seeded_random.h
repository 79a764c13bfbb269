// Random numbers of a property test: a new seed every time, printed, so that a failure can be run again.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <random>

namespace spl::test {

inline std::mt19937 SeededRandom(const char* test) {
  const char* fixed = std::getenv("SPLICE_TEST_SEED");
  const auto seed = fixed != nullptr ? static_cast<unsigned>(std::strtoul(fixed, nullptr, 10)) : std::random_device{}();
  std::printf("%s: SPLICE_TEST_SEED=%u\n", test, seed);
  std::fflush(stdout);  // a test that is killed for its time has said it then
  return std::mt19937(seed);
}

}  // namespace spl::test
