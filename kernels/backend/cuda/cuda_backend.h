// The Backend of libsplice_cuda.so: every operation is validated, handed the batch of its session, and launched on the
// session's stream. Nothing waits for the device but Copy, Allocate and what sessions say. Operations are in
// layer_operations.cc, attention_operations.cc, selection_operations.cc and sampling_operations.cc.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend/backend.h"
#include "kernels/backend/cuda/cuda_plugin.h"
#include "kernels/backend/cuda/device_copies.h"
#include "kernels/backend/cuda/device_page_sends.h"
#include "kernels/backend/cuda/page_checksummer.h"
#include "kernels/gemm/fp8_gemm_cuda.h"
#include "kernels/gemm/gemm_cuda.h"

namespace spl::kernels::cuda {

class CudaBackend final : public Backend {
 public:
  // FailedPrecondition: no driver, no such GPU, or one that is too old; the message says what to do.
  static absl::StatusOr<std::unique_ptr<Backend>> Create(const CudaOptions& options);

  std::string name() const override { return "cuda"; }
  std::string description() const override;
  bool host_memory() const override { return false; }
  DType activation_dtype(DType weights) const override { return PlainType(weights); }
  bool PrefersPackedKeys(const AttentionShape& shape, DType weights, int64_t max_kv_len) const override;

  absl::StatusOr<std::unique_ptr<Session>> NewSession(const SessionOptions& options) const override;
  absl::StatusOr<DeviceMemory> Memory() const override;
  absl::StatusOr<std::unique_ptr<Buffer>> Allocate(size_t bytes) const override;
  absl::Status PinHost(void* data, size_t bytes) const override;
  void UnpinHost(void* data) const override;
  absl::StatusOr<std::string> Export(const Buffer& buffer) const override;
  absl::StatusOr<std::unique_ptr<Buffer>> Import(const std::string& handle) const override;
  absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> NewGroup(
      std::span<const Backend* const> ranks) const override;
  absl::Status PageChecksums(const KvPoolView& pool, std::span<const int32_t> pages, uint32_t* out) const override {
    return checksummer_.Run(pool, pages, out);
  }
  using Backend::Copy;
  absl::Status Copy(CopyKind kind, std::span<const CopyOp> ops) const override { return copies_.Copy(kind, ops); }
  absl::StatusOr<std::unique_ptr<PageSends>> NewPageSends(size_t page_bytes) const override {
    return sending_.NewSends(page_bytes);
  }

  absl::StatusOr<std::unique_ptr<LinearWeight>> PackLinear(const WeightView& weight) const override;
  absl::StatusOr<std::unique_ptr<LinearWeight>> AdoptLinear(std::unique_ptr<Buffer> data,
                                                            WeightView weight) const override;
  absl::StatusOr<std::unique_ptr<GroupedWeight>> AdoptGrouped(std::unique_ptr<Buffer> data,
                                                              GroupedWeightView weight) const override;

#define SPLICE_DECLARE(name, args) absl::Status name(const KernelContext& ctx, const args& a) const override;
  SPLICE_OPERATIONS(SPLICE_DECLARE)
#undef SPLICE_DECLARE

 private:
  CudaBackend(const CudaOptions& options, const cudaDeviceProp& properties);
  // f16 weights are always widened: their products may leave the range of f16, and bf16 would drop bits of the weights.
  DType PlainType(DType dtype) const {
    return dtype == DType::kBF16 && gemm_ != GemmCompute::kF32 ? DType::kBF16 : DType::kF32;
  }
  absl::StatusOr<std::unique_ptr<Buffer>> Plain(std::unique_ptr<Buffer> data, DType dtype, int64_t count) const;
  absl::StatusOr<std::unique_ptr<LinearWeight>> AdoptFp8(std::unique_ptr<Buffer> codes, const WeightView& weight) const;
  absl::StatusOr<std::unique_ptr<LinearWeight>> AdoptInt4(std::unique_ptr<Buffer> codes,
                                                          const WeightView& weight) const;
  absl::StatusOr<std::unique_ptr<GroupedWeight>> AdoptExpertCodes(std::unique_ptr<Buffer> codes,
                                                                  const GroupedWeightView& weight) const;
  // Device memory with `bytes` from the host, and of `room` bytes if that is more.
  absl::StatusOr<std::unique_ptr<Buffer>> Uploaded(const void* data, size_t bytes, size_t room = 0) const;
  // Lets this GPU write memory of another GPU of the process.
  absl::Status EnablePeer(const char (&gpu)[16]) const;

  const int device_;
  const GemmCompute gemm_;
  const bool deterministic_;
  const cudaDeviceProp properties_;
  mutable GemmPlans gemm_plans_;
  mutable DeviceCopies copies_;
  mutable PageChecksummer checksummer_;
  mutable PageSending sending_;
};

}  // namespace spl::kernels::cuda
