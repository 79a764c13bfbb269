// How many rows of prompts the next pass has, on a device that also decodes.
#pragma once

#include <chrono>
#include <cstdint>

namespace spl::engine {

// Queued prompts are computed within about this time, where the ITL target allows it.
inline constexpr std::chrono::seconds kTimeToDrain{2};
// Products of a device compute so many rows at a time: a pass takes no longer until it has one more.
inline constexpr int32_t kRowTile = 128;
// Up to so many rows, those of prompts and of a step together, a pass is bound by the reading of weights.
inline constexpr int32_t kWeightBoundRows = 256;
// A row costs a GPU less and less up to so many.
inline constexpr int32_t kRowsOfFullSpeed = 512;

// The state of prompts and of the decode step before a pass of plain slices.
struct PassDemand {
  int32_t most = 0;    // rows that fit into a pass
  int32_t riders = 0;  // rows of the decode step that would share it; 0: none does
  // Time that the pass may take: until the next decode step is due, or the ITL target where one shares the pass. max():
  // any.
  std::chrono::nanoseconds time = std::chrono::nanoseconds::max();
  // Rows of a pass that a step shares, riders included. Fewer cost about as much.
  int32_t least = kWeightBoundRows;
  double rows_per_s = 0;      // speed of passes
  double rows_per_token = 0;  // rows of prompts for each generated token, over the last seconds; 0: not known
  int64_t waiting = 0;        // rows of all prompts that are not computed
  // Length of passes that a step shared, smoothed; 0: not known.
  std::chrono::nanoseconds shared_pass_time{0};
};

// Rows for slices, at least 1, at most most - riders (1 if that is less).
//
// Without riders: whole pages that take no longer than `time`, and no fewer than make a pass worth its cost.
// With riders: as many as keep prompts and running sequences in balance (rows_per_token), and more while prompts queue
// (kTimeToDrain), as far as `time` allows; rounded so that they and the riders fill tiles. A step that carries too few
// rows leaves prompts to passes that read the weights for them; one that carries too many leaves later steps alone.
int32_t RowsOfPass(const PassDemand& demand);

}  // namespace spl::engine
