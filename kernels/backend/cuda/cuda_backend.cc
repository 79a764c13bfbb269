#include "kernels/backend/cuda/cuda_backend.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/backend/cuda/collective_nccl.h"
#include "kernels/backend/cuda/cuda_session.h"
#include "kernels/common/plugin.h"
#include "kernels/cuda/cuda_memory.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/fill/fill_cuda.h"
#include "kernels/gemm/gemm_validate.h"
#include "kernels/gemm/int4_gemm_cuda.h"
#include "kernels/gemm/skinny_gemm_cuda.h"
#include "kernels/moe/moe_cuda.h"
#include "kernels/quantize/quantize_rows_cuda.h"

namespace spl::kernels::cuda {

CudaBackend::CudaBackend(const CudaOptions& options, const cudaDeviceProp& properties)
    : device_(options.device),
      gemm_(options.gemm),
      deterministic_(options.deterministic),
      properties_(properties),
      gemm_plans_(options.deterministic),
      copies_(options.device),
      checksummer_(options.device),
      sending_(options.device) {}

absl::StatusOr<std::unique_ptr<Backend>> CudaBackend::Create(const CudaOptions& options) {
  const int device = options.device;
  int runtime = 0, driver = 0, count = 0;
  (void)cudaRuntimeGetVersion(&runtime);
  (void)cudaDriverGetVersion(&driver);
  const auto version = [](int v) { return absl::StrCat(v / 1000, ".", v % 1000 / 10); };
  if (driver == 0)
    return absl::FailedPreconditionError("cuda: no NVIDIA driver is installed on this machine; use --backend cpu");
  const cudaError_t counted = cudaGetDeviceCount(&count);
  if (counted == cudaErrorInsufficientDriver)
    return absl::FailedPreconditionError(absl::StrCat("cuda: the driver runs CUDA ", version(driver),
                                                      ", this build needs ", version(runtime),
                                                      "; update the driver or use --backend cpu"));
  if (counted == cudaErrorNoDevice || (counted == cudaSuccess && count == 0))
    return absl::FailedPreconditionError("cuda: this machine has no GPU that CUDA can use; use --backend cpu");
  SPLICE_CUDA_RETURN_IF_ERROR(counted, "looking for GPUs");
  if (device < 0 || device >= count)
    return absl::FailedPreconditionError(
        absl::StrCat("cuda: GPU ", device, " was asked for, this machine has ", count));
  cudaDeviceProp properties{};
  SPLICE_CUDA_RETURN_IF_ERROR(cudaGetDeviceProperties(&properties, device), "reading the GPU's properties");
  if (properties.major < 8)
    return absl::FailedPreconditionError(
        absl::StrFormat("cuda: GPU %d (%s) is sm_%d%d; this build runs on sm_80 and later; use --backend cpu", device,
                        properties.name, properties.major, properties.minor));
  std::unique_ptr<CudaBackend> backend(new CudaBackend(options, properties));
  if (absl::Status s = backend->copies_.Init(); !s.ok()) return s;
  if (absl::Status s = backend->checksummer_.Init(); !s.ok()) return s;
  if (absl::Status s = backend->sending_.Init(); !s.ok()) return s;
  return std::unique_ptr<Backend>(std::move(backend));
}

std::string CudaBackend::description() const {
  return absl::StrFormat("cuda: GPU %d, %s (sm_%d%d, %d multiprocessors, %.0f GiB)", device_, properties_.name,
                         properties_.major, properties_.minor, properties_.multiProcessorCount,
                         static_cast<double>(properties_.totalGlobalMem) / (1024.0 * 1024 * 1024));
}

absl::StatusOr<std::unique_ptr<Session>> CudaBackend::NewSession(const SessionOptions& options) const {
  return CudaSession::Create(device_, options);
}

absl::StatusOr<DeviceMemory> CudaBackend::Memory() const {
  SPLICE_CUDA_RETURN_IF_ERROR(cudaSetDevice(device_), "choosing the GPU");
  size_t free_bytes = 0, total_bytes = 0;
  SPLICE_CUDA_RETURN_IF_ERROR(cudaMemGetInfo(&free_bytes, &total_bytes), "reading the GPU's memory");
  return DeviceMemory{.free_bytes = free_bytes, .total_bytes = total_bytes};
}

absl::StatusOr<std::unique_ptr<Buffer>> CudaBackend::Allocate(size_t bytes) const {
  SPLICE_CUDA_RETURN_IF_ERROR(cudaSetDevice(device_), "choosing the GPU");
  return AllocateDevice(bytes);
}

absl::Status CudaBackend::PinHost(void* data, size_t bytes) const {
  SPLICE_CUDA_RETURN_IF_ERROR(cudaSetDevice(device_), "choosing the GPU");
  const cudaError_t error = cudaHostRegister(data, bytes, cudaHostRegisterPortable);
  if (error != cudaSuccess) (void)cudaGetLastError();
  if (error == cudaErrorHostMemoryAlreadyRegistered)
    return absl::AlreadyExistsError("cuda: this host memory is page-locked already");
  return ToStatus(error, "page-locking host memory");
}

void CudaBackend::UnpinHost(void* data) const { (void)cudaHostUnregister(data); }

absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CudaBackend::NewGroup(
    std::span<const Backend* const> ranks) const {
  std::vector<int> devices;
  for (const Backend* rank : ranks) {
    if (rank->name() != name()) return absl::InvalidArgumentError("cuda: a group with ranks on other devices");
    devices.push_back(static_cast<const CudaBackend*>(rank)->device_);
  }
  return MakeNcclGroup(devices);
}

absl::StatusOr<std::unique_ptr<LinearWeight>> CudaBackend::PackLinear(const WeightView& w) const {
  if (absl::Status s = ValidateWeight(w); !s.ok()) return s;
  auto memory = Allocate(static_cast<size_t>(w.out_features * DTypeRowBytes(w.dtype, w.in_features)));
  if (!memory.ok()) return memory.status();
  if (absl::Status s = Copy(CopyKind::kUpload, (*memory)->data(), w.data, (*memory)->size()); !s.ok()) return s;
  return AdoptLinear(*std::move(memory), w);
}

absl::StatusOr<std::unique_ptr<LinearWeight>> CudaBackend::AdoptLinear(std::unique_ptr<Buffer> data,
                                                                       WeightView w) const {
  if (w.dtype == DType::kE4M3) return AdoptFp8(std::move(data), w);
  if (w.dtype == DType::kInt4) return AdoptInt4(std::move(data), w);
  auto plain = Plain(std::move(data), w.dtype, w.out_features * w.in_features);
  if (!plain.ok()) return plain.status();
  const DType dtype = PlainType(w.dtype);
  // Products of fewer rows are our own, and faster. When deterministic all rows go through the same arithmetic.
  const int64_t add_rows = dtype == DType::kBF16 && !deterministic_ ? kMaxSkinnyRows + 1 : INT64_MAX;
  return std::make_unique<DeviceWeight>(*std::move(plain), dtype, w.out_features, w.in_features, add_rows);
}

absl::StatusOr<std::unique_ptr<LinearWeight>> CudaBackend::AdoptFp8(std::unique_ptr<Buffer> codes,
                                                                    const WeightView& w) const {
  if (absl::Status s = ValidateScales(w); !s.ok()) return s;
  if (PlainType(DType::kBF16) != DType::kBF16 || w.in_features % 16 != 0 ||
      (w.scale_group != 0 && w.scale_group != kFp8Group)) {
    return absl::UnimplementedError(absl::StrCat("cuda: an FP8 weight of ", w.in_features, " columns, a scale for ",
                                                 w.scale_group, ": columns are multiples of 16, scales for ", kFp8Group,
                                                 " or all (0), and activations are bf16"));
  }
  // Room for whole tiles: a kernel of cuBLASLt may read the scales of features past the last.
  constexpr int64_t kTile = 256;
  const auto bytes = static_cast<size_t>(w.out_features * w.num_scale_groups()) * sizeof(float);
  auto scales = Uploaded(w.scales, bytes, bytes + kTile * sizeof(float));
  if (!scales.ok()) return scales.status();
  const cudaError_t e = ArrangeFp8Codes(codes->data(), w.out_features * w.in_features, nullptr);
  if (absl::Status s = ToStatus(e == cudaSuccess ? cudaStreamSynchronize(nullptr) : e, "ArrangeFp8Codes"); !s.ok()) {
    return s;
  }
  // Deterministic: a row's arithmetic does not depend on the rows beside it.
  bool multiplies_e4m3 =
      !deterministic_ && w.out_features % 16 == 0 && w.in_features <= kQuantizedRowMax && MultipliesE4M3();
  std::unique_ptr<Buffer> of_blocks;
  if (multiplies_e4m3 && w.scale_group != 0) {
    const std::vector<float> blocks = BlockScales(w);
    multiplies_e4m3 = !blocks.empty();
    if (multiplies_e4m3) {
      auto uploaded = Uploaded(blocks.data(), blocks.size() * sizeof(float));
      if (!uploaded.ok()) return uploaded.status();
      of_blocks = *std::move(uploaded);
    }
  }
  return std::make_unique<DeviceFp8Weight>(std::move(codes), *std::move(scales), std::move(of_blocks), w,
                                           multiplies_e4m3);
}

absl::StatusOr<std::unique_ptr<LinearWeight>> CudaBackend::AdoptInt4(std::unique_ptr<Buffer> codes,
                                                                     const WeightView& w) const {
  if (absl::Status s = ValidateScales(w); !s.ok()) return s;
  if (PlainType(DType::kBF16) != DType::kBF16 || !IsInt4Served(w.in_features, w.scale_group)) {
    return absl::UnimplementedError(
        absl::StrCat("cuda: an int4 weight of ", w.in_features, " columns, a scale for ", w.scale_group,
                     ": columns are multiples of 32, scales for 32, 64, multiples of 128 or "
                     "all (0), and activations are bf16"));
  }
  const auto groups = static_cast<size_t>(w.out_features * w.num_scale_groups());
  DeviceInt4Weight::Parts parts{.codes = std::move(codes)};
  auto scales = Uploaded(w.scales, groups * sizeof(float));
  if (!scales.ok()) return scales.status();
  parts.scales = *std::move(scales);
  const std::vector<uint8_t> symmetric(w.zeros == nullptr ? groups : 0, uint8_t{8});
  auto zeros = Uploaded(w.zeros == nullptr ? symmetric.data() : w.zeros, groups);
  if (!zeros.ok()) return zeros.status();
  parts.zeros = *std::move(zeros);
  if (w.column_order != nullptr) {
    auto order = Uploaded(w.column_order, static_cast<size_t>(w.in_features) * sizeof(int32_t));
    if (!order.ok()) return order.status();
    parts.column_order = *std::move(order);
  }
  const cudaError_t e = ArrangeInt4Codes(parts.codes->data(), w.out_features * w.in_features / 2, nullptr);
  if (absl::Status s = ToStatus(e == cudaSuccess ? cudaStreamSynchronize(nullptr) : e, "ArrangeInt4Codes"); !s.ok()) {
    return s;
  }
  return std::make_unique<DeviceInt4Weight>(std::move(parts), w);
}

absl::StatusOr<std::unique_ptr<Buffer>> CudaBackend::Uploaded(const void* data, size_t bytes, size_t room) const {
  auto memory = Allocate(std::max(bytes, room));
  if (!memory.ok()) return memory.status();
  if (absl::Status s = Copy(CopyKind::kUpload, (*memory)->data(), data, bytes); !s.ok()) return s;
  return memory;
}

absl::StatusOr<std::unique_ptr<GroupedWeight>> CudaBackend::AdoptGrouped(std::unique_ptr<Buffer> data,
                                                                         GroupedWeightView w) const {
  if (IsQuantizedType(w.dtype)) return AdoptExpertCodes(std::move(data), w);
  auto plain = Plain(std::move(data), w.dtype, w.num_experts * w.out_features * w.in_features);
  if (!plain.ok()) return plain.status();
  w.dtype = PlainType(w.dtype);
  return std::make_unique<DeviceGroupedWeight>(*std::move(plain), nullptr, w);
}

absl::StatusOr<std::unique_ptr<GroupedWeight>> CudaBackend::AdoptExpertCodes(std::unique_ptr<Buffer> codes,
                                                                             const GroupedWeightView& w) const {
  for (int32_t e = 0; e < w.num_experts; ++e) {
    if (absl::Status s = ValidateScales(w.expert(e)); !s.ok()) return s;
  }
  if (PlainType(DType::kBF16) != DType::kBF16 || !AreExpertCodesServed(w)) {
    return absl::UnimplementedError(absl::StrCat(
        "cuda: experts in ", std::string(DTypeName(w.dtype)), " of ", w.out_features, " rows and ", w.in_features,
        " columns, a scale for ", w.scale_group,
        ": rows are multiples of 8, columns of 16 (int4: of 32), scales for 128 (int4: 32, 64, multiples of 128) or "
        "all (0), and activations are bf16"));
  }
  const std::vector<uint32_t> factors = ExpertFactors(w);
  auto uploaded = Uploaded(factors.data(), factors.size() * sizeof(uint32_t));
  if (!uploaded.ok()) return uploaded.status();
  const int64_t bytes = w.num_experts * w.out_features * DTypeRowBytes(w.dtype, w.in_features);
  cudaError_t e = w.dtype == DType::kE4M3 ? ArrangeFp8Codes(codes->data(), bytes, nullptr)
                                          : ArrangeInt4Codes(codes->data(), bytes, nullptr);
  if (e == cudaSuccess) e = cudaStreamSynchronize(nullptr);
  if (absl::Status s = ToStatus(e, "arranging codes of experts"); !s.ok()) return s;
  return std::make_unique<DeviceGroupedWeight>(std::move(codes), *std::move(uploaded), w);
}

absl::StatusOr<std::unique_ptr<Buffer>> CudaBackend::Plain(std::unique_ptr<Buffer> data, DType dtype,
                                                           int64_t count) const {
  if (PlainType(dtype) == dtype) return data;
  auto wide = Allocate(static_cast<size_t>(count) * sizeof(float));
  if (!wide.ok()) return wide.status();
  const auto widen = [&](cudaStream_t stream) {
    return Widen(data->data(), dtype, static_cast<float*>((*wide)->data()), count, stream);
  };
  if (absl::Status s = copies_.Run(widen, "widening a weight"); !s.ok()) return s;
  return wide;
}

absl::Status CudaBackend::FillRandom(const KernelContext&, const FillRandomArgs& a) const {
  if (absl::Status s = ValidateFillRandom(a); !s.ok()) return s;
  return copies_.Run([&](cudaStream_t stream) { return cuda::FillRandom(a, stream); }, "FillRandom");
}

}  // namespace spl::kernels::cuda

extern "C" __attribute__((visibility("default"))) spl::kernels::Backend* splice_cuda_make_backend(
    const char* build, const spl::kernels::CudaOptions& options, char* error, size_t error_size, int* code) {
  absl::StatusOr<std::unique_ptr<spl::kernels::Backend>> backend =
      std::strcmp(build, spl::kernels::PluginBuild()) == 0
          ? spl::kernels::cuda::CudaBackend::Create(options)
          : absl::FailedPreconditionError(absl::StrCat("cuda: the plug-in is of build '", spl::kernels::PluginBuild(),
                                                       "', the program of '", build, "'"));
  if (backend.ok()) return backend->release();
  *code = static_cast<int>(backend.status().code());
  const std::string message(backend.status().message().data(), backend.status().message().size());
  std::strncpy(error, message.c_str(), error_size - 1);
  return nullptr;
}
