#include "kernels/backend/backend.h"

#include <utility>
#include <vector>

namespace spl::kernels {

absl::StatusOr<std::unique_ptr<LinearWeight>> Backend::AdoptLinear(std::unique_ptr<Buffer> data,
                                                                   WeightView weight) const {
  weight.data = data->data();
  if (host_memory()) return PackLinear(weight);
  std::vector<std::byte> host(data->size());
  if (absl::Status s = Copy(CopyKind::kDownload, host.data(), data->data(), host.size()); !s.ok()) return s;
  data.reset();
  weight.data = host.data();
  return PackLinear(weight);
}

}  // namespace spl::kernels
