// Invariants of our own code. A failed check is a bug: the process says where and aborts. Never used on input.
#pragma once

#include <cstdio>
#include <cstdlib>

#define SPLICE_CHECK(condition, message)                                                              \
  do {                                                                                                \
    if (!(condition)) [[unlikely]] {                                                                  \
      std::fprintf(stderr, "%s:%d: check failed: %s: %s\n", __FILE__, __LINE__, #condition, message); \
      std::abort();                                                                                   \
    }                                                                                                 \
  } while (false)
