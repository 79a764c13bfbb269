#include "services/engine/execution/observers/layer_observer.h"

#include "services/base/check.h"
#include "services/base/status.h"
#include "services/engine/cache/grow_buffer.h"

namespace spl::engine {

absl::Status AttendAgain(const LayerView& view, kernels::PrefillAttentionArgs args,
                         std::span<const kernels::HeadStreamView> heads) {
  SPLICE_CHECK(args.sequences.size() == 1, "rows with a view of their own are of one prompt");
  kernels::PrefillSequence sequence = args.sequences[0];
  sequence.heads = heads;
  args.sequences = {&sequence, 1};
  return view.backend().PrefillAttention(view.context(), args);
}

absl::Status AttendBeside(const LayerView& view, const kernels::HeadVisibility& visibility, int32_t num_rows) {
  const ModelConfig& c = view.model.config();
  const auto rows = static_cast<size_t>(view.max_rows);
  kernels::PrefillAttentionArgs args = view.attention;
  SPLICE_RETURN_IF_ERROR(GrowBuffer(view.backend(), view.session, view.scratch.lse,
                                    rows * static_cast<size_t>(c.num_qo_heads) * sizeof(float)));
  SPLICE_RETURN_IF_ERROR(GrowBuffer(view.backend(), view.session, view.scratch.out,
                                    rows * static_cast<size_t>(c.q_size()) * kernels::DTypeBytes(args.out.dtype)));
  args.out = {view.scratch.out->data(), args.out.dtype};
  args.lse = static_cast<float*>(view.scratch.lse->data());
  args.last_rows = num_rows;
  std::vector<kernels::HeadStreamView> heads(view.heads.begin(), view.heads.end());
  for (kernels::HeadStreamView& head : heads) head.visibility = visibility;
  return AttendAgain(view, args, heads);
}

kernels::ColumnScoresArgs ColumnArgs(const LayerView& view) {
  return {.shape = view.attention.shape,
          .pool = view.pool,
          .q = view.q,
          .q_row_stride = view.q_row_stride,
          .lse = view.attention.lse,
          .rows = view.attention.sequences[view.sequence],
          .sequence = view.sequence,
          .layer = view.layer};
}

absl::StatusOr<std::vector<float>> ReadFloats(kernels::Session& session, const float* device, size_t count) {
  SPLICE_ASSIGN_OR_RETURN(const void* host, session.ReadBack(device, sizeof(float) * count));
  return std::vector<float>(static_cast<const float*>(host), static_cast<const float*>(host) + count);
}

}  // namespace spl::engine
