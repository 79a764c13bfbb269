// One engine thread's use of a backend: compute threads or a stream, the batch of the current pass where the device
// reads it, and what a device needs to run a step without asking the host.
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
  int32_t num_threads = 0;  // CPU: 0 is one per core
  CpuIsa isa = DetectCpuIsa();
  // Upper bounds of a batch; a device sizes its tables by them.
  int32_t max_rows = 0;
  int32_t max_sequences = 0;
  int32_t num_layers = 0;
  int32_t num_kv_heads = 0;
  int32_t max_pages_per_stream = 0;
  // Of a rank that has some of the model's heads: it reads page lists [first_kv_head, first_kv_head + num_kv_heads) of
  // the table_kv_heads that a layer has, and its pool starts with page first_page.
  int32_t first_kv_head = 0;
  int32_t table_kv_heads = 0;  // 0: num_kv_heads
  int32_t first_page = 0;

  int32_t heads_in_tables() const { return table_kv_heads > 0 ? table_kv_heads : num_kv_heads; }
};

// Rows [row_begin, row_end) of the pass belong to one sequence.
struct BatchSequence {
  int32_t row_begin = 0;
  int32_t row_end = 0;
  int32_t kv_len = 0;  // positions that are written once the pass has written its own
  // [num_layers * heads_in_tables()] page lists, layer by layer. Under one kv_id they only ever grow; an entry is
  // never read again once it has become kNoPage.
  std::span<const std::vector<int32_t>> page_tables;
  uint64_t kv_id = 0;
  // Of a batch with staged plans: what the session's heads see in this sequence, [num_layers * num_kv_heads], layer by
  // layer. May be empty where HasPlan(kv_id, plan_key).
  std::span<const HeadVisibility> plan;
  uint64_t plan_key = 0;  // equal for equal plans
  // Of a decode step in which the sequence chooses tokens in some layer; null: in none.
  const SequenceSelection* selection = nullptr;
};

// One pass through the model, for all of its layers. Borrowed for the call of Stage.
struct BatchArgs {
  std::span<const int32_t> tokens;     // [num_rows]
  std::span<const int32_t> positions;  // [num_rows], ascending within a sequence
  std::span<const BatchSequence> sequences;
  // DecodeAttention takes what heads see from here instead of its arguments (DecodeAttentionArgs::staged_plans).
  bool staged_plans = false;
};

// A point in a session's work. Any thread may wait.
class Fence {
 public:
  virtual ~Fence() = default;
  virtual absl::Status Wait() const = 0;
};

// One thread at a time.
class Session {
 public:
  virtual ~Session() = default;
  const KernelContext& context() const { return context_; }

  // Makes `batch` the current one. ResourceExhausted when it is larger than the options allow.
  virtual absl::Status Stage(const BatchArgs& batch) = 0;
  // Whether a sequence's plan need not be part of the next batch: it is on the device, or not staged at all.
  virtual bool HasPlan(uint64_t /*kv_id*/, uint64_t /*plan_key*/) const { return true; }
  // Runs `step`, which only calls operations of the backend on this context with arguments that follow from `key` and
  // from staged memory. A device may record the operations at the first call of a key and replay them later without
  // calling `step` again.
  virtual absl::Status RunStep(uint64_t key, const std::function<absl::Status()>& step) = 0;
  // Null where operations are complete when they return.
  virtual std::shared_ptr<const Fence> RecordFence() = 0;
  // Returns when everything so far is complete, with the first error of it.
  virtual absl::Status Synchronize() = 0;
  // Host memory that holds `bytes` of device memory once everything before is complete; valid until the next call.
  // Where the host reads device memory directly this is `device` itself.
  virtual absl::StatusOr<const void*> ReadBack(const void* device, size_t bytes) = 0;

 protected:
  KernelContext context_;
};

}  // namespace spl::kernels
