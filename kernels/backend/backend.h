// One device as the engine sees it. The executors are written once against this class. The reference backend runs the
// definitions (for tests), the CPU backend the fast variants; the CUDA backend lives in libsplice_cuda.so.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend/operations.h"
#include "kernels/backend/page_sends.h"
#include "kernels/backend/session.h"
#include "kernels/collective/collective.h"
#include "kernels/common/buffer.h"
#include "kernels/common/cpu_features.h"

namespace spl::kernels {

enum class CopyKind : uint8_t { kUpload, kDownload, kWithin };  // host to device, device to host, within the device

struct CopyOp {
  void* to = nullptr;
  const void* from = nullptr;
  size_t bytes = 0;
};

struct DeviceMemory {
  uint64_t free_bytes = 0;  // bytes that can still be allocated, by any process
  uint64_t total_bytes = 0;
};

// Threads: a Backend is immutable and may be shared. Operations take a KernelContext; one context serves one thread at
// a time. Pointers: all pointers in arguments are device pointers (on the CPU: host pointers). Errors: operations
// validate their arguments and return InvalidArgument. An operation that a backend lacks returns Unimplemented, never a
// silent fallback.
class Backend : public LayerOperations,
                public ExpertOperations,
                public KvOperations,
                public AttentionOperations,
                public SelectionOperations {
 public:
  virtual ~Backend() = default;
  virtual std::string name() const = 0;         // "cpu", "ref", "cuda"
  virtual std::string description() const = 0;  // one line for the start-up log: instruction set, GEMM path, threads

  // True when the host may read and write device memory through its pointers.
  virtual bool host_memory() const { return true; }
  // Element type of activations between operations, for weights of the given type. The residual stream, and everything
  // added to it, is always f32.
  virtual DType activation_dtype(DType /*weights*/) const { return DType::kF32; }
  // Whether SparseAttention is faster than SelectTokens and DecodeAttention for a model of this shape and type, with
  // contexts of up to max_kv_len.
  virtual bool PrefersPackedKeys(const AttentionShape& /*shape*/, DType /*weights*/, int64_t /*max_kv_len*/) const {
    return false;
  }

  virtual absl::StatusOr<std::unique_ptr<Session>> NewSession(const SessionOptions& options) const = 0;

  // Copies between host and device or within the device; returns when all copies are complete. Any thread may call. The
  // caller orders copies against the work of sessions (Fence, Synchronize).
  virtual absl::Status Copy(CopyKind kind, std::span<const CopyOp> ops) const = 0;
  absl::Status Copy(CopyKind kind, void* to, const void* from, size_t bytes) const {
    const CopyOp op{to, from, bytes};
    return Copy(kind, {&op, 1});
  }

  // Page-locks host memory, so that Copy runs at the speed of the link. Unpin it before freeing it. Host backends do
  // nothing. AlreadyExists: this process has already page-locked it.
  virtual absl::Status PinHost(void* /*data*/, size_t /*bytes*/) const { return absl::OkStatus(); }
  virtual void UnpinHost(void* /*data*/) const {}

  // Returns opaque bytes by which a backend in any process on this host reaches the same device memory (Import);
  // Copy(kWithin) then moves data between the two. Free the imported buffer before the exporting process reuses the
  // memory. Unimplemented on host backends, where transports map memory themselves. FailedPrecondition: another host,
  // or a device that this one cannot reach.
  virtual absl::StatusOr<std::string> Export(const Buffer& /*buffer*/) const {
    return absl::UnimplementedError(name() + ": host memory is not exported");
  }
  virtual absl::StatusOr<std::unique_ptr<Buffer>> Import(const std::string& /*handle*/) const {
    return absl::UnimplementedError(name() + ": host memory is not imported");
  }
  // Makes a tensor-parallel group whose rank i computes on ranks[i]; one of them may be this backend. Returns the
  // communicators in that order; they must not outlive the backends. FailedPrecondition, NotFound: the message names
  // what is missing. Unimplemented: this kind of device has no groups.
  virtual absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> NewGroup(
      std::span<const Backend* const> /*ranks*/) const {
    return absl::UnimplementedError(name() + ": no tensor parallelism");
  }

  // out[i] = CRC32C of page pages[i] of `pool`, in device memory. Complete on return; any thread may call.
  virtual absl::Status PageChecksums(const KvPoolView& pool, std::span<const int32_t> pages, uint32_t* out) const = 0;

  // Sends pages of `page_bytes` from this device's memory to memory that another process reads (Import). Any thread may
  // call; the backend must outlive what it returns. InvalidArgument: a page size that is no multiple of 16.
  virtual absl::StatusOr<std::unique_ptr<PageSends>> NewPageSends(size_t page_bytes) const = 0;

  // Memory of the device at the time of the call; any thread may call. On the CPU: ReadHostMemory. Cost: a call of the
  // driver, or some small files.
  virtual absl::StatusOr<DeviceMemory> Memory() const = 0;

  // Zeroed, 64-byte aligned.
  virtual absl::StatusOr<std::unique_ptr<Buffer>> Allocate(size_t bytes) const = 0;
  virtual absl::StatusOr<std::unique_ptr<LinearWeight>> PackLinear(const WeightView& weight) const = 0;
  // Like PackLinear, for a weight that is already in device memory. Takes over `data`, which is the whole weight;
  // weight.data (host memory for PackLinear) is not read. A backend whose packed form is the plain matrix keeps it.
  // This default packs and frees it, by way of host memory if the host cannot read the device's.
  virtual absl::StatusOr<std::unique_ptr<LinearWeight>> AdoptLinear(std::unique_ptr<Buffer> data,
                                                                    WeightView weight) const;
  // The same for the weights of all experts.
  virtual absl::StatusOr<std::unique_ptr<GroupedWeight>> AdoptGrouped(std::unique_ptr<Buffer> /*data*/,
                                                                      GroupedWeightView /*weight*/) const {
    return absl::UnimplementedError(name() + ": no mixture of experts");
  }
};

struct CpuBackendOptions {
  GemmCompute gemm = GemmCompute::kAuto;  // kAuto: bf16 for bf16 weights where CpuHasBf16Gemm(), f32 otherwise
};
std::unique_ptr<Backend> MakeCpuBackend(const CpuBackendOptions& options = {});
std::unique_ptr<Backend> MakeReferenceBackend();

}  // namespace spl::kernels
