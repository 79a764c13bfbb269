// A decode step that may share a pass with slices of prompts instead of running alone.
#pragma once

#include <span>
#include <vector>

#include "absl/status/status.h"
#include "services/engine/execution/decode_row.h"
#include "services/engine/runtime/sampler.h"

namespace spl::engine {

// Borrowed by who takes it along, from Board to Land (step_turns.h); the decode engine's thread waits meanwhile.
struct StepOffer {
  std::span<const DecodeRow> rows;     // each CanRide
  std::span<Sampler* const> samplers;  // [rows.size()]; null: nothing is drawn of the row
  // Filled in before it lands.
  absl::Status status;
  std::vector<SampledToken> sampled;  // [rows.size()], where status is OK
};

}  // namespace spl::engine
