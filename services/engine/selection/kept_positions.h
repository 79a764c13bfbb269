// Writes the lists of positions that the streams of a sequence may choose from, besides its fresh positions, to its
// compact pages, where decode steps read them (kernels/selection/candidates.h).
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "services/engine/cache/compact_pages.h"
#include "services/engine/model/model.h"

namespace spl::engine {

class TokenSelector;

// [layer][kv head]: positions that the head stream keeps, ascending; none for streams that do not choose. Empty:
// everything is kept.
using KeptPositions = std::vector<std::vector<int32_t>>;

// Writes the lists; skips streams without pages for a list. REQUIRES: `compact` has room for the longest list, and no
// pass uses it. Errors are those of copies to the device.
absl::Status WriteKeptPositions(const Model& model, PagePool& pool, const KeptPositions& kept,
                                const CompactPages& compact);

// Writes positions and the attention that each has received, [layer][kv head] both, to the streams with compact pages
// of their own, as HeavyHitters begins with them (kernels/selection/h2o/heavy_hitters.h). REQUIRES: `compact` has room
// for the longest list, and no pass uses it. Errors are those of copies to the device.
absl::Status WriteHeavyHitters(const Model& model, PagePool& pool, const KeptPositions& kept,
                               const std::vector<std::vector<float>>& attention, const CompactPages& compact);

// Reserves room for the step that writes position `num_tokens`, then writes the selector's lists
// (TokenSelector::lists). Does nothing for a selector without lists; `compact` may then be null. ResourceExhausted: no
// free pages.
absl::Status BeginLists(const Model& model, PagePool& pool, const TokenSelector& selector, int64_t num_tokens,
                        CompactPages* compact);

// Turns the pages beside the KV of a sequence with `num_tokens` positions into those that `selector` needs, with its
// lists. `compact` may be null: there are none yet. It is null afterwards if the selector needs none.
// ResourceExhausted: no free pages; what the pages had is lost then. REQUIRES: no pass uses them.
absl::Status RefitCompactPages(const Model& model, PagePool& pool, const TokenSelector& selector, int64_t num_tokens,
                               std::unique_ptr<CompactPages>& compact);

}  // namespace spl::engine
