#include "kernels/cuda/cuda_status.h"

#include "absl/strings/str_cat.h"

namespace spl::kernels::cuda {

absl::Status ToStatus(cudaError_t error, const std::string& what) {
  const std::string message =
      absl::StrCat("cuda: ", what, ": ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")");
  switch (error) {
    case cudaSuccess:
      return absl::OkStatus();
    case cudaErrorMemoryAllocation:
      return absl::ResourceExhaustedError(message);
    case cudaErrorNotSupported:
      return absl::UnimplementedError(message);
    case cudaErrorInvalidValue:
      return absl::InvalidArgumentError(message);
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorHardwareStackError:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorDevicesUnavailable:
    case cudaErrorUnknown:
      return absl::DataLossError(absl::StrCat(message, "; the GPU's context is lost"));
    default:
      return absl::InternalError(message);
  }
}

absl::Status ToStatus(cublasStatus_t error, const std::string& what) {
  const std::string message = absl::StrCat("cublasLt: ", what, ": ", cublasLtGetStatusString(error));
  switch (error) {
    case CUBLAS_STATUS_SUCCESS:
      return absl::OkStatus();
    case CUBLAS_STATUS_ALLOC_FAILED:
      return absl::ResourceExhaustedError(message);
    case CUBLAS_STATUS_NOT_SUPPORTED:
    case CUBLAS_STATUS_ARCH_MISMATCH:
      return absl::UnimplementedError(message);
    case CUBLAS_STATUS_INVALID_VALUE:
      return absl::InvalidArgumentError(message);
    default:
      return absl::InternalError(message);
  }
}

}  // namespace spl::kernels::cuda
