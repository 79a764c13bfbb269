// Checks that the operations over SelectingSequence share.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "absl/status/status.h"
#include "kernels/attention/attention.h"
#include "kernels/common/kv_pool.h"
#include "kernels/common/token_selection.h"

namespace spl::kernels {

// Checks shape, pool and q of an operation over a decode batch. InvalidArgument names `op` and the field.
absl::Status ValidateSelectingShape(const char* op, const AttentionShape& shape, const KvPoolView& pool,
                                    int64_t q_row_stride);

// Checks kv_len of a selecting sequence and the tables of its selecting heads. Each needs at least `compact_pages`
// compact pages and, if keys are read and nothing is listed, all of its KV pages; with a hot buffer some of these may
// be in host memory, which a host cannot check on behalf of a device.
absl::Status ValidateSelectingTables(const char* op, const SelectingSequence& sequence, const KvPoolView& pool,
                                     int32_t num_kv_heads, int64_t compact_pages, bool reads_keys = true);

// Host variants: checks the streams that select and are listed: their lists (ValidateList), enough compact pages for
// their candidates, and the pages of the candidates that the step reads. REQUIRES: the sequences pass all other checks.
absl::Status ValidateListedStreams(const char* op, std::span<const SelectingSequence> sequences, const KvPoolView& pool,
                                   int32_t num_kv_heads, const std::function<int64_t(int32_t)>& compact_pages);

// Checks compact_len, parity and first of a selecting sequence whose compact pages hold something for each position.
absl::Status ValidateCompactStep(const char* op, const SelectingSequence& sequence);

// Checks budget and recent of a selecting sequence against the lists' stride.
absl::Status ValidateListBudget(const char* op, const SelectingSequence& sequence, const TokenLists& lists);

}  // namespace spl::kernels
