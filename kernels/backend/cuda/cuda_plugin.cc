#include "kernels/backend/cuda/cuda_plugin.h"

#include <dlfcn.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/backend/cuda/cuda_build.h"
#include "kernels/common/plugin.h"
#include "kernels/cuda/cuda_libraries.h"

namespace spl::kernels {
namespace {

// The plug-in names its libraries by soname: loading one by its full path first satisfies that.
void PreloadLibraries() { (void)OpenCudaLibrary("libcublasLt.so." SPLICE_CUDA_MAJOR, "cublas"); }

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(const CudaOptions& options) {
  PreloadLibraries();
  const absl::StatusOr<void*> plugin = OpenPlugin("splice_cuda", "SPLICE_CUDA_PLUGIN");
  if (!plugin.ok())
    return absl::NotFoundError(absl::StrCat(
        "the CUDA backend could not be loaded (it is built when nvcc is found, and "
        "needs the CUDA ",
        SPLICE_CUDA_MAJOR, " libraries; SPLICE_CUDA_LIBS may name their folders): ", plugin.status().message()));
  const auto factory = reinterpret_cast<CudaPluginFactory>(dlsym(*plugin, kCudaPluginFactory));
  if (factory == nullptr)
    return absl::FailedPreconditionError(absl::StrCat("libsplice_cuda.so has no ", kCudaPluginFactory));
  char error[1024] = "";
  int code = 0;
  Backend* backend = factory(PluginBuild(), options, error, sizeof(error), &code);
  if (backend == nullptr) return absl::Status(static_cast<absl::StatusCode>(code), error);
  return std::unique_ptr<Backend>(backend);  // the plug-in stays loaded for the life of the process
}

}  // namespace spl::kernels
