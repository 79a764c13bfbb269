// Shared by the two host variants: a packed weight per expert, and checks that read the routing.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "kernels/moe/grouped_linear.h"

namespace spl::kernels {

class HostGroupedWeight final : public GroupedWeight {
 public:
  // `pack` makes one expert's weight: absl::StatusOr<std::unique_ptr<LinearWeight>>(const WeightView&).
  template <typename Pack>
  static absl::StatusOr<std::unique_ptr<GroupedWeight>> Make(const GroupedWeightView& view, const Pack& pack) {
    if (absl::Status s = ValidateGroupedWeight(view); !s.ok()) return s;
    auto weight = std::unique_ptr<HostGroupedWeight>(new HostGroupedWeight(view));
    for (int32_t e = 0; e < view.num_experts; ++e) {
      absl::StatusOr<std::unique_ptr<LinearWeight>> packed = pack(view.expert(e));
      if (!packed.ok()) return packed.status();
      weight->experts_.push_back(std::move(packed).value());
    }
    return std::unique_ptr<GroupedWeight>(std::move(weight));
  }

  const LinearWeight& expert(int32_t e) const { return *experts_[static_cast<size_t>(e)]; }

 private:
  explicit HostGroupedWeight(const GroupedWeightView& view) : GroupedWeight(view) {}

  std::vector<std::unique_ptr<LinearWeight>> experts_;
};

// ValidateGroupedLinear, and: offsets ascend from 0 to num_places, rows lie in [0, num_x_rows).
absl::Status ValidateHostGroupedLinear(const GroupedLinearArgs& args);
// ValidateCombineExperts, and: places lie in [0, num_rows * top_k).
absl::Status ValidateHostCombineExperts(const CombineExpertsArgs& args);

}  // namespace spl::kernels
