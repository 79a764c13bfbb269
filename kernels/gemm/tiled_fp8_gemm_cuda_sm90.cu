// Products with an FP8 weight on Hopper: a tile is 128 features x kRows rows. The weight is the left operand: its codes
// are widened in registers, once for all rows of the tile, while the tensor cores multiply the codes before them.
//
// A loader thread keeps a ring of steps full, 64 columns of x and of the codes each; two warpgroups of 64 features each
// empty it. Blocks of a cluster work together in one of two ways:
//   shared   two blocks have neighbouring features and the same rows: each loads half of x for both. Sums ascend over
//            in_features, 16 columns an instruction, whatever kRows is: a row's result depends on nothing else.
//   split    all blocks have one tile and a part of the columns each; at the end they add their sums, in the order of
//            the columns. For few tiles, where a block alone would take long.
#include <algorithm>

#include "kernels/cuda/cuda_device_info.h"
#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/cuda_ptx.h"
#include "kernels/cuda/cuda_tensor_map.h"
#include "kernels/gemm/fp8_gemm_device.h"
#include "kernels/gemm/fp8_store_sm90.h"
#include "kernels/gemm/fp8_tile_sm90.h"

namespace spl::kernels::cuda {
namespace {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <int kRows, bool kGroups, bool kSplit>
__device__ void Load(Smem<kRows, kGroups>& smem, const Fp8GemmParams& p, const CUtensorMap& x_map,
                     const CUtensorMap& w_map) {
  using S = Smem<kRows, kGroups>;
  const int rank = Cluster<kSharing>::Rank();
  const auto load_w = [&](const Part& part, int step, int stage) {
    const uint32_t full = SmemAddress(&smem.full[stage]);
    MbarrierArriveExpect(full, S::kXBytes + S::kWBytes);
    TmaLoad2(SmemAddress(smem.w[stage]), &w_map, full, step * kColumns, static_cast<int>(part.feature0));
  };
  const auto load_x = [&](const Part& part, int step, int stage) {
    const uint32_t x = SmemAddress(smem.x[stage]), full = SmemAddress(&smem.full[stage]);
    if constexpr (kSplit) {
      TmaLoad2(x, &x_map, full, step * kColumns, part.row0);
    } else {
      TmaLoad2Multicast(x + rank * (S::kXBytes / kSharing), &x_map, full, step * kColumns,
                        part.row0 + rank * (kRows / kSharing), (1 << kSharing) - 1);
    }
  };
  Ring<S::kStages> ring;
  Parts<kRows, kSplit> parts(p);
  const Part first = parts.Now();
  const int early = min(first.end - first.begin, S::kStages);
  for (int i = 0; i < early; ++i) load_w(first, first.begin + i, i);  // while the kernel in front may still make x
  WaitForPrevious();
  for (int i = 0; i < early; ++i, ring.Advance()) load_x(first, first.begin + i, i);
  for (int done = early; parts.More(); parts.Advance(), done = 0) {
    const Part part = parts.Now();
    for (int step = part.begin + done; step < part.end; ++step, ring.Advance()) {
      MbarrierWait(SmemAddress(&smem.empty[ring.stage]), ring.phase ^ 1);
      load_w(part, step, ring.stage);
      load_x(part, step, ring.stage);
    }
  }
}

// This thread's part of a stage of codes as left operands. `w`: the stage; `row`: of its first feature in the tile.
__device__ __forceinline__ void Widen(const char* w, int row, int c, uint32_t (&codes)[kColumns / 16][4]) {
  const int swizzle = row / 2 % 4;  // of row + 8, too
#pragma unroll
  for (int k = 0; k < kColumns / 16; ++k) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // features 16 w + g and 16 w + g + 8
      const char* const at = w + (row + 8 * half) * kColumns + (k ^ swizzle) * 16 + 4 * c;
      WidenFp8Word(*reinterpret_cast<const uint32_t*>(at), codes[k][half], codes[k][2 + half]);
    }
  }
}

// Begins of sums += codes x^T over a stage; `fresh`: sums = codes x^T.
template <int kRows>
__device__ __forceinline__ void Issue(Sums<kRows>& sums, uint32_t (&codes)[kColumns / 16][4], uint32_t x, bool fresh) {
  WgmmaPin(codes);
  WgmmaPin(sums);
  WgmmaFence();
#pragma unroll
  for (int k = 0; k < kColumns / 16; ++k) {
    WgmmaRsK(sums, codes[k], WgmmaDescriptor(x + k * 32, 16, 1024), !fresh || k != 0);
  }
  WgmmaCommit();
}

// Gives a stage back to the loaders that write into it.
template <bool kSplit>
__device__ __forceinline__ void Release(uint64_t* empty) {
  const int thread = threadIdx.x % 128;
  if constexpr (kSplit) {
    if (thread == 0) MbarrierArrive(SmemAddress(empty));
  } else {
    if (thread < kSharing) MbarrierArriveAt(SmemAddress(empty), thread);
  }
}

// The sums of the block's steps; with groups they are scaled.
template <int kRows, bool kGroups, bool kSplit>
__device__ void Multiply(Smem<kRows, kGroups>& smem, const Fp8GemmParams& p, const Part& part, int row,
                         Ring<Smem<kRows, kGroups>::kStages>& ring, Sums<kRows>& sums) {
  static_assert(!kGroups || kRows <= 128, "sums and totals share the registers");
  const int c = threadIdx.x % 4;
  float totals[kGroups ? kRows / 2 : 1] = {};
  uint32_t codes[2][kColumns / 16][4];  // of the even and the odd steps
  const auto issue = [&](uint32_t(&operand)[kColumns / 16][4], bool fresh) {
    MbarrierWait(SmemAddress(&smem.full[ring.stage]), ring.phase);
    Widen(smem.w[ring.stage], row, c, operand);
    Issue<kRows>(sums, operand, SmemAddress(smem.x[ring.stage]), fresh);
  };
#pragma unroll
  for (float& x : sums) x = 0;
#pragma unroll 1
  for (int step = part.begin; step < part.end; step += kStepsOfGroup) {
    const int before = ring.Before(), even = ring.stage;
    issue(codes[0], kGroups);
    if constexpr (!kGroups) {
      WgmmaWait<1>();
      if (step > part.begin) Release<kSplit>(&smem.empty[before]);
    }
    ring.Advance();
    issue(codes[1], false);
    if constexpr (kGroups) {
      const Scales scale(p, part.feature0 + row, step / kStepsOfGroup);
      WgmmaWait<0>();
      WgmmaPin(sums);
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) totals[i] = fmaf(sums[i], scale.of[i % 4 / 2], totals[i]);
      Release<kSplit>(&smem.empty[even]);
      Release<kSplit>(&smem.empty[ring.stage]);
    } else {
      WgmmaWait<1>();
      Release<kSplit>(&smem.empty[even]);
    }
    ring.Advance();
  }
  WgmmaWait<0>();
  WgmmaPin(sums);
  if constexpr (kGroups) {
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) sums[i] = totals[i];
  } else {
    if (part.end > part.begin) Release<kSplit>(&smem.empty[ring.Before()]);
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <int kRows, bool kGroups, bool kSplit>
__global__ void __launch_bounds__(kThreads, Budget<kRows, kGroups>::kBlocks)
    WgmmaKernel(const __grid_constant__ Fp8GemmParams p, const __grid_constant__ CUtensorMap x_map,
                const __grid_constant__ CUtensorMap w_map) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Smem<kRows, kGroups>;
  extern __shared__ char raw[];
  LetNextStart();
  auto& smem = *reinterpret_cast<S*>(raw + (1024 - SmemAddress(raw) % 1024) % 1024);
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      MbarrierInit(SmemAddress(&smem.full[i]), 1);
      MbarrierInit(SmemAddress(&smem.empty[i]), kConsumers * (kSplit ? 1 : kSharing));
    }
    MbarrierInitFence();
    PrefetchTensorMap(&x_map);
    PrefetchTensorMap(&w_map);
  }
  __syncthreads();
  if constexpr (!kSplit) ClusterMeet();  // the other block writes into this one's memory
  float* const shared_sums = reinterpret_cast<float*>(&smem);
  if (threadIdx.x < 128) {
    SetMaxRegistersDown<Budget<kRows, kGroups>::kProducerRegisters>();
    if (threadIdx.x == 0) Load<kRows, kGroups, kSplit>(smem, p, x_map, w_map);
    __syncwarp();
    if constexpr (kSplit) ClusterSync();
  } else {
    SetMaxRegistersUp<Budget<kRows, kGroups>::kConsumerRegisters>();
    const int row = static_cast<int>(threadIdx.x / 128 - 1) * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    Sums<kRows> sums;
    Ring<S::kStages> ring;
    Parts<kRows, kSplit> parts(p);
    if constexpr (kSplit) {
      const Part part = parts.Now();
      Multiply<kRows, kGroups, kSplit>(smem, p, part, row, ring, sums);
      WaitForPrevious();                      // y may still be read
      NamedBarrierSync(1, kConsumerThreads);  // nobody reads the ring any more
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) {
        shared_sums[(i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2) * kPitch + row + i % 4 / 2 * 8] = sums[i];
      }
      ClusterSync();
      if (ClusterBlocks() == 1) AddAndStore<kRows, kGroups, 1>(p, part, shared_sums);
      if (ClusterBlocks() == 2) AddAndStore<kRows, kGroups, 2>(p, part, shared_sums);
      if (ClusterBlocks() == 4) AddAndStore<kRows, kGroups, 4>(p, part, shared_sums);
      if (ClusterBlocks() == 8) AddAndStore<kRows, kGroups, 8>(p, part, shared_sums);
    } else {
#pragma unroll 1
      for (; parts.More(); parts.Advance()) {
        const Part part = parts.Now();
        Multiply<kRows, kGroups, kSplit>(smem, p, part, row, ring, sums);
        WaitForPrevious();  // y may still be read
        Store<kRows, kGroups>(p, part.row0, part.feature0 + row, sums);
      }
    }
  }
  ClusterMeet();  // another block may still write into this one's memory, or read it
#endif
}

template <int kRows, bool kGroups, bool kSplit>
cudaError_t Launch(const Fp8GemmArgs& a, int split, cudaStream_t stream) {
  CUtensorMap x_map, w_map;
  const auto rows = static_cast<uint64_t>(a.num_rows), out = static_cast<uint64_t>(a.out_features),
             in = static_cast<uint64_t>(a.in_features);
  if (!EncodeMatrix(&x_map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, a.x, rows, in, 2 * in, kSplit ? kRows : kRows / kSharing,
                    kColumns, CU_TENSOR_MAP_SWIZZLE_128B) ||
      !EncodeMatrix(&w_map, CU_TENSOR_MAP_DATA_TYPE_UINT8, a.codes, out, in, in, kFeatures, kColumns,
                    CU_TENSOR_MAP_SWIZZLE_64B)) {
    return cudaErrorNotSupported;
  }
  int capability = 0, num_sms = 0;
  cudaError_t e = DeviceInfo(&capability, &num_sms);
  if (e != cudaSuccess) return e;
  using Uses = Budget<kRows, kGroups>;
  const int blocks = kSplit ? split : kSharing;
  const int64_t features = kSplit ? kFeatures : kSharing * kFeatures;
  int64_t clusters = (a.out_features + features - 1) / features * ((a.num_rows + kRows - 1) / kRows);
  if (!kSplit) clusters = std::min<int64_t>(clusters, num_sms * Uses::kBlocks / kSharing);
  // Few blocks: each gets an SM of its own, which it does when two do not fit. Not in larger clusters: too few of these
  // find that many SMs beside each other.
  const bool alone = blocks <= 2 && blocks * clusters <= num_sms;
  constexpr int kSmem = sizeof(Smem<kRows, kGroups>) + 1024, kSmemAlone = std::max(kSmem, 120 * 1024);
  const auto kernel = WgmmaKernel<kRows, kGroups, kSplit>;
  e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemAlone);
  if (e != cudaSuccess) return e;
  return LaunchClusters(!a.codes_are_new, blocks, kernel, dim3(static_cast<unsigned>(blocks * clusters)),
                        dim3(kThreads), alone ? kSmemAlone : kSmem, stream, ToFp8Params(a), x_map, w_map);
}

template <int kRows>
cudaError_t LaunchRows(const Fp8GemmArgs& a, int split, cudaStream_t stream) {
  if constexpr (kRows <= 128) {
    if (a.scale_group != 0 && split > 0) return Launch<kRows, true, true>(a, split, stream);
    if (split > 0) return Launch<kRows, false, true>(a, split, stream);
  }
  if constexpr (kRows >= 64 && kRows <= 128) {
    if (a.scale_group != 0 && split == 0) return Launch<kRows, true, false>(a, split, stream);
  }
  if constexpr (kRows >= 64) {
    if (a.scale_group == 0 && split == 0) return Launch<kRows, false, false>(a, split, stream);
  }
  return cudaErrorNotSupported;
}

}  // namespace

cudaError_t TiledFp8GemmSm90(const Fp8GemmArgs& a, Fp8Tiling tiling, cudaStream_t stream) {
  if (a.num_rows == 0) return cudaSuccess;
  if (!ServedFp8(a)) return cudaErrorNotSupported;
  switch (tiling.rows) {
    case 16:
      return LaunchRows<16>(a, tiling.split, stream);
    case 32:
      return LaunchRows<32>(a, tiling.split, stream);
    case 64:
      return LaunchRows<64>(a, tiling.split, stream);
    case 128:
      return LaunchRows<128>(a, tiling.split, stream);
    case 256:
      return LaunchRows<256>(a, tiling.split, stream);
    default:
      return cudaErrorNotSupported;
  }
}

}  // namespace spl::kernels::cuda
