#include "services/engine/execution/observers/attention_profile.h"

#include "services/base/status.h"

namespace spl::engine {

absl::Status AttentionProfile::AfterAttention(const LayerView& view) {
  const auto rows = static_cast<size_t>(view.num_rows());
  const size_t heads = rows * static_cast<size_t>(view.model.config().num_qo_heads);
  const size_t width = rows * static_cast<size_t>(view.model.config().q_size());
  SPLICE_RETURN_IF_ERROR(AttendBeside(view, other_, 0));
  const kernels::Activations& out = view.attention.out;
  SPLICE_ASSIGN_OR_RETURN(const void* host, view.session.ReadBack(out.data, width * kernels::DTypeBytes(out.dtype)));
  std::vector<float> values(width);
  for (size_t i = 0; i < width; ++i)
    values[i] = out.dtype == kernels::DType::kF32 ? static_cast<const float*>(host)[i]
                                                  : kernels::ToFloat(static_cast<const kernels::bf16*>(host)[i]);
  SPLICE_ASSIGN_OR_RETURN(const auto lse, ReadFloats(view.session, view.attention.lse, heads));
  SPLICE_ASSIGN_OR_RETURN(const auto other,
                          ReadFloats(view.session, static_cast<const float*>(view.scratch.lse->data()), heads));
  observe_({view.layer, values, lse, other});
  return absl::OkStatus();
}

}  // namespace spl::engine
