#include "kernels/backend/cuda/device_copies.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/backend/cuda/cuda_session.h"
#include "kernels/cuda/cuda_memory.h"
#include "kernels/cuda/cuda_status.h"

namespace spl::kernels::cuda {
namespace {

// Page-locked memory is read and written by the device itself.
bool IsPinned(const void* host) {
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, host) != cudaSuccess) {
    (void)cudaGetLastError();
    return false;
  }
  return attributes.type == cudaMemoryTypeHost;
}

constexpr size_t kCopyChunkBytes = 32 << 20;  // size of a pinned buffer; two of them keep disk, memory and link busy

}  // namespace

DeviceCopies::~DeviceCopies() {
  if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  for (cudaEvent_t event : copied_) {
    if (event != nullptr) (void)cudaEventDestroy(event);
  }
}

absl::Status DeviceCopies::Init() {
  if (absl::Status s = UseDevice(); !s.ok()) return s;
  SPLICE_CUDA_RETURN_IF_ERROR(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
  for (cudaEvent_t& event : copied_)
    SPLICE_CUDA_RETURN_IF_ERROR(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "creating an event");
  return absl::OkStatus();
}

absl::Status DeviceCopies::UseDevice() const { return ToStatus(cudaSetDevice(device_), "choosing the GPU"); }

absl::Status DeviceCopies::Finish(cudaError_t launched, const char* what) {
  SPLICE_CUDA_RETURN_IF_ERROR(launched, what);
  return ToStatus(cudaStreamSynchronize(stream_), what);
}

absl::StatusOr<std::shared_ptr<const Fence>> DeviceCopies::StartCopy(CopyKind kind, std::span<const CopyOp> ops) {
  std::lock_guard lock(mutex_);
  if (absl::Status s = UseDevice(); !s.ok()) return s;
  const cudaMemcpyKind direction = kind == CopyKind::kWithin   ? cudaMemcpyDeviceToDevice
                                   : kind == CopyKind::kUpload ? cudaMemcpyHostToDevice
                                                               : cudaMemcpyDeviceToHost;
  for (const CopyOp& op : ops)
    SPLICE_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(op.to, op.from, op.bytes, direction, stream_), "copying pages");
  return RecordEvent(stream_, Waiting::kSpins);
}

absl::Status DeviceCopies::Copy(CopyKind kind, std::span<const CopyOp> ops) {
  std::lock_guard lock(mutex_);
  if (absl::Status s = UseDevice(); !s.ok()) return s;
  switch (kind) {
    case CopyKind::kWithin:
      for (const CopyOp& op : ops)
        SPLICE_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(op.to, op.from, op.bytes, cudaMemcpyDeviceToDevice, stream_),
                                    "copying pages");
      break;
    case CopyKind::kUpload:
      if (absl::Status s = UploadLocked(ops); !s.ok()) return s;
      break;
    case CopyKind::kDownload:
      if (absl::Status s = DownloadLocked(ops); !s.ok()) return s;
      break;
  }
  return ToStatus(cudaStreamSynchronize(stream_), "copying");
}

absl::Status DeviceCopies::Pinned() {
  for (auto& buffer : pinned_) {
    if (buffer != nullptr) continue;
    auto memory = AllocatePinned(kCopyChunkBytes);
    if (!memory.ok()) return memory.status();
    buffer = *std::move(memory);
  }
  return absl::OkStatus();
}

// Small pieces are packed into one pinned chunk; the host fills one chunk while the other travels.
absl::Status DeviceCopies::UploadLocked(std::span<const CopyOp> ops) {
  if (absl::Status s = Pinned(); !s.ok()) return s;
  int turn = 0;
  size_t used = 0;
  for (const CopyOp& op : ops) {
    if (IsPinned(op.from)) {
      SPLICE_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(op.to, op.from, op.bytes, cudaMemcpyHostToDevice, stream_),
                                  "copying to the GPU");
      continue;
    }
    for (size_t done = 0; done < op.bytes;) {
      if (used == kCopyChunkBytes) {
        SPLICE_CUDA_RETURN_IF_ERROR(cudaEventRecord(copied_[turn], stream_), "copying to the GPU");
        turn ^= 1;
        used = 0;
        SPLICE_CUDA_RETURN_IF_ERROR(cudaEventSynchronize(copied_[turn]), "copying to the GPU");
      }
      const size_t size = std::min(op.bytes - done, kCopyChunkBytes - used);
      std::byte* stage = static_cast<std::byte*>(pinned_[turn]->data()) + used;
      std::memcpy(stage, static_cast<const std::byte*>(op.from) + done, size);
      SPLICE_CUDA_RETURN_IF_ERROR(
          cudaMemcpyAsync(static_cast<std::byte*>(op.to) + done, stage, size, cudaMemcpyHostToDevice, stream_),
          "copying to the GPU");
      used += size;
      done += size;
    }
  }
  return absl::OkStatus();
}

absl::Status DeviceCopies::DownloadLocked(std::span<const CopyOp> ops) {
  if (absl::Status s = Pinned(); !s.ok()) return s;
  struct Piece {
    void* to;
    size_t at, bytes;
  };
  std::vector<Piece> pieces;
  size_t used = 0;
  const auto drain = [&]() -> absl::Status {
    SPLICE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream_), "copying from the GPU");
    for (const Piece& piece : pieces)
      std::memcpy(piece.to, static_cast<const std::byte*>(pinned_[0]->data()) + piece.at, piece.bytes);
    pieces.clear();
    used = 0;
    return absl::OkStatus();
  };
  for (const CopyOp& op : ops) {
    if (IsPinned(op.to)) {
      SPLICE_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(op.to, op.from, op.bytes, cudaMemcpyDeviceToHost, stream_),
                                  "copying from the GPU");
      continue;
    }
    for (size_t done = 0; done < op.bytes;) {
      if (used == kCopyChunkBytes) {
        if (absl::Status s = drain(); !s.ok()) return s;
      }
      const size_t size = std::min(op.bytes - done, kCopyChunkBytes - used);
      SPLICE_CUDA_RETURN_IF_ERROR(
          cudaMemcpyAsync(static_cast<std::byte*>(pinned_[0]->data()) + used,
                          static_cast<const std::byte*>(op.from) + done, size, cudaMemcpyDeviceToHost, stream_),
          "copying from the GPU");
      pieces.push_back({static_cast<std::byte*>(op.to) + done, used, size});
      used += size;
      done += size;
    }
  }
  return drain();
}

}  // namespace spl::kernels::cuda
