#include <dlfcn.h>

#include "kernels/common/plugin.h"
#include "kernels/gemm/onednn.h"

namespace spl::kernels::cpu {
namespace {

OneDnnPluginPack Plugin() {
  static const OneDnnPluginPack pack = [] {
    const absl::StatusOr<void*> plugin = OpenPlugin("splice_onednn", "SPLICE_ONEDNN_PLUGIN");
    return plugin.ok() ? reinterpret_cast<OneDnnPluginPack>(dlsym(*plugin, kOneDnnPluginPack)) : nullptr;
  }();
  return pack;
}

}  // namespace

bool HaveOneDnn() { return Plugin() != nullptr; }

absl::StatusOr<std::unique_ptr<OneDnnMatrix>> OneDnnMatrix::Pack(const WeightView& weight) {
  if (Plugin() == nullptr) return absl::UnimplementedError("libsplice_onednn.so is not there");
  absl::Status error;
  std::unique_ptr<OneDnnMatrix> matrix(Plugin()(PluginBuild(), weight, error));
  if (!error.ok()) return error;
  return matrix;
}

}  // namespace spl::kernels::cpu
