// Selector `dense`: every resident token; the oracle for every other selector.
#pragma once

#include "services/engine/selection/token_selector.h"

namespace spl::engine {

class DenseSelector final : public TokenSelector {
 public:
  std::string_view name() const override { return "dense"; }
  bool is_exact() const override { return true; }
  uint64_t plan_key() const override { return 0; }
  kernels::HeadVisibility Select(int32_t /*layer*/, int32_t /*kv_head*/) override { return {}; }
};

}  // namespace spl::engine
