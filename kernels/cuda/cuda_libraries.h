// Where CUDA's libraries are when the loader does not find them by itself.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace spl::kernels {

// Opens `name` ("libnccl.so.2") for the life of the process, its symbols visible to what is opened later: from the
// loader's own paths, the folders that SPLICE_CUDA_LIBS lists, or CUDA's. Of a folder of NVIDIA's Python packages
// (nvidia/<package>/lib) the one of `package` beside it is looked into as well. NotFound says where it was looked for.
absl::StatusOr<void*> OpenCudaLibrary(const std::string& name, const std::string& package);

}  // namespace spl::kernels
