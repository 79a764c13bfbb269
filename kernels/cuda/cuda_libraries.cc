#include "kernels/cuda/cuda_libraries.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace spl::kernels {
namespace {

std::vector<std::string> LibraryFolders(const std::string& package) {
  std::vector<std::string> folders;
  if (const char* listed = std::getenv("SPLICE_CUDA_LIBS")) {
    const std::string text = listed;
    for (size_t begin = 0; begin <= text.size();) {
      const size_t end = std::min(text.find(':', begin), text.size());
      if (end > begin) {
        folders.push_back(text.substr(begin, end - begin));
        folders.push_back(folders.back() + "/../../" + package + "/lib");
      }
      begin = end + 1;
    }
  }
  for (const char* folder : {"/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib"})
    folders.emplace_back(folder);
  return folders;
}

}  // namespace

absl::StatusOr<void*> OpenCudaLibrary(const std::string& name, const std::string& package) {
  if (void* handle = dlopen(name.c_str(), RTLD_LAZY | RTLD_GLOBAL)) return handle;
  const std::vector<std::string> folders = LibraryFolders(package);
  for (const std::string& folder : folders) {
    if (void* handle = dlopen((folder + "/" + name).c_str(), RTLD_LAZY | RTLD_GLOBAL)) return handle;
  }
  return absl::NotFoundError(absl::StrCat(name, " is neither in the loader's paths nor in ",
                                          absl::StrJoin(folders, ", "), "; SPLICE_CUDA_LIBS may name its folder"));
}

}  // namespace spl::kernels
