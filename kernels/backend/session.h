// One engine thread's use of a backend: compute threads or a stream, the batch of the current pass where the device
// reads it, and the steps that a device has recorded to replay them without the host.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/common/cpu_features.h"
#include "kernels/common/kernel_context.h"
#include "kernels/common/token_selection.h"
#include "kernels/common/visibility.h"

namespace spl::kernels {

struct SessionOptions {
  int32_t num_threads = 0;  // CPU only; 0: one per core
  CpuIsa isa = DetectCpuIsa();
  // Upper bounds of a batch; a device sizes its tables by them.
  int32_t max_rows = 0;
  int32_t max_sequences = 0;
  int32_t num_layers = 0;
  int32_t num_kv_heads = 0;
  int32_t max_pages_per_stream = 0;
  // For a tensor-parallel rank that has some of the model's heads: it reads page lists [first_kv_head, first_kv_head +
  // num_kv_heads) of the table_kv_heads of each layer, and its pool starts with page first_page.
  int32_t first_kv_head = 0;
  int32_t table_kv_heads = 0;  // 0: num_kv_heads
  int32_t first_page = 0;

  int32_t heads_in_tables() const { return table_kv_heads > 0 ? table_kv_heads : num_kv_heads; }
};

// Rows [row_begin, row_end) of the pass belong to one sequence.
struct BatchSequence {
  int32_t row_begin = 0;
  int32_t row_end = 0;
  int32_t kv_len = 0;  // number of written positions after this pass has written its own
  // [num_layers * heads_in_tables()] page lists, layer by layer. Under one kv_id they only grow. An entry that has
  // become kNoPage is never read again.
  std::span<const std::vector<int32_t>> page_tables;
  uint64_t kv_id = 0;
  // Visibility of the session's heads in this sequence, for batches with staged plans: [num_layers * num_kv_heads],
  // layer by layer. May be empty if HasPlan(kv_id, plan_key).
  std::span<const HeadVisibility> plan;
  uint64_t plan_key = 0;  // equal for equal plans
  // Set for a decode step in which the sequence chooses tokens in some layer. Null: in none.
  const SequenceSelection* selection = nullptr;
};

// One pass through all layers of the model. Borrowed for the call of Stage.
struct BatchArgs {
  std::span<const int32_t> tokens;     // [num_rows]
  std::span<const int32_t> positions;  // [num_rows], ascending within a sequence
  std::span<const BatchSequence> sequences;
  std::span<const int32_t> angles = {};  // [num_rows], or empty: as positions; see RopeSequence
  // True: DecodeAttention takes visibility from here instead of its arguments (DecodeAttentionArgs::staged_plans).
  bool staged_plans = false;
};

// A point in a session's work. Any thread may wait for it.
class Fence {
 public:
  virtual ~Fence() = default;
  virtual absl::Status Wait() const = 0;
  // Several fences in one, those of all ranks for instance: this one is reached when they all are. Empty: it is a point
  // of its own.
  virtual std::span<const std::shared_ptr<const Fence>> joined() const { return {}; }
};

// A copy of device memory on its way to the host. Used by the session's thread, before the session ends.
class HostCopy {
 public:
  virtual ~HostCopy() = default;
  // Returns host memory with the bytes, once they are there; valid as long as this object.
  virtual absl::StatusOr<const void*> Wait() = 0;
};

// Used by one thread at a time.
class Session {
 public:
  virtual ~Session() = default;
  const KernelContext& context() const { return context_; }

  // Makes `batch` the current one. ResourceExhausted when it is larger than the options allow.
  virtual absl::Status Stage(const BatchArgs& batch) = 0;
  // True if the next batch may leave out this sequence's plan: it is on the device, or plans are not staged at all.
  virtual bool HasPlan(uint64_t /*kv_id*/, uint64_t /*plan_key*/) const { return true; }
  // Runs `step`. `step` only calls operations of the backend on this context, with arguments that follow from `key` and
  // from staged memory. A device may record the operations at the first call of a key and replay them later without
  // calling `step` again.
  virtual absl::Status RunStep(uint64_t key, const std::function<absl::Status()>& step) = 0;
  // Returns a point after all work so far. Null: operations are complete when they return.
  virtual std::shared_ptr<const Fence> RecordFence() = 0;
  // Zeroes `bytes` of device memory behind all work so far.
  virtual absl::Status Zero(void* device, size_t bytes) = 0;
  // Waits for all work so far; returns its first error.
  virtual absl::Status Synchronize() = 0;
  // Returns host memory that holds `bytes` of device memory, once all earlier work is complete; valid until the next
  // call. Returns `device` itself if the host reads device memory directly.
  virtual absl::StatusOr<const void*> ReadBack(const void* device, size_t bytes) = 0;
  // The same without waiting: the bytes are those behind all work so far, whatever follows.
  virtual absl::StatusOr<std::unique_ptr<HostCopy>> ReadBackLater(const void* device, size_t bytes) = 0;

 protected:
  KernelContext context_;
};

}  // namespace spl::kernels
