// The current device, as a launcher asks for it before it chooses a kernel.
#pragma once

#include <cuda_runtime_api.h>

namespace spl::kernels::cuda {

// Compute capability of the current device times ten.
inline cudaError_t DeviceInfo(int* capability, int* num_sms) {
  int device = 0, major = 0, minor = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(num_sms, cudaDevAttrMultiProcessorCount, device);
  *capability = 10 * major + minor;
  return e;
}

}  // namespace spl::kernels::cuda
