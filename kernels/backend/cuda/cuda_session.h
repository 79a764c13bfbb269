// One engine thread's use of one GPU: a stream, the staged batch, recorded steps (CUDA graphs).
#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <memory>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/attention/attention_cuda.h"
#include "kernels/backend/backend.h"
#include "kernels/backend/cuda/staged_edits.h"
#include "kernels/backend/session.h"
#include "kernels/selection/staged_selection.h"

namespace spl::kernels::cuda {

// The staged batch where kernels read it. The pointers stay the same for the life of the session, so that a recorded
// step finds the next batch in the place of the last one.
struct DeviceBatch {
  const int32_t* tokens = nullptr;        // [num_rows]
  const int32_t* positions = nullptr;     // [num_rows]
  const int32_t* angles = nullptr;        // [num_rows]; only valid with has_angles
  const int32_t* row_sequence = nullptr;  // [num_rows]
  const int32_t* row_begin = nullptr;     // [num_sequences + 1]
  const int32_t* kv_len = nullptr;        // [num_sequences]
  const int64_t* table_offset = nullptr;  // [num_sequences], elements into page_tables
  const int32_t* page_tables = nullptr;   // [slots][layers][kv_heads][head_stride]
  int64_t head_stride = 0;
  int64_t layer_stride = 0;
  const Band* plans = nullptr;           // [slots][layers][kv_heads]; null until a batch had plans
  const int64_t* plan_offset = nullptr;  // [num_sequences], elements into plans
  // Set once a batch had a sequence that chooses its tokens; null before.
  const StagedSequence* selecting = nullptr;    // [num_sequences]
  const StagedStep* selection_steps = nullptr;  // [layers][max_sequences]
  // The same of their outer choices (SequenceSelection::outer).
  const StagedSequence* outer_selecting = nullptr;
  const StagedStep* outer_steps = nullptr;
  const int32_t* compact_tables = nullptr;  // [slots][layers][kv_heads][compact_stride]
  int64_t compact_stride = 0;
  int64_t steps_stride = 0;  // elements of selection_steps between layers
  bool has_angles = false;   // BatchArgs::angles was not empty
  bool selects = false;      // some sequence of this batch has a selection
  bool listed = false;       // some layer of such a sequence is listed
  int32_t num_rows = 0;
  int32_t num_sequences = 0;
  int32_t max_kv_len = 0;  // upper bound of every kv_len; recorded steps are sized for it
};

// Records a point after all work given to `stream` of the current device so far. If that fails, Wait returns the error.
// kSleeps: the waiting thread costs no core, but wakes some 20 us late.
enum class Waiting : uint8_t { kSleeps, kSpins };
std::shared_ptr<const Fence> RecordEvent(cudaStream_t stream, Waiting waiting);
// Makes what is given to `stream` later wait for the fence, without the host: for points of any GPU of the process. The
// host waits for a fence of another kind.
absl::Status WaitOnDevice(cudaStream_t stream, const Fence& fence);

class CudaSession final : public Session {
 public:
  static absl::StatusOr<std::unique_ptr<Session>> Create(int device, const SessionOptions& options);
  ~CudaSession() override;

  absl::Status Stage(const BatchArgs& batch) override;
  bool HasPlan(uint64_t kv_id, uint64_t plan_key) const override;
  absl::Status RunStep(uint64_t key, const std::function<absl::Status()>& step) override;
  std::shared_ptr<const Fence> RecordFence() override;
  absl::Status Zero(void* device, size_t bytes) override;
  absl::Status Synchronize() override;
  absl::StatusOr<const void*> ReadBack(const void* device, size_t bytes) override;
  absl::StatusOr<std::unique_ptr<HostCopy>> ReadBackLater(const void* device, size_t bytes) override;

  static CudaSession& Of(const KernelContext& ctx) { return static_cast<CudaSession&>(*ctx.session); }
  cudaStream_t stream() const { return stream_; }
  const DeviceBatch& batch() const { return batch_; }
  cublasLtHandle_t cublas() const { return cublas_; }
  static constexpr size_t kGemmWorkspaceBytes = 64 << 20;
  void* gemm_workspace() const { return gemm_workspace_->data(); }

  // Device memory of at least `bytes`, zeroed when first given out; one block per use. Earlier blocks stay valid,
  // because recorded steps point into them.
  enum class Use : uint8_t {
    kPrefillAttention,
    kDecodeAttention,
    kAlignCopy,
    kColumnScores,
    kSelectTokens,
    kQueryWindow,
    kPrefillLists,  // lists of positions, and the data that attention reads with them
    kListedPages,   // K and V of listed positions
    kFuseRows,
    kSampleTokens,
    kWideSequences,  // what WidenPages reads
    kWideTables,
    kWidePages,  // pages of kE4M3 in bf16; an earlier block does not stay valid
    kNumUses
  };
  absl::StatusOr<void*> Scratch(Use use, size_t bytes);
  // Copies host arrays to the device, each 16-byte aligned, after `reserved` bytes at the start of the block of `use`.
  // The block is the same at every call unless it must grow.
  absl::StatusOr<std::vector<std::byte*>> StageArrays(Use use, size_t reserved,
                                                      std::initializer_list<std::span<const std::byte>> arrays);
  // The same with nothing reserved. Copies nothing if the last call with `use` had equal arrays.
  absl::StatusOr<std::vector<std::byte*>> StageChangedArrays(Use use,
                                                             std::initializer_list<std::span<const std::byte>> arrays);
  // Copies host ids to the device, for the operations that follow.
  absl::StatusOr<const int32_t*> StageIds(std::span<const int32_t> ids);
  StagedEdits& edits() { return edits_; }

 private:
  struct Slot {
    uint64_t kv_id = 0;
    int32_t num_pages = 0;  // per stream, already on the device
    uint64_t last_used = 0;
    bool has_plan = false;  // already on the device
    uint64_t plan_key = 0;
    int32_t num_compact_pages = 0;  // per stream, already on the device
  };

  CudaSession(int device, const SessionOptions& options) : device_(device), options_(options) {}
  // Bytes of an array, with what follows it aligned.
  template <typename T>
  static constexpr size_t Aligned(size_t count) {
    return (count * sizeof(T) + 255) / 256 * 256;
  }
  absl::Status Init();
  absl::Status StageTables(const BatchArgs& batch, std::vector<int64_t>& offsets);
  absl::Status StagePlans(const BatchArgs& batch);
  absl::Status StageSelection(const BatchArgs& batch);
  size_t NewPagesBytes(int32_t num_pages, int32_t known) const;
  absl::Status CopyNewPages(std::span<const std::vector<int32_t>> tables, int32_t num_pages, int32_t* to,
                            int64_t stride, int32_t& known, std::byte* staged);
  absl::Status StageCompactTables(const BatchArgs& batch);
  absl::StatusOr<int32_t> SlotFor(uint64_t kv_id, std::span<const BatchSequence> sequences);
  absl::Status DropOldRecordings();
  // The staging place that `bytes` are put into next.
  size_t StagingFor(size_t bytes);
  // Returns page-locked host memory whose last copy to the device is complete.
  absl::StatusOr<std::byte*> Pinned(size_t bytes);
  absl::Status PinnedUsed();

  const int device_;
  const SessionOptions options_;
  cudaStream_t stream_ = nullptr;
  cublasLtHandle_t cublas_ = nullptr;
  std::unique_ptr<Buffer> gemm_workspace_;

  DeviceBatch batch_;
  std::unique_ptr<Buffer> batch_memory_;
  std::unique_ptr<Buffer> ids_;
  std::unique_ptr<Buffer> tables_;
  std::unique_ptr<Buffer> plans_;
  std::unique_ptr<Buffer> selection_;  // data that changes every step: sequences, then steps
  std::unique_ptr<Buffer> compact_tables_;
  StagedEdits edits_;

  std::vector<Slot> slots_;
  std::unordered_map<uint64_t, int32_t> slot_of_;
  uint64_t pass_ = 0;

  // Places of page-locked memory: filled by the host, copied by the device. A step uses five of them at most and waits
  // for none that a step under way still has to copy.
  struct Staging {
    std::unique_ptr<Buffer> memory;
    cudaEvent_t copied = nullptr;
    bool in_use = false;
  };
  static constexpr size_t kStagingPlaces = 16;
  Staging staging_[kStagingPlaces];
  size_t current_staging_ = 0;
  std::unique_ptr<Buffer> read_back_;
  std::vector<std::unique_ptr<Buffer>> free_read_backs_;  // page-locked, of copies that have been taken
  std::vector<std::unique_ptr<Buffer>> scratch_[static_cast<int>(Use::kNumUses)];
  struct LastArrays {
    std::vector<size_t> sizes;
    std::vector<std::byte> bytes;
    std::vector<std::byte*> staged;
  };
  LastArrays last_arrays_[static_cast<int>(Use::kNumUses)];

  struct Recorded {
    int32_t num_runs = 0;
    cudaGraphExec_t exec = nullptr;
    uint64_t last_pass = 0;
  };
  std::unordered_map<uint64_t, Recorded> steps_;
};

}  // namespace spl::kernels::cuda
