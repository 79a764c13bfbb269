// Connects the executor, which knows the model, to methods that read or change the rows of a prompt between the steps
// of a layer.
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

// Device memory that the observers of one executor share, grown on demand (GrowBuffer). Its contents are valid only in
// the call that wrote them.
struct ObserverScratch {
  std::unique_ptr<kernels::Buffer> out;    // shaped as the output of attention
  std::unique_ptr<kernels::Buffer> lse;    // f32 [rows, num_qo_heads]
  std::unique_ptr<kernels::Buffer> norms;  // f32 [rows]
  std::unique_ptr<kernels::Buffer> q;      // rows of queries
};

// One layer of a pass, on one rank, for the observer of one slice. Valid during the call.
struct LayerView {
  const ModelConfig& whole;  // the whole model; `model` is the rank's part
  const ModelShard& model;
  kernels::Session& session;
  ObserverScratch& scratch;
  kernels::KvPoolView pool;
  int32_t max_rows = 0;  // in any pass
  int32_t layer = 0;
  int32_t sequence = 0;         // index of the slice in the pass
  kernels::RopeSequence rows;   // the slice's rows of the pass, their positions and page tables
  float* qkv = nullptr;         // f32 [num_rows, (num_qo_heads + 2 num_kv_heads) head_dim], until K and V are written
  kernels::ConstActivations q;  // [num_rows], row stride q_row_stride: rotated queries, once K and V are written
  int64_t q_row_stride = 0;     // elements
  const LayerPlan* plan = nullptr;           // the slice's plan; set from AfterAttention on, like the fields below
  kernels::PrefillAttentionArgs attention;   // as it ran, for all slices; `lse` is null if no observer wants it
  std::span<kernels::HeadStreamView> heads;  // visibility of the slice's heads; [num_kv_heads]
  const float* delta = nullptr;  // f32 [num_rows, hidden_size]: attention output, of all ranks; for ChooseFfnRows

  const kernels::Backend& backend() const { return model.backend(); }
  const kernels::KernelContext& context() const { return session.context(); }
  int32_t num_rows() const { return rows.row_end - rows.row_begin; }
};

// Belongs to one slice on one rank and is called by that rank's thread: BeginPass before a pass, then the other calls
// layer by layer in the order below. An error ends the pass.
class LayerObserver {
 public:
  virtual ~LayerObserver() = default;
  virtual void BeginPass(std::span<const int32_t> /*positions*/) {}
  // Called before K and V of the layer are written: the pages are unchanged.
  virtual absl::Status BeforeKv(const LayerView& /*view*/) { return absl::OkStatus(); }
  // Called after K and V of the rows are written.
  virtual absl::Status AfterKv(const LayerView& /*view*/) { return absl::OkStatus(); }
  // Whether AfterAttention reads the rows' log-sum-exps.
  virtual bool wants_lse(int32_t /*layer*/, const LayerPlan& /*plan*/) const { return false; }
  virtual absl::Status AfterAttention(const LayerView& /*view*/) { return absl::OkStatus(); }
  // Appends the rows of the pass that run through feed-forward, ascending. False: all rows of the slice do, and none
  // was appended.
  virtual absl::StatusOr<bool> ChooseFfnRows(const LayerView& /*view*/, std::vector<int32_t>& /*rows*/) {
    return false;
  }
};

using ObserverList = std::vector<LayerObserver*>;

// Runs the layer's attention again, with other heads or other `args`. REQUIRES: a pass of one slice.
absl::Status AttendAgain(const LayerView& view, kernels::PrefillAttentionArgs args,
                         std::span<const kernels::HeadStreamView> heads);
// The same for the last `num_rows` rows (0: all), with one visibility for all heads. Leaves the results of the pass
// alone; only scratch.lse is valid afterwards.
absl::Status AttendBeside(const LayerView& view, const kernels::HeadVisibility& visibility, int32_t num_rows);

// Arguments to sum the slice's attention over rows. The caller fills in probes, columns, heads and scores.
kernels::ColumnScoresArgs ColumnArgs(const LayerView& view);

// Copies f32 [count] from device memory.
absl::StatusOr<std::vector<float>> ReadFloats(kernels::Session& session, const float* device, size_t count);

}  // namespace spl::engine
