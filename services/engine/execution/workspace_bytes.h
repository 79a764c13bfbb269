// Device memory that an executor takes beside weights and KV pages: for sizing a page pool before there is an executor.
#pragma once

#include <cstdint>

#include "services/engine/execution/executor.h"
#include "services/engine/model/model.h"

namespace spl::engine {

// Upper bound in bytes, on the device of one rank: activations of max_rows rows, logits of max_sequences rows, page
// tables of max_sequences sequences of the longest context, the workspace of the products, recorded steps. Methods that
// run whole spans (PassLayers::whole) or choose tokens allocate more when they first run; it is not counted.
uint64_t WorkspaceBytes(const ModelShard& shard, const ExecutorOptions& options);

}  // namespace spl::engine
