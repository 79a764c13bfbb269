// Decides which sequences of a decode step choose tokens and which attend to everything, by the costs of both
// (step_costs.h; docs/decisions/0016-decode-auto.md). Pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "services/engine/selection/step_costs.h"

namespace spl::engine {

// A continuation whose method may do both.
struct StepCandidate {
  int64_t positions = 0;   // that its next step has
  int64_t steps_left = 0;  // at most, with the next one
  bool may_choose = true;  // its context is long enough for its budget
  bool chooses = false;    // in its last step
  int64_t rested = -1;     // steps since it stopped choosing; -1: it never did
};

struct StepModeLimits {
  // Positions of sequences that begin to choose in the same step together: their keys are packed in it. One always may.
  int64_t gathered_tokens = int64_t{1} << 18;
};

// Steps that a sequence attends to everything before it may begin to choose once more: packing its keys costs time.
inline constexpr int64_t kRestSteps = 64;
// Least ratio of the time that is saved to the time that beginning costs. Half of the steps that are left may never
// come: stop tokens end most answers early.
inline constexpr double kPayBack = 2;
// Steps for which a decision is expected to hold: batches change.
inline constexpr int64_t kHorizonSteps = 256;
// Share of a dense step that must be saved before sequences begin to choose: the accuracy of the table. Those that
// choose go on until nothing is saved.
inline constexpr double kLeastSaved = 0.02;

// Sets choose[i] for candidate i. Sequences that choose go on while a step with them costs no more than without,
// longest first; others join them if what they save until they end pays for packing their keys. Same input, same
// output. REQUIRES: choose.size() == candidates.size(). Costs O(n log n).
void DecideModes(const StepCosts& costs, std::span<const StepCandidate> candidates, const StepModeLimits& limits,
                 std::vector<bool>& choose);

}  // namespace spl::engine
