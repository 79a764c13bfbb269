// The one row that a sequence has in a decode step.
#pragma once

#include <cstdint>

#include "services/engine/cache/compact_pages.h"
#include "services/engine/cache/sequence_kv.h"
#include "services/engine/selection/token_selector.h"

namespace spl::engine {

struct DecodeRow {
  int32_t token = 0;
  const SequenceKv* kv = nullptr;
  TokenSelector* selector = nullptr;
  // Room for position kv->num_tokens(); null where the selector needs none (MakeCompactPages).
  const CompactPages* compact = nullptr;
  // Positions that the sequence has once the step has written this one.
  int64_t kv_len() const { return kv->num_tokens() + 1; }
};

}  // namespace spl::engine
