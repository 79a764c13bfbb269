#include <algorithm>

#include "kernels/cuda/cuda_types.h"
#include "kernels/moe/moe_cuda.h"

namespace spl::kernels::cuda {
namespace {

// A grid block is a tile of one expert's places times kTileN of its output features. How many places an expert has is
// known on the device only, so the grid holds as many row tiles as there can be, and each block looks up which it is.
constexpr int kTileM = 64, kTileN = 128, kTileK = 32, kStages = 4, kThreads = 128;
constexpr int kRowBytes = kTileK * 2 + 16;  // padded: eight rows of 16 bytes lie in different banks

struct Tile {
  int expert, begin, end;  // places
};

// The row_tile-th tile over all experts; expert -1 when there are fewer.
__device__ Tile FindTile(const int32_t* offsets, int num_experts, int row_tile) {
  __shared__ Tile found;
  if (threadIdx.x == 0) found.expert = -1;
  __syncthreads();
  // Every thread sums the tiles of a stretch of experts; their starts follow from a scan in shared memory.
  __shared__ int starts[kThreads + 1];
  const int per_thread = (num_experts + kThreads - 1) / kThreads;
  const int first = static_cast<int>(threadIdx.x) * per_thread, last = min(first + per_thread, num_experts);
  int tiles = 0;
  for (int e = first; e < last; ++e) tiles += (offsets[e + 1] - offsets[e] + kTileM - 1) / kTileM;
  starts[threadIdx.x + 1] = tiles;
  if (threadIdx.x == 0) starts[0] = 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int t = 0; t < kThreads; ++t) starts[t + 1] += starts[t];
  }
  __syncthreads();
  if (row_tile >= starts[threadIdx.x] && row_tile < starts[threadIdx.x + 1]) {
    int at = starts[threadIdx.x];
    for (int e = first; e < last; ++e) {
      const int count = (offsets[e + 1] - offsets[e] + kTileM - 1) / kTileM;
      if (row_tile < at + count) {
        const int begin = offsets[e] + (row_tile - at) * kTileM;
        found = {e, begin, min(begin + kTileM, offsets[e + 1])};
        break;
      }
      at += count;
    }
  }
  __syncthreads();
  return found;
}

__device__ __forceinline__ void CopyAsync16(uint32_t shared, const void* global, bool valid) {
  const int bytes = valid ? 16 : 0;  // the rest is zeroed
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

__device__ __forceinline__ void LoadMatrix4(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared));
}

__device__ __forceinline__ void Mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void StorePair(float* p, float a, float b) { *reinterpret_cast<float2*>(p) = {a, b}; }
__device__ __forceinline__ void StorePair(__nv_bfloat16* p, float a, float b) {
  *reinterpret_cast<__nv_bfloat162*>(p) = __floats2bfloat162_rn(a, b);
}

// Four warps; each computes 64 x 32 of the tile. The order of the sum over in_features is that of k, whatever else the
// call holds.
template <typename Out>
__global__ void __launch_bounds__(kThreads)
    Bf16Kernel(const __nv_bfloat16* x, const int32_t* rows, const int32_t* offsets, const __nv_bfloat16* weights,
               Out* y, int num_experts, int n, int k) {
  extern __shared__ __align__(128) unsigned char shared[];
  const Tile tile = FindTile(offsets, num_experts, blockIdx.y);
  if (tile.expert < 0) return;
  const int column = blockIdx.x * kTileN, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int kABytes = kTileM * kRowBytes, kBBytes = kTileN * kRowBytes;
  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const __nv_bfloat16* w = weights + static_cast<int64_t>(tile.expert) * n * k;

  // A thread copies 16-byte pieces: 4 a row of kTileK. Its source rows stay the same over k.
  constexpr int kPieces = kTileK / 8;
  const int piece = threadIdx.x % kPieces, row0 = threadIdx.x / kPieces;
  constexpr int kRowsAtOnce = kThreads / kPieces;
  const __nv_bfloat16* a_from[kTileM / kRowsAtOnce];
  bool a_valid[kTileM / kRowsAtOnce];
#pragma unroll
  for (int i = 0; i < kTileM / kRowsAtOnce; ++i) {
    const int place = tile.begin + row0 + i * kRowsAtOnce;
    a_valid[i] = place < tile.end;
    const int64_t source = !a_valid[i] ? 0 : rows == nullptr ? place : rows[place];
    a_from[i] = x + source * k + piece * 8;
  }
  const int num_steps = (k + kTileK - 1) / kTileK;
  const auto load = [&](int step) {
    if (step < num_steps) {
      const uint32_t stage = base + static_cast<uint32_t>(step % kStages * (kABytes + kBBytes));
      const int at = step * kTileK;
      const bool inside = at + piece * 8 < k;
#pragma unroll
      for (int i = 0; i < kTileM / kRowsAtOnce; ++i)
        CopyAsync16(stage + static_cast<uint32_t>((row0 + i * kRowsAtOnce) * kRowBytes + piece * 16),
                    inside ? a_from[i] + at : x, a_valid[i] && inside);
#pragma unroll
      for (int i = 0; i < kTileN / kRowsAtOnce; ++i) {
        const int row = row0 + i * kRowsAtOnce;
        const bool valid = column + row < n && inside;
        CopyAsync16(stage + kABytes + static_cast<uint32_t>(row * kRowBytes + piece * 16),
                    valid ? w + static_cast<int64_t>(column + row) * k + at + piece * 8 : w, valid);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  float sums[kTileM / 16][4][4] = {};
  for (int step = 0; step < kStages - 1; ++step) load(step);
  for (int step = 0; step < num_steps; ++step) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
    __syncthreads();
    load(step + kStages - 1);
    const uint32_t stage = base + static_cast<uint32_t>(step % kStages * (kABytes + kBBytes));
#pragma unroll
    for (int kk = 0; kk < kTileK; kk += 16) {
      uint32_t b[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // two n8 fragments at a time
        const int row = warp * 32 + i * 16 + lane % 8 + (lane / 16) * 8;
        LoadMatrix4(b[i], stage + kABytes + static_cast<uint32_t>(row * kRowBytes + (kk + lane / 8 % 2 * 8) * 2));
      }
#pragma unroll
      for (int m = 0; m < kTileM / 16; ++m) {
        uint32_t a[4];
        LoadMatrix4(a, stage + static_cast<uint32_t>((m * 16 + lane % 16) * kRowBytes + (kk + lane / 16 * 8) * 2));
#pragma unroll
        for (int j = 0; j < 4; ++j) Mma(sums[m][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kTileM / 16; ++m) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int c = column + warp * 32 + j * 8 + lane % 4 * 2;
      if (c >= n) continue;  // n is even
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int place = tile.begin + m * 16 + lane / 4 + half * 8;
        if (place < tile.end)
          StorePair(y + static_cast<int64_t>(place) * n + c, sums[m][j][half * 2], sums[m][j][half * 2 + 1]);
      }
    }
  }
}

// f32: for exactness, not speed. A thread makes one column of every place of a tile of 16.
__global__ void F32Kernel(const float* x, const int32_t* rows, const int32_t* offsets, const float* weights, float* y,
                          int num_experts, int n, int k) {
  const Tile tile = FindTile(offsets, num_experts, blockIdx.y);
  if (tile.expert < 0) return;
  const int column = blockIdx.x * kThreads + threadIdx.x;
  if (column >= n) return;
  const float* w = weights + (static_cast<int64_t>(tile.expert) * n + column) * k;
  for (int place = tile.begin; place < tile.end; ++place) {
    const float* row = x + static_cast<int64_t>(rows == nullptr ? place : rows[place]) * k;
    float sum = 0;
    for (int i = 0; i < k; ++i) sum = fmaf(row[i], w[i], sum);
    y[static_cast<int64_t>(place) * n + column] = sum;
  }
}

template <typename T, typename Out>
__global__ void CombineKernel(const T* y, const int32_t* places, const float* weights, Out* out, int top_k, int width) {
  const int64_t row = blockIdx.x;
  for (int c = threadIdx.x * 4; c < width; c += blockDim.x * 4) {
    float4 sum{0, 0, 0, 0};
    for (int k = 0; k < top_k; ++k) {
      const float p = weights[row * top_k + k];
      const float4 v = Load4(y + static_cast<int64_t>(places[row * top_k + k]) * width + c);
      sum = {sum.x + p * v.x, sum.y + p * v.y, sum.z + p * v.z, sum.w + p * v.w};
    }
    Store4(out + row * width + c, sum);
  }
}

template <typename Out>
cudaError_t LaunchBf16(const GroupedLinearArgs& a, const DeviceGroupedWeight& w, unsigned row_tiles,
                       cudaStream_t stream) {
  constexpr int kShared = kStages * (kTileM + kTileN) * kRowBytes;
  if (const cudaError_t error =
          cudaFuncSetAttribute(Bf16Kernel<Out>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
      error != cudaSuccess)
    return error;
  const int n = static_cast<int>(w.out_features());
  const dim3 grid(static_cast<unsigned>((n + kTileN - 1) / kTileN), row_tiles);
  Bf16Kernel<Out><<<grid, kThreads, kShared, stream>>>(
      static_cast<const __nv_bfloat16*>(a.x.data), a.rows, a.offsets, static_cast<const __nv_bfloat16*>(w.data()),
      static_cast<Out*>(a.y.data), w.num_experts(), n, static_cast<int>(w.in_features()));
  return cudaGetLastError();
}

}  // namespace

cudaError_t GroupedLinear(const GroupedLinearArgs& a, cudaStream_t stream) {
  if (a.num_places == 0) return cudaSuccess;
  const auto& w = static_cast<const DeviceGroupedWeight&>(*a.weight);
  const int n = static_cast<int>(w.out_features()), k = static_cast<int>(w.in_features());
  if (n % 8 != 0 || k % 8 != 0 || a.x.dtype != w.dtype() || (a.y.dtype != w.dtype() && a.y.dtype != DType::kF32))
    return cudaErrorNotSupported;
  // Every expert may end in a tile that is not full.
  const unsigned row_tiles = static_cast<unsigned>(
      std::min<int64_t>(a.num_places, a.num_places / kTileM + std::min<int64_t>(w.num_experts(), a.num_places)));
  if (w.dtype() == DType::kF32) {
    const dim3 grid(static_cast<unsigned>((n + kThreads - 1) / kThreads), row_tiles);
    F32Kernel<<<grid, kThreads, 0, stream>>>(static_cast<const float*>(a.x.data), a.rows, a.offsets,
                                             static_cast<const float*>(w.data()), static_cast<float*>(a.y.data),
                                             w.num_experts(), n, k);
    return cudaGetLastError();
  }
  return a.y.dtype == DType::kF32 ? LaunchBf16<float>(a, w, row_tiles, stream)
                                  : LaunchBf16<__nv_bfloat16>(a, w, row_tiles, stream);
}

cudaError_t CombineExperts(const CombineExpertsArgs& a, cudaStream_t stream) {
  if (a.num_rows == 0) return cudaSuccess;
  if (a.width % 4 != 0) return cudaErrorNotSupported;
  const unsigned rows = static_cast<unsigned>(a.num_rows);
  const int width = static_cast<int>(a.width);
  if (a.y.dtype == DType::kF32 && a.out.dtype == DType::kF32)
    CombineKernel<<<rows, 256, 0, stream>>>(static_cast<const float*>(a.y.data), a.places, a.weights,
                                            static_cast<float*>(a.out.data), a.top_k, width);
  else if (a.y.dtype == DType::kBF16 && a.out.dtype == DType::kF32)
    CombineKernel<<<rows, 256, 0, stream>>>(static_cast<const __nv_bfloat16*>(a.y.data), a.places, a.weights,
                                            static_cast<float*>(a.out.data), a.top_k, width);
  else if (a.y.dtype == DType::kBF16 && a.out.dtype == DType::kBF16)
    CombineKernel<<<rows, 256, 0, stream>>>(static_cast<const __nv_bfloat16*>(a.y.data), a.places, a.weights,
                                            static_cast<__nv_bfloat16*>(a.out.data), a.top_k, width);
  else
    return cudaErrorNotSupported;
  return cudaGetLastError();
}

}  // namespace spl::kernels::cuda
