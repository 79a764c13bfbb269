// Pages that a sequence of a decode engine takes when it starts.
#pragma once

#include <cstdint>
#include <vector>

#include "services/engine/cache/page_pool.h"
#include "services/engine/model/model.h"
#include "services/engine/runtime/decode_sequence.h"

namespace spl::engine {

// [num_ranks]: pages that the continuations take at most beside those that the sequence has: copies of its unfinished
// page, and pages beside the KV. REQUIRES: it has not started.
std::vector<int64_t> PagesToStart(const DecodeSequence& sequence, const Model& model, const PagePool& pool);

}  // namespace spl::engine
