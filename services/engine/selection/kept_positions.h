// Lists of positions that the streams of a sequence may choose from, beside what is fresh, where steps find them: in
// its compact pages (kernels/selection/candidates.h).
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "services/engine/cache/compact_pages.h"
#include "services/engine/model/model.h"

namespace spl::engine {

class TokenSelector;

// For each head stream [layer][kv head] the positions that are kept, ascending; of streams that do not choose none.
// Empty: everything is kept.
using KeptPositions = std::vector<std::vector<int32_t>>;

// Writes them. Streams without pages for a list are left out. REQUIRES: `compact` has room for the longest list, and no
// pass uses it. Errors are those of copies.
absl::Status WriteKeptPositions(const Model& model, PagePool& pool, const KeptPositions& kept,
                                const CompactPages& compact);

// The same for a selector that knows its lists (TokenSelector::lists), behind reserving room for the step that writes
// position `num_tokens`; nothing for others. `compact` may be null for those. ResourceExhausted: no pages.
absl::Status BeginLists(const Model& model, PagePool& pool, const TokenSelector& selector, int64_t num_tokens,
                        CompactPages* compact);

}  // namespace spl::engine
