// Kernels that start while the one in front of them on the stream still runs (programmatic dependent launch, sm_90).
//
// The protocol of every kernel launched with LaunchEarly:
//   1. All threads call LetNextStart() first. The next kernel's blocks then move onto the device as soon as they fit.
//   2. Before WaitForPrevious() a thread reads only memory that no kernel of the chain writes (weights, the staged
//   batch,
//      KV of earlier passes) and writes no global memory.
//   3. Every block that reads an input or writes a result calls WaitForPrevious() first, and in every launch some block
//      does. It returns when the whole grid in front has ended and its writes are visible; because that grid waited
//      too, everything before it has ended as well. So an input made two kernels back, and a buffer that some earlier
//      kernel still read, are safe after it.
// An ordinary launch in between (cuBLASLt, a copy) waits for all before it and starts after them, as ever.
// On sm_80 the launch is an ordinary one and the two functions do nothing.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace spl::kernels::cuda {

#ifdef __CUDACC__

__device__ __forceinline__ void LetNextStart() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void WaitForPrevious() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// As LaunchEarly below, with clusters of cluster_blocks consecutive blocks (sm_90 when more than one). early false: an
// ordinary launch, before which WaitForPrevious() does not wait.
template <typename... Params, typename... Args>
cudaError_t LaunchClusters(bool early, int cluster_blocks, void (*kernel)(Params...), dim3 grid, dim3 block,
                           size_t smem_bytes, cudaStream_t stream, Args... args) {
  int device = 0, major = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (e != cudaSuccess) return e;
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = early ? 1 : 0;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = static_cast<unsigned>(cluster_blocks);
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = major < 9 ? 0 : cluster_blocks == 1 ? 1 : 2;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

template <typename... Params, typename... Args>
cudaError_t LaunchClustersEarly(int cluster_blocks, void (*kernel)(Params...), dim3 grid, dim3 block, size_t smem_bytes,
                                cudaStream_t stream, Args... args) {
  return LaunchClusters(true, cluster_blocks, kernel, grid, block, smem_bytes, stream, args...);
}

template <typename... Params, typename... Args>
cudaError_t LaunchEarly(void (*kernel)(Params...), dim3 grid, dim3 block, size_t smem_bytes, cudaStream_t stream,
                        Args... args) {
  return LaunchClustersEarly(1, kernel, grid, block, smem_bytes, stream, args...);
}

#endif  // __CUDACC__

}  // namespace spl::kernels::cuda
