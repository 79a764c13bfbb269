// Chooses the rows that run through feed-forward by the size of their attention output
// (services/engine/recovery/ffn_rows.h).
#pragma once

#include "services/engine/execution/observers/layer_observer.h"

namespace spl::engine {

// Serves one prompt on one rank, in all of its passes, by LayerPlan::ffn.
class SparseFfn final : public LayerObserver {
 public:
  absl::StatusOr<bool> ChooseFfnRows(const LayerView& view, std::vector<int32_t>& rows) override;

  // Rows through feed-forward so far, as a share of rows times layers. 1 if there were none.
  double share() const { return rows_ == 0 ? 1 : static_cast<double>(chosen_) / static_cast<double>(rows_); }

 private:
  int64_t rows_ = 0, chosen_ = 0;
};

}  // namespace spl::engine
