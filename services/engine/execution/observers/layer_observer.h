// The seam between the executor, which knows the model, and methods that look at the rows of a prompt on their way
// through it, or change them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/attention/attention.h"
#include "kernels/backend/backend.h"
#include "kernels/backend/session.h"
#include "kernels/rope/rope.h"
#include "kernels/selection/sparsex/column_scores.h"
#include "services/engine/model/model.h"
#include "services/engine/recovery/recovery_policy.h"

namespace spl::engine {

// Device memory that the observers of one executor share, grown on demand (GrowBuffer). Its contents do not outlive the
// call that wrote them.
struct ObserverScratch {
  std::unique_ptr<kernels::Buffer> out;    // as attention's output
  std::unique_ptr<kernels::Buffer> lse;    // f32 [rows, num_qo_heads]
  std::unique_ptr<kernels::Buffer> norms;  // f32 [rows]
  std::unique_ptr<kernels::Buffer> q;      // rows of queries
};

// One layer of a pass, on one rank, as the observer of one slice sees it. Valid during the call.
struct LayerView {
  const ModelConfig& whole;  // of the model; `model` is the rank's part
  const ModelShard& model;
  kernels::Session& session;
  ObserverScratch& scratch;
  kernels::KvPoolView pool;
  int32_t max_rows = 0;  // of any pass
  int32_t layer = 0;
  int32_t sequence = 0;         // number of the slice in the pass
  kernels::RopeSequence rows;   // the slice's rows of the pass, their positions and page tables
  float* qkv = nullptr;         // f32 [num_rows, (num_qo_heads + 2 num_kv_heads) head_dim], until K and V are written
  kernels::ConstActivations q;  // [num_rows], row stride q_row_stride: rotated queries, once K and V are written
  int64_t q_row_stride = 0;     // elements
  const LayerPlan* plan = nullptr;           // of the slice; from AfterAttention on, as the rest
  kernels::PrefillAttentionArgs attention;   // as it ran, for all slices; `lse` is null where nobody wants it
  std::span<kernels::HeadStreamView> heads;  // what the slice's heads see; [num_kv_heads]
  const float* delta = nullptr;  // f32 [num_rows, hidden_size]: behind attention, of all ranks; for ChooseFfnRows

  const kernels::Backend& backend() const { return model.backend(); }
  const kernels::KernelContext& context() const { return session.context(); }
  int32_t num_rows() const { return rows.row_end - rows.row_begin; }
};

// Belongs to one slice on one rank and is called by that rank's thread: BeginPass in front of a pass, then the others
// layer by layer in the order below. An error ends the pass.
class LayerObserver {
 public:
  virtual ~LayerObserver() = default;
  virtual void BeginPass(std::span<const int32_t> /*positions*/) {}
  // The pages are as they were in front of the layer.
  virtual absl::Status BeforeKv(const LayerView& /*view*/) { return absl::OkStatus(); }
  // K and V of the rows are written.
  virtual absl::Status AfterKv(const LayerView& /*view*/) { return absl::OkStatus(); }
  // Whether AfterAttention reads the rows' log-sum-exps.
  virtual bool wants_lse(int32_t /*layer*/, const LayerPlan& /*plan*/) const { return false; }
  virtual absl::Status AfterAttention(const LayerView& /*view*/) { return absl::OkStatus(); }
  // Appends the rows of the pass that run through feed-forward, ascending. False: all of the slice do, and none was
  // appended.
  virtual absl::StatusOr<bool> ChooseFfnRows(const LayerView& /*view*/, std::vector<int32_t>& /*rows*/) {
    return false;
  }
};

using ObserverList = std::vector<LayerObserver*>;

// Runs the layer's attention again, with other heads or other `args` than it ran with. REQUIRES: a pass of one slice.
absl::Status AttendAgain(const LayerView& view, kernels::PrefillAttentionArgs args,
                         std::span<const kernels::HeadStreamView> heads);
// The same with one visibility for all heads, of the last `num_rows` rows (0: all), beside the results of the pass:
// only scratch.lse is of use.
absl::Status AttendBeside(const LayerView& view, const kernels::HeadVisibility& visibility, int32_t num_rows);

// The slice's attention as a sum over rows sees it; without probes, columns, heads and scores.
kernels::ColumnScoresArgs ColumnArgs(const LayerView& view);

// f32 [count] from device memory.
absl::StatusOr<std::vector<float>> ReadFloats(kernels::Session& session, const float* device, size_t count);

}  // namespace spl::engine
