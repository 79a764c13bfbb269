// Sends pages from one GPU, on a stream of their own; see PageSends. Nothing waits for the device but Finish.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend/page_sends.h"
#include "kernels/common/buffer.h"

namespace spl::kernels::cuda {

// Page-locked memory with a list of pages, which the device reads, and what it answers.
class SendList {
 public:
  static constexpr int64_t kPagesMax = 16384;
  static absl::StatusOr<SendList> Create();

  void Clear();
  int64_t size() const { return size_; }
  // Adds as many pages as there is room for; returns their number.
  int64_t Add(std::span<const PageSend> pages);
  PageSend* pages() const { return reinterpret_cast<PageSend*>(base() + kHeaderBytes); }  // [kPagesMax]
  uint32_t* crcs() const { return reinterpret_cast<uint32_t*>(pages() + kPagesMax); }     // [kPagesMax]
  uint32_t* late() const { return reinterpret_cast<uint32_t*>(base()); }  // not 0: pages were not begun in time

 private:
  static constexpr size_t kHeaderBytes = 64;
  explicit SendList(std::unique_ptr<Buffer> memory) : memory_(std::move(memory)) {}
  std::byte* base() const { return static_cast<std::byte*>(memory_->data()); }

  std::unique_ptr<Buffer> memory_;
  int64_t size_ = 0;
};

// All transfers of one GPU. Any thread may call. It must outlive what NewSends returns.
class PageSending {
 public:
  explicit PageSending(int device) : device_(device) {}
  ~PageSending();
  absl::Status Init();
  // Implements Backend::NewPageSends.
  absl::StatusOr<std::unique_ptr<PageSends>> NewSends(size_t page_bytes);

  // For its transfers.
  int device() const { return device_; }
  absl::Status UseDevice() const;
  cudaStream_t stream() const { return stream_; }
  absl::StatusOr<SendList> TakeList();
  void GiveBack(std::vector<SendList> lists);
  // The moment as the device's clock says it, or up to a millisecond earlier. Measures how far the two clocks are apart
  // if that was long ago.
  absl::StatusOr<uint64_t> OnDeviceClock(std::chrono::steady_clock::time_point moment);

 private:
  absl::Status CompareClocksLocked();

  const int device_;
  cudaStream_t stream_ = nullptr;
  cudaStream_t clock_stream_ = nullptr;
  std::mutex mutex_;  // guards all below
  std::vector<SendList> free_lists_;
  std::unique_ptr<Buffer> clock_;  // page-locked: what ReadClock writes
  // When the clocks were compared, by each of them: the device's was not later than the host's.
  std::optional<std::chrono::steady_clock::time_point> compared_;
  uint64_t device_then_ = 0;
};

}  // namespace spl::kernels::cuda
