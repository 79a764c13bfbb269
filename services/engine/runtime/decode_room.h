// Computes the pages that a sequence of a decode engine takes when it starts.
#pragma once

#include <cstdint>
#include <vector>

#include "services/engine/cache/page_pool.h"
#include "services/engine/model/model.h"
#include "services/engine/runtime/decode_sequence.h"

namespace spl::engine {

// [num_ranks]: upper bound of the pages that the continuations take besides those that the sequence has: copies of its
// last, partly filled page, and pages beside the KV. REQUIRES: it has not started.
std::vector<int64_t> PagesToStart(const DecodeSequence& sequence, const Model& model, const PagePool& pool);

}  // namespace spl::engine
