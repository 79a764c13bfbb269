// A decode step that may share a pass with slices of prompts (chunked prefill) instead of running alone.
#pragma once

#include <span>
#include <vector>

#include "absl/status/status.h"
#include "services/engine/execution/decode_row.h"
#include "services/engine/runtime/sampler.h"

namespace spl::engine {

// Borrowed by the pass that carries it, from Board to Land (step_turns.h). The decode engine's thread waits meanwhile.
struct StepOffer {
  std::span<const DecodeRow> rows;     // each CanRide
  std::span<Sampler* const> samplers;  // [rows.size()]; null: no token is sampled for the row
  // Results; set before Land.
  absl::Status status;
  std::vector<SampledToken> sampled;  // [rows.size()], if status is OK
};

}  // namespace spl::engine
