// CHECK_CUDA ends the program on an error: for benchmarks, which have no caller to return it to.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>

#define CHECK_CUDA(expr)                                                                                    \
  do {                                                                                                      \
    const cudaError_t check_cuda_e = (expr);                                                                \
    if (check_cuda_e != cudaSuccess) {                                                                      \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #expr, cudaGetErrorString(check_cuda_e)); \
      std::exit(1);                                                                                         \
    }                                                                                                       \
  } while (false)
