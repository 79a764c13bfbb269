#include "kernels/common/plugin.h"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <vector>

#include "absl/strings/str_cat.h"

namespace spl::kernels {

absl::StatusOr<void*> OpenPlugin(const std::string& name, const char* variable) {
  std::vector<std::string> paths;
  if (const char* path = std::getenv(variable)) {
    paths.emplace_back(path);
  } else {
    std::error_code error;
    const auto program = std::filesystem::read_symlink("/proc/self/exe", error);
    const auto folder = error ? std::filesystem::path(".") : program.parent_path();
    for (const char* relative : {".", "../lib", "../bin"})
      paths.push_back((folder / relative / ("lib" + name + ".so")).lexically_normal().string());
  }
  std::string tried;
  for (const std::string& path : paths) {
    if (!std::filesystem::exists(path)) {
      absl::StrAppend(&tried, tried.empty() ? "" : ", ", path, " (not there)");
      continue;
    }
    if (void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return handle;
    absl::StrAppend(&tried, tried.empty() ? "" : ", ", dlerror());
  }
  return absl::NotFoundError(absl::StrCat("lib", name, ".so: ", tried, "; ", variable, " may name the file"));
}

const char* PluginBuild() { return "splice " SPLICE_VERSION " abi 1 " __VERSION__; }

}  // namespace spl::kernels
