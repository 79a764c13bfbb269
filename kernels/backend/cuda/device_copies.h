// Copies to, from and within one GPU, on a stream of their own. Host memory that is not page-locked goes through
// page-locked memory. Small pieces, pages that are scattered over a pool for instance, are gathered and scattered on
// the device: one copy over the link for all of them.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend/backend.h"
#include "kernels/kv_copy/gather_copy_cuda.h"

namespace spl::kernels::cuda {

// Threads: any. Copies run one after the other.
class DeviceCopies {
 public:
  explicit DeviceCopies(int device) : device_(device) {}
  ~DeviceCopies();
  absl::Status Init();

  // Complete on return.
  absl::Status Copy(CopyKind kind, std::span<const CopyOp> ops);
  // Runs launch(stream) after all copies so far; returns when it is complete. `what` names it in errors.
  template <typename Launch>
  absl::Status Run(const Launch& launch, const char* what) {
    std::lock_guard lock(mutex_);
    if (absl::Status s = UseDevice(); !s.ok()) return s;
    return Finish(launch(stream_), what);
  }

 private:
  absl::Status UseDevice() const;
  absl::Status Finish(cudaError_t launched, const char* what);
  // Page-locked memory, the device's side of it, and pieces of that which are scattered or were gathered.
  struct Stage {
    std::unique_ptr<Buffer> pinned, device, pieces;
    size_t used = 0;
    int64_t num_pieces = 0;
    CopyPiece* list() const { return static_cast<CopyPiece*>(pieces->data()); }
  };
  absl::Status MakeStages();
  absl::Status UploadLocked(std::span<const CopyOp> ops);
  absl::Status SendLocked(Stage& stage, size_t turn);
  absl::Status DownloadLocked(std::span<const CopyOp> ops);
  absl::Status CopyWithinLocked(std::span<const CopyOp> ops);

  const int device_;
  std::mutex mutex_;  // guards all below
  cudaStream_t stream_ = nullptr;
  cudaEvent_t copied_[2] = {};
  Stage stages_[2];
};

}  // namespace spl::kernels::cuda
