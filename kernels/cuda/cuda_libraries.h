// Finds CUDA libraries that the loader does not find by itself.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace spl::kernels {

// Opens `name` ("libnccl.so.2") for the life of the process, its symbols visible to libraries opened later. Searches
// the loader's own paths, the folders that SPLICE_CUDA_LIBS lists, and CUDA's folders. For a folder of NVIDIA's Python
// packages (nvidia/<package>/lib) it also searches the folder of `package` beside it. NotFound says where it looked.
absl::StatusOr<void*> OpenCudaLibrary(const std::string& name, const std::string& package);

}  // namespace spl::kernels
