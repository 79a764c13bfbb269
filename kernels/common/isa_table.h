// Finds an operation's leaf code, which is compiled once per instruction set, at run time.
#pragma once

#include "kernels/common/cpu_features.h"

// Declares `const Table name` in the namespace of each instruction set, and Table TableFunction(isa), which never
// returns more than the machine can run.
#if defined(__x86_64__)
#define SPLICE_DECLARE_ISA_TABLES(Table, name)                         \
  namespace portable {                                                 \
  extern const Table name;                                             \
  }                                                                    \
  namespace avx2 {                                                     \
  extern const Table name;                                             \
  }                                                                    \
  namespace avx512 {                                                   \
  extern const Table name;                                             \
  }                                                                    \
  [[maybe_unused]] static inline const Table& Table##For(CpuIsa isa) { \
    const CpuIsa best = DetectCpuIsa();                                \
    switch (isa < best ? isa : best) {                                 \
      case CpuIsa::kAmx:                                               \
      case CpuIsa::kAvx512Bf16:                                        \
      case CpuIsa::kAvx512:                                            \
        return avx512::name;                                           \
      case CpuIsa::kAvx2:                                              \
        return avx2::name;                                             \
      case CpuIsa::kPortable:                                          \
        break;                                                         \
    }                                                                  \
    return portable::name;                                             \
  }
#else
#define SPLICE_DECLARE_ISA_TABLES(Table, name) \
  namespace portable {                         \
  extern const Table name;                     \
  }                                            \
  [[maybe_unused]] static inline const Table& Table##For(CpuIsa) { return portable::name; }
#endif
