// Given to every operation beside its arguments.
#pragma once

#include "kernels/common/cpu_features.h"
#include "kernels/common/thread_pool.h"

namespace spl::kernels {

class Session;

// Borrowed. One context is used by one thread at a time.
struct KernelContext {
  ThreadPool* pool = nullptr;      // CPU variants
  CpuIsa isa = CpuIsa::kPortable;  // the widest instruction set the CPU variants may use
  Session* session = nullptr;      // CUDA variants: stream, staged batch, scratch (session.h)
};

}  // namespace spl::kernels
