// Copies to, from and within one GPU, on a stream of their own. Host memory that is not page-locked goes through
// page-locked memory.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend/backend.h"

namespace spl::kernels::cuda {

// Threads: any. Copies run one after the other.
class DeviceCopies {
 public:
  explicit DeviceCopies(int device) : device_(device) {}
  ~DeviceCopies();
  absl::Status Init();

  // Complete on return.
  absl::Status Copy(CopyKind kind, std::span<const CopyOp> ops);
  // Starts copies whose host sides are page-locked; complete once the fence has been waited for.
  absl::StatusOr<std::shared_ptr<const Fence>> StartCopy(CopyKind kind, std::span<const CopyOp> ops);
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
  absl::Status Pinned();
  absl::Status UploadLocked(std::span<const CopyOp> ops);
  absl::Status DownloadLocked(std::span<const CopyOp> ops);

  const int device_;
  std::mutex mutex_;  // guards all below
  cudaStream_t stream_ = nullptr;
  cudaEvent_t copied_[2] = {};
  std::unique_ptr<Buffer> pinned_[2];
};

}  // namespace spl::kernels::cuda
