// A tile of a product with an FP8 weight on sm_90: its memory, what a block computes of it, and how the blocks of its
// cluster meet. Included by .cu files only.
#pragma once

#include <algorithm>

#include "kernels/cuda/cuda_cluster.h"
#include "kernels/cuda/cuda_ptx.h"
#include "kernels/gemm/fp8_gemm_device.h"

namespace spl::kernels::cuda {

inline constexpr int kConsumers = 2, kThreads = 128 * (1 + kConsumers), kConsumerThreads = 128 * kConsumers;
inline constexpr int kFeatures = kFp8TileFeatures, kColumns = kFp8TileColumns;
static_assert(kFeatures == 64 * kConsumers);
inline constexpr int kSharing = 2;  // blocks that share x
inline constexpr int kStepsOfGroup = kFp8Group / kColumns;
static_assert(kStepsOfGroup == 2);
inline constexpr int kRowTilesOfBand = 8;  // row tiles that take turns at a weight, so that both stay in the L2 cache
inline constexpr int kPitch = kFeatures + 4;  // a row of sums in shared memory: lanes store to different banks

// How a tile uses its SM.
template <int kRows, bool kGroups>
struct Budget {
  static constexpr int kBlocks = kRows <= (kGroups ? 32 : 64) ? 2 : 1;  // on one SM
  static constexpr int kRingBytes = (kBlocks == 2 ? 98 : 200) * 1024;
  static constexpr int kProducerRegisters = kBlocks == 2 ? 24 : 40, kConsumerRegisters = kBlocks == 2 ? 104 : 232;
};

template <int kRows, bool kGroups>
struct alignas(1024) Smem {
  static constexpr int kXBytes = kRows * kColumns * 2, kWBytes = kFeatures * kColumns;
  static constexpr int kStages = std::min(Budget<kRows, kGroups>::kRingBytes / (kXBytes + kWBytes), 12);
  static_assert(kRows * kPitch * 4 <= kStages * (kXBytes + kWBytes));
  char x[kStages][kXBytes];  // rows of 128 bytes, swizzled
  char w[kStages][kWBytes];  // rows of 64 bytes, swizzled
  uint64_t full[kStages], empty[kStages];
};

// A block's work at one time.
struct Part {
  int row0;
  int64_t feature0;
  int begin, end;  // steps
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ int ClusterBlocks() {
  int blocks;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks));
  return blocks;
}

// The parts of this block: one if columns are split, else as many as there are for its cluster.
template <int kRows, bool kSplit>
class Parts {
 public:
  __device__ explicit Parts(const Fp8GemmParams& p)
      : steps_(kStepsOfGroup * static_cast<int>((p.in + kFp8Group - 1) / kFp8Group)),  // the last may be zeros
        row_tiles_((p.num_rows + kRows - 1) / kRows),
        feature_tiles_(static_cast<int>((p.out + kTileFeatures - 1) / kTileFeatures)),
        cluster_(static_cast<int>(blockIdx.x) / ClusterBlocks()) {}
  __device__ bool More() const { return cluster_ < row_tiles_ * feature_tiles_; }
  __device__ void Advance() { cluster_ += static_cast<int>(gridDim.x) / ClusterBlocks(); }
  __device__ Part Now() const {
    if constexpr (kSplit) {
      const int blocks = ClusterBlocks(), each = (steps_ / kStepsOfGroup + blocks - 1) / blocks * kStepsOfGroup;
      const int begin = min(steps_, Cluster<kSharing>::Rank() * each);
      return {cluster_ % row_tiles_ * kRows, cluster_ / row_tiles_ * int64_t{kFeatures}, begin,
              min(steps_, begin + each)};
    }
    // Clusters walk the row tiles of a band before they go on to the next features.
    const int in_band = kRowTilesOfBand * feature_tiles_, at = cluster_ % in_band;
    const int first = cluster_ / in_band * kRowTilesOfBand, tiles = min(kRowTilesOfBand, row_tiles_ - first);
    return {(first + at % tiles) * kRows, at / tiles * int64_t{kTileFeatures} + Cluster<kSharing>::Rank() * kFeatures,
            0, steps_};
  }

 private:
  static constexpr int kTileFeatures = kSplit ? kFeatures : kSharing * kFeatures;  // a cluster's
  const int steps_, row_tiles_, feature_tiles_;
  int cluster_;
};

// A warpgroup's sums of 64 features x kRows rows. Lane 4 g + c of warp w has features 16 w + g and 16 w + g + 8, and of
// each eight rows 2 c and 2 c + 1; element i is of feature i % 4 / 2 and row i / 4 * 8 + 2 c + i % 2.
template <int kRows>
using Sums = float[kRows / 2];

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace spl::kernels::cuda
