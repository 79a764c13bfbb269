// The border between a program and libsplice_cuda.so. The plug-in holds everything that needs the CUDA libraries, so
// that programs start and run on machines without them.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/backend/backend.h"

namespace spl::kernels {

struct CudaOptions {
  int device = 0;
  // kF32: widens 16-bit weights and computes every product in f32, for comparisons. Otherwise bf16 weights are
  // multiplied in bf16 with f32 sums.
  GemmCompute gemm = GemmCompute::kAuto;
  // True: a row's result does not depend on the other rows of a pass (one algorithm for every number of rows, no split
  // sums).
  bool deterministic = false;
};

// Opens the plug-in (OpenPlugin; environment variable SPLICE_CUDA_PLUGIN) and makes its backend. SPLICE_CUDA_LIBS lists
// folders of CUDA libraries that the loader does not find by itself, separated by colons. NotFound: no plug-in, or a
// CUDA library that it needs is missing. FailedPrecondition: no GPU, a driver older than the toolkit, a GPU
// architecture that the build does not run on, or a plug-in of another build. Messages say what to do.
absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(const CudaOptions& options = {});

// The plug-in's export: name and signature. `build` is PluginBuild().
inline constexpr char kCudaPluginFactory[] = "splice_cuda_make_backend";
using CudaPluginFactory = Backend* (*)(const char* build, const CudaOptions& options, char* error, size_t error_size,
                                       int* code);

}  // namespace spl::kernels
