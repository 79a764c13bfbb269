// Shared by the benchmarks of single CUDA kernels: random data, timing with a cold L2 cache, and the rates of plain
// copies and reads that the kernels are compared with. Included by .cu files only.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kernels/cuda/check_cuda.h"

namespace spl::kernels::cuda {

__global__ inline void FillNormal(__nv_bfloat16* p, int64_t n, uint32_t seed, float scale = 1) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x) {
    uint64_t x = (i + 1) * 0x9e3779b97f4a7c15ull + seed;
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93ull;
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93ull;
    x ^= x >> 32;
    const float u = ((x & 0xffffff) + 1) * (1.0f / 16777217), v = (x >> 40) * (1.0f / 16777216);
    p[i] = __float2bfloat16(scale * sqrtf(-2 * logf(u)) * cospif(2 * v));
  }
}

__global__ inline void ReadAll(const uint4* p, int64_t n, uint32_t* sink) {
  uint32_t x = 0;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  for (; i + 7 * step < n; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = p[i + k * step];
#pragma unroll
    for (int k = 0; k < 8; ++k) x ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  if (x == 0x12345678) *sink = x;
}

template <typename T>
T* Alloc(size_t n) {
  void* p = nullptr;
  CHECK_CUDA(cudaMalloc(&p, std::max<size_t>(n, 1) * sizeof(T)));
  return static_cast<T*>(p);
}
template <typename T>
T* Upload(const std::vector<T>& v) {
  T* p = Alloc<T>(v.size());
  CHECK_CUDA(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
  return p;
}

// Read, not written, between launches: dirty lines would be written back at the next launch's expense.
constexpr size_t kFlushBytes = 256 << 20;
inline uint4* flush_buffer = nullptr;
inline uint32_t* sink = nullptr;

// Mean of launches one behind the other, as in a pass: what they read is in the L2 cache if it fits.
template <typename F>
double MeanOfRowMs(int reps, F launch) {
  cudaEvent_t begin, end;
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  for (int i = 0; i < 3; ++i) launch();
  CHECK_CUDA(cudaEventRecord(begin));
  for (int i = 0; i < reps; ++i) launch();
  CHECK_CUDA(cudaEventRecord(end));
  CHECK_CUDA(cudaEventSynchronize(end));
  float ms = 0;
  CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return ms / reps;
}

// `prepare` runs untimed before each launch, after the flush.
template <typename F, typename P>
double MedianMs(int reps, F launch, P prepare) {
  for (int i = 0; i < 3; ++i) launch();
  std::vector<cudaEvent_t> events(2 * reps);
  for (cudaEvent_t& e : events) CHECK_CUDA(cudaEventCreate(&e));
  for (int i = 0; i < reps; ++i) {
    ReadAll<<<528, 256>>>(flush_buffer, kFlushBytes / 16, sink);
    prepare();
    CHECK_CUDA(cudaEventRecord(events[2 * i]));
    launch();
    CHECK_CUDA(cudaEventRecord(events[2 * i + 1]));
  }
  CHECK_CUDA(cudaDeviceSynchronize());
  std::vector<float> ms(reps);
  for (int i = 0; i < reps; ++i) CHECK_CUDA(cudaEventElapsedTime(&ms[i], events[2 * i], events[2 * i + 1]));
  for (cudaEvent_t& e : events) cudaEventDestroy(e);
  std::nth_element(ms.begin(), ms.begin() + reps / 2, ms.end());
  return ms[reps / 2];
}

// A graph of launch(0), launch(1), …, launch(count - 1) on `stream`; the caller destroys it.
template <typename F>
cudaGraphExec_t Record(cudaStream_t stream, int count, const F& launch) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < count; ++i) launch(i);
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  CHECK_CUDA(cudaGraphDestroy(graph));
  return exec;
}

template <typename F>
double MedianMs(int reps, F launch) {
  return MedianMs(reps, launch, [] {});
}

inline void AllocateFlushBuffer() {
  flush_buffer = Alloc<uint4>(kFlushBytes / 16);
  CHECK_CUDA(cudaMemset(flush_buffer, 1, kFlushBytes));
  sink = Alloc<uint32_t>(1);
}

// Bytes per second of reading `bytes` by a plain kernel.
inline double ReadRate(int64_t bytes) {
  auto* p = Alloc<uint4>(bytes / 16);
  FillNormal<<<2048, 256>>>(reinterpret_cast<__nv_bfloat16*>(p), bytes / 2, 3);
  double best = 1e9;
  for (const int blocks : {132 * 4, 132 * 8, 132 * 16}) {
    best = std::min(best, MedianMs(10, [&] { ReadAll<<<blocks, 256>>>(p, bytes / 16, sink); }));
  }
  CHECK_CUDA(cudaFree(p));
  return static_cast<double>(bytes) / best * 1e3;
}

// Bytes per second, read plus written, of a copy of `bytes` inside the device.
inline double CopyRate(int64_t bytes) {
  auto* from = Alloc<uint4>(bytes / 16);
  auto* to = Alloc<uint4>(bytes / 16);
  FillNormal<<<2048, 256>>>(reinterpret_cast<__nv_bfloat16*>(from), bytes / 2, 4);
  const double ms = MedianMs(10, [&] { CHECK_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice)); });
  CHECK_CUDA(cudaFree(from));
  CHECK_CUDA(cudaFree(to));
  return 2.0 * static_cast<double>(bytes) / ms * 1e3;
}

}  // namespace spl::kernels::cuda
