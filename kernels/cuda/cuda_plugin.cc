#include "kernels/cuda/cuda_plugin.h"

#include <dlfcn.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/common/plugin.h"
#include "kernels/cuda/cuda_build.h"

namespace spl::kernels {
namespace {

// Folders that may hold cuBLASLt and NCCL when the loader's own paths do not: CUDA's, and SPLICE_CUDA_LIBS.
std::vector<std::string> LibraryFolders() {
  std::vector<std::string> folders;
  if (const char* listed = std::getenv("SPLICE_CUDA_LIBS")) {
    const std::string text = listed;
    for (size_t begin = 0; begin <= text.size();) {
      const size_t end = std::min(text.find(':', begin), text.size());
      if (end > begin) folders.push_back(text.substr(begin, end - begin));
      begin = end + 1;
    }
  }
  for (const char* folder : {"/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib"})
    folders.emplace_back(folder);
  return folders;
}

// The plug-in names its libraries by soname: loading one by its full path first satisfies that.
void PreloadLibraries() {
  for (const char* name : {"libcublasLt.so." SPLICE_CUDA_MAJOR}) {
    if (dlopen(name, RTLD_LAZY | RTLD_GLOBAL) != nullptr) continue;
    for (const std::string& folder : LibraryFolders()) {
      if (dlopen((folder + "/" + name).c_str(), RTLD_LAZY | RTLD_GLOBAL) != nullptr) break;
    }
  }
}

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
