// Head classes that tests begin with.
#pragma once

#include <vector>

#include "services/engine/model/head_classes.h"

namespace spl::test {

// Every head global: nothing is left out.
inline engine::HeadClassMap AllGlobal(int32_t num_layers, int32_t num_kv_heads) {
  return {num_layers, num_kv_heads, std::vector<engine::HeadClass>(static_cast<size_t>(num_layers * num_kv_heads))};
}

}  // namespace spl::test
