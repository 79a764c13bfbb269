#include "services/engine/runtime/pass_rows.h"

#include <algorithm>

#include "kernels/common/kv_pool.h"

namespace spl::engine {
namespace {

// A pass of fewer rows costs little less, so that a step that is due waits for so many.
constexpr int32_t kLeastRows = 128;

double Seconds(std::chrono::nanoseconds time) { return std::chrono::duration<double>(time).count(); }

// Rows of each shared pass that compute what waits within kTimeToDrain.
double RowsToDrain(const PassDemand& demand) {
  return static_cast<double>(demand.waiting) * Seconds(demand.shared_pass_time) / Seconds(kTimeToDrain);
}

}  // namespace

int32_t RowsOfPass(const PassDemand& demand) {
  const int32_t room = std::max(1, demand.most - demand.riders);
  if (demand.time == std::chrono::nanoseconds::max()) return room;
  const double in_time = std::min<double>(Seconds(demand.time) * demand.rows_per_s, demand.most);
  if (demand.riders == 0) {
    const int32_t whole = static_cast<int32_t>(in_time) / kernels::kPageTokens * kernels::kPageTokens;
    return std::min(std::max(whole, kLeastRows), room);
  }
  double rows = in_time;
  if (demand.rows_per_token > 0)
    rows = std::min(rows, std::max(demand.rows_per_token * demand.riders, RowsToDrain(demand)));
  const int32_t total = (static_cast<int32_t>(rows) + demand.riders + kRowTile / 2) / kRowTile * kRowTile;
  // A step that fills its tiles by itself still takes a tile of prompts along.
  const int32_t least = std::max(demand.least, (demand.riders / kRowTile + 1) * kRowTile);
  return std::min(std::max(total, least) - demand.riders, room);
}

}  // namespace spl::engine
