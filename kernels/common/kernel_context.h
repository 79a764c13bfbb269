// What every operation is given beside its arguments.
#pragma once

#include "kernels/common/cpu_features.h"
#include "kernels/common/thread_pool.h"

namespace spl::kernels {

// Borrowed. One context is used by one thread at a time.
struct KernelContext {
  ThreadPool* pool = nullptr;      // CPU variants
  void* stream = nullptr;          // CUDA variants
  CpuIsa isa = CpuIsa::kPortable;  // the widest instruction set the CPU variants may use
};

}  // namespace spl::kernels
