#include "services/engine/execution/observers/sparse_ffn.h"

#include <algorithm>

#include "services/base/status.h"
#include "services/engine/cache/grow_buffer.h"
#include "services/engine/recovery/ffn_rows.h"

namespace spl::engine {

// With one rank by what attention puts out; with several, whose heads are apart, by what it adds to the residual
// stream, which every rank has.
absl::StatusOr<bool> SparseFfn::ChooseFfnRows(const LayerView& view, std::vector<int32_t>& rows) {
  const FfnPlan& ffn = view.plan->ffn;
  const int32_t begin = view.rows.row_begin, num_rows = view.num_rows();
  rows_ += num_rows;
  if (ffn.dense()) {
    chosen_ += num_rows;
    return false;
  }
  const ModelConfig& c = view.model.config();
  const bool whole = c.num_kv_heads == view.whole.num_kv_heads;
  const int64_t width = whole ? c.q_size() : c.hidden_size;
  const kernels::ConstActivations all =
      whole ? kernels::ConstActivations(view.attention.out) : kernels::ConstActivations(view.delta);
  const auto* x = static_cast<const std::byte*>(all.data) + begin * width * int64_t(kernels::DTypeBytes(all.dtype));
  SPLICE_RETURN_IF_ERROR(GrowBuffer(view.backend(), view.session, view.scratch.norms, sizeof(float) * view.max_rows));
  auto* norms = static_cast<float*>(view.scratch.norms->data());
  SPLICE_RETURN_IF_ERROR(view.backend().RowNorms(
      view.context(), {.x = {x, all.dtype}, .num_rows = num_rows, .width = width, .out = norms}));
  SPLICE_ASSIGN_OR_RETURN(const std::vector<float> mass,
                          ReadFloats(view.session, norms, static_cast<size_t>(num_rows)));
  const auto& positions = view.rows.positions;
  const auto kept =
      static_cast<int32_t>(std::lower_bound(positions.begin(), positions.end(), ffn.keep_from) - positions.begin());
  const size_t chosen_before = rows.size();
  for (const int32_t row : RowsByMass(mass, ffn.mass)) {
    if (row < kept) rows.push_back(begin + row);
  }
  for (int32_t row = kept; row < num_rows; ++row) rows.push_back(begin + row);
  chosen_ += static_cast<int64_t>(rows.size() - chosen_before);
  return true;
}

}  // namespace spl::engine
