#include "services/engine/execution/observers/fusion.h"

#include "services/base/status.h"
#include "services/engine/cache/grow_buffer.h"

namespace spl::engine {

void Fusion::BeginPass(std::span<const int32_t> positions) {
  rows_.clear();
  for (size_t i = 0; i < positions.size(); ++i) {
    if (ContainsPosition(positions_, positions[i])) rows_.push_back(static_cast<int32_t>(i));
  }
}

absl::Status Fusion::Run(const LayerView& view, kernels::FuseStep step) {
  const ModelConfig& c = view.model.config();
  const size_t bytes =
      kernels::FusedRowsBytes(view.pool.dtype, c.head_dim, int64_t{2} * view.max_rows * c.num_kv_heads);
  SPLICE_RETURN_IF_ERROR(GrowBuffer(view.backend(), view.session, saved_, bytes));
  return view.backend().FuseRows(view.context(), {.step = step,
                                                  .pool = view.pool,
                                                  .num_kv_heads = c.num_kv_heads,
                                                  .rows = view.rows,
                                                  .layer = view.layer,
                                                  .row_ids = rows_,
                                                  .saved = saved_->data()});
}

}  // namespace spl::engine
