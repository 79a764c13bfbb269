// One device as the engine sees it. The executors are written once against this class; the reference backend runs the
// definitions (tests), the CPU backend the fast variants, the CUDA backend lives in libsplice_cuda.so.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend/operations.h"
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

// Threads: a Backend is immutable and may be shared; operations take a KernelContext, and one context serves one thread
// at a time. All pointers in arguments are device pointers (on CPU: host pointers). Operations validate their arguments
// and return InvalidArgument; what an operation lacks on a backend is Unimplemented, never a silent fallback.
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
  // The type that activations between operations have for weights of this type; the residual stream and what is
  // added to it are always f32.
  virtual DType activation_dtype(DType /*weights*/) const { return DType::kF32; }

  virtual absl::StatusOr<std::unique_ptr<Session>> NewSession(const SessionOptions& options) const = 0;

  // Copies between host and device or within the device; all complete on return. Any thread may call; the caller orders
  // them against the work of sessions (Fence, Synchronize).
  virtual absl::Status Copy(CopyKind kind, std::span<const CopyOp> ops) const = 0;
  absl::Status Copy(CopyKind kind, void* to, const void* from, size_t bytes) const {
    const CopyOp op{to, from, bytes};
    return Copy(kind, {&op, 1});
  }

  // Starts copies whose host side, if any, is page-locked. The result is a point behind them, before which neither side
  // may change; null when they are complete already. This default is Copy.
  virtual absl::StatusOr<std::shared_ptr<const Fence>> StartCopy(CopyKind kind, std::span<const CopyOp> ops) const;

  // Page-locks host memory, so that Copy reaches it at the speed of the link. Undone before the memory is freed.
  // AlreadyExists: somebody in this process has page-locked it. Nothing to do on the host.
  virtual absl::Status PinHost(void* /*data*/, size_t /*bytes*/) const { return absl::OkStatus(); }
  virtual void UnpinHost(void* /*data*/) const {}

  // Opaque bytes by which a backend of any process on this host reaches the same device memory; Copy(kWithin) then
  // moves between the two. Import's result must go before the exporting process reuses the memory for something else.
  // Unimplemented on the host, where transports map memory themselves. FailedPrecondition: another host or device
  // that this one cannot reach.
  virtual absl::StatusOr<std::string> Export(const Buffer& /*buffer*/) const {
    return absl::UnimplementedError(name() + ": host memory is not exported");
  }
  virtual absl::StatusOr<std::unique_ptr<Buffer>> Import(const std::string& /*handle*/) const {
    return absl::UnimplementedError(name() + ": host memory is not imported");
  }
  // Makes a tensor-parallel group whose rank i computes on ranks[i] (one of them may be this backend); the
  // communicators come in that order and do not outlive the backends. FailedPrecondition, NotFound: what is missing.
  // Unimplemented: this kind of device has no groups.
  virtual absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> NewGroup(
      std::span<const Backend* const> /*ranks*/) const {
    return absl::UnimplementedError(name() + ": no tensor parallelism");
  }

  // out[i] = CRC32C of page pages[i] of `pool`, in device memory. Complete on return; any thread may call.
  virtual absl::Status PageChecksums(const KvPoolView& pool, std::span<const int32_t> pages, uint32_t* out) const = 0;

  // Zeroed, 64-byte aligned.
  virtual absl::StatusOr<std::unique_ptr<Buffer>> Allocate(size_t bytes) const = 0;
  virtual absl::StatusOr<std::unique_ptr<LinearWeight>> PackLinear(const WeightView& weight) const = 0;
  // As PackLinear, whose weight.data is host memory, for a weight that is in device memory already, the whole of
  // `data`, which is taken over (weight.data is not read). A backend whose packed form is the plain matrix keeps it;
  // this default packs and frees it, over host memory where the host cannot read the device's.
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
