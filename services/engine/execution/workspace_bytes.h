// Computes the device memory that an executor needs beside weights and KV pages, to size a page pool in advance.
#pragma once

#include <cstdint>

#include "services/engine/execution/executor.h"
#include "services/engine/model/model.h"

namespace spl::engine {

// Upper bound in bytes, on the device of rank 0. Counts activations of max_rows rows, logits of max_sequences rows,
// page tables of max_sequences sequences of the longest context, the workspace of matrix products, recorded steps, and
// on a GPU the pages of one longest context in bf16, into which prompts widen pages of kE4M3. Does not count what
// methods that run whole spans (PassLayers::whole) or choose tokens allocate when they first run.
uint64_t WorkspaceBytes(const Model& model, const ExecutorOptions& options);

}  // namespace spl::engine
