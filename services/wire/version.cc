#include "services/wire/version.h"

#include <algorithm>

#include "services/base/status.h"

namespace spl::wire {

v1::WireVersions OwnVersions() {
  v1::WireVersions own;
  own.set_min(kVersionMin);
  own.set_max(kVersionMax);
  return own;
}

absl::Status CheckVersions(const v1::WireVersions& other, const std::string& who, const std::string& we,
                           const v1::WireVersions& own) {
  const uint32_t min = std::max(other.min(), 1u), max = std::max(other.max(), min);
  if (std::max(min, own.min()) <= std::min(max, own.max())) return absl::OkStatus();
  return Errorf(absl::StatusCode::kFailedPrecondition,
                "{} speaks wire versions {} to {}, {} {} to {}: upgrade the older one (one release at a time)", who,
                min, max, we, own.min(), own.max());
}

}  // namespace spl::wire
