#include "kernels/backend/cuda/device_copies.h"

#include <algorithm>
#include <cstring>
#include <vector>

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
constexpr int64_t kPiecesMax = 8192;          // of one launch
constexpr size_t kPieceBytesMax = 256 << 10;  // larger ones travel by themselves

size_t Aligned(size_t bytes) { return (bytes + 15) / 16 * 16; }
bool IsPiece(const void* device, size_t bytes) {
  return bytes <= kPieceBytesMax && bytes % 16 == 0 && reinterpret_cast<uintptr_t>(device) % 16 == 0;
}

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

absl::Status DeviceCopies::Copy(CopyKind kind, std::span<const CopyOp> ops) {
  std::lock_guard lock(mutex_);
  if (absl::Status s = UseDevice(); !s.ok()) return s;
  switch (kind) {
    case CopyKind::kWithin:
      if (absl::Status s = CopyWithinLocked(ops); !s.ok()) return s;
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

absl::Status DeviceCopies::MakeStages() {
  for (Stage& stage : stages_) {
    stage.used = 0;
    stage.num_pieces = 0;
    if (stage.pieces != nullptr) continue;
    auto pinned = AllocatePinned(kCopyChunkBytes);
    if (!pinned.ok()) return pinned.status();
    auto device = AllocateDevice(kCopyChunkBytes);
    if (!device.ok()) return device.status();
    auto pieces = AllocatePinned(kPiecesMax * sizeof(CopyPiece));
    if (!pieces.ok()) return pieces.status();
    stage.pinned = *std::move(pinned);
    stage.device = *std::move(device);
    stage.pieces = *std::move(pieces);
  }
  return absl::OkStatus();
}

absl::Status DeviceCopies::CopyWithinLocked(std::span<const CopyOp> ops) {
  if (absl::Status s = MakeStages(); !s.ok()) return s;
  Stage& stage = stages_[0];
  const auto run = [&]() -> absl::Status {
    SPLICE_CUDA_RETURN_IF_ERROR(CopyPieces(stage.list(), stage.num_pieces, stream_), "copying pages");
    // The list is read until then.
    SPLICE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream_), "copying pages");
    stage.num_pieces = 0;
    return absl::OkStatus();
  };
  for (const CopyOp& op : ops) {
    if (!IsPiece(op.to, op.bytes) || !IsPiece(op.from, op.bytes)) {
      SPLICE_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(op.to, op.from, op.bytes, cudaMemcpyDeviceToDevice, stream_),
                                  "copying pages");
      continue;
    }
    stage.list()[stage.num_pieces++] = {op.to, op.from, op.bytes};
    if (stage.num_pieces < kPiecesMax) continue;
    if (absl::Status s = run(); !s.ok()) return s;
  }
  return run();
}

// Sends the stage to the device in one copy, and its pieces from there to their places.
absl::Status DeviceCopies::SendLocked(Stage& stage, size_t turn) {
  if (stage.num_pieces > 0) {
    SPLICE_CUDA_RETURN_IF_ERROR(
        cudaMemcpyAsync(stage.device->data(), stage.pinned->data(), stage.used, cudaMemcpyHostToDevice, stream_),
        "copying to the GPU");
    SPLICE_CUDA_RETURN_IF_ERROR(CopyPieces(stage.list(), stage.num_pieces, stream_), "copying to the GPU");
  }
  SPLICE_CUDA_RETURN_IF_ERROR(cudaEventRecord(copied_[turn], stream_), "copying to the GPU");
  stage.used = 0;
  stage.num_pieces = 0;
  return absl::OkStatus();
}

// The host fills one stage while the other travels.
absl::Status DeviceCopies::UploadLocked(std::span<const CopyOp> ops) {
  if (absl::Status s = MakeStages(); !s.ok()) return s;
  size_t turn = 0;
  const auto next_stage = [&]() -> absl::Status {
    if (absl::Status s = SendLocked(stages_[turn], turn); !s.ok()) return s;
    turn ^= 1;
    return ToStatus(cudaEventSynchronize(copied_[turn]), "copying to the GPU");
  };
  for (const CopyOp& op : ops) {
    if (IsPinned(op.from)) {
      SPLICE_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(op.to, op.from, op.bytes, cudaMemcpyHostToDevice, stream_),
                                  "copying to the GPU");
      continue;
    }
    const bool is_piece = IsPiece(op.to, op.bytes);
    for (size_t done = 0; done < op.bytes;) {
      const size_t least = is_piece ? op.bytes : 1;
      if (kCopyChunkBytes - stages_[turn].used < least || stages_[turn].num_pieces == kPiecesMax) {
        if (absl::Status s = next_stage(); !s.ok()) return s;
      }
      Stage& stage = stages_[turn];
      const size_t size = std::min(op.bytes - done, kCopyChunkBytes - stage.used);
      std::memcpy(static_cast<std::byte*>(stage.pinned->data()) + stage.used,
                  static_cast<const std::byte*>(op.from) + done, size);
      if (is_piece) {
        stage.list()[stage.num_pieces++] = {op.to, static_cast<std::byte*>(stage.device->data()) + stage.used, size};
      } else {
        SPLICE_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(static_cast<std::byte*>(op.to) + done,
                                                    static_cast<std::byte*>(stage.pinned->data()) + stage.used, size,
                                                    cudaMemcpyHostToDevice, stream_),
                                    "copying to the GPU");
      }
      stage.used = std::min(kCopyChunkBytes, Aligned(stage.used + size));
      done += size;
    }
  }
  return SendLocked(stages_[turn], turn);
}

absl::Status DeviceCopies::DownloadLocked(std::span<const CopyOp> ops) {
  if (absl::Status s = MakeStages(); !s.ok()) return s;
  Stage& stage = stages_[0];
  struct Piece {
    void* to;
    size_t at, bytes;
  };
  std::vector<Piece> pieces;
  size_t gathered_from = 0;  // of the stage: what is gathered begins there and ends at stage.used
  // All that was gathered travels in one copy.
  const auto fetch = [&]() -> absl::Status {
    if (stage.num_pieces == 0) return absl::OkStatus();
    SPLICE_CUDA_RETURN_IF_ERROR(CopyPieces(stage.list(), stage.num_pieces, stream_), "copying from the GPU");
    SPLICE_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(static_cast<std::byte*>(stage.pinned->data()) + gathered_from,
                                                static_cast<std::byte*>(stage.device->data()) + gathered_from,
                                                stage.used - gathered_from, cudaMemcpyDeviceToHost, stream_),
                                "copying from the GPU");
    return absl::OkStatus();
  };
  const auto drain = [&]() -> absl::Status {
    if (absl::Status s = fetch(); !s.ok()) return s;
    SPLICE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream_), "copying from the GPU");
    for (const Piece& piece : pieces)
      std::memcpy(piece.to, static_cast<const std::byte*>(stage.pinned->data()) + piece.at, piece.bytes);
    pieces.clear();
    stage.used = gathered_from = 0;
    stage.num_pieces = 0;
    return absl::OkStatus();
  };
  for (const CopyOp& op : ops) {
    if (IsPinned(op.to)) {
      SPLICE_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(op.to, op.from, op.bytes, cudaMemcpyDeviceToHost, stream_),
                                  "copying from the GPU");
      continue;
    }
    const bool is_piece = IsPiece(op.from, op.bytes);
    if (!is_piece && stage.num_pieces > 0) {
      if (absl::Status s = drain(); !s.ok()) return s;
    }
    for (size_t done = 0; done < op.bytes;) {
      const size_t least = is_piece ? op.bytes : 1;
      if (kCopyChunkBytes - stage.used < least || stage.num_pieces == kPiecesMax) {
        if (absl::Status s = drain(); !s.ok()) return s;
      }
      const size_t size = std::min(op.bytes - done, kCopyChunkBytes - stage.used);
      if (is_piece) {
        if (stage.num_pieces == 0) gathered_from = stage.used;
        stage.list()[stage.num_pieces++] = {static_cast<std::byte*>(stage.device->data()) + stage.used, op.from, size};
      } else {
        SPLICE_CUDA_RETURN_IF_ERROR(
            cudaMemcpyAsync(static_cast<std::byte*>(stage.pinned->data()) + stage.used,
                            static_cast<const std::byte*>(op.from) + done, size, cudaMemcpyDeviceToHost, stream_),
            "copying from the GPU");
      }
      pieces.push_back({static_cast<std::byte*>(op.to) + done, stage.used, size});
      stage.used = std::min(kCopyChunkBytes, Aligned(stage.used + size));
      done += size;
    }
  }
  return drain();
}

}  // namespace spl::kernels::cuda
