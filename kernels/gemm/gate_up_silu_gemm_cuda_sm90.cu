// Gate and up with SiLU on Hopper: a tile is 128 rows x kFeatures features of out. Its 2 kFeatures features of the
// weight, those of gate and behind them the same ones of up, are one right operand: a thread then has the sums of gate
// and of up of the same elements, and out is made in registers.
//
// A loader thread keeps a ring of steps full, 64 columns of x and of the weight each; two warpgroups of 64 rows each
// empty it. The two blocks of a cluster have tiles side by side, and each loads half of what both need: the same
// features and neighbouring rows (one loads gate and the other up), or, for the last of an odd number of row tiles, the
// same rows and neighbouring features (each loads half of x). While one warpgroup makes out the other one multiplies.
#include <algorithm>

#include "kernels/cuda/cuda_cluster.h"
#include "kernels/cuda/cuda_device_info.h"
#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/cuda_ptx.h"
#include "kernels/cuda/cuda_tensor_map.h"
#include "kernels/gemm/gate_up_silu_gemm_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kConsumers = 2, kThreads = 128 * (1 + kConsumers);
constexpr int kRows = 64 * kConsumers, kColumns = 64;
constexpr int kBlocks = 2;           // of a cluster
constexpr int kRowTilesOfBand = 16;  // row tiles that take turns at a weight, so that both stay in the L2 cache
static_assert(kRowTilesOfBand % kBlocks == 0);

// The ring in shared memory, by addresses from a base that is a multiple of 1024.
template <int kFeatures>
struct Stages {
  static constexpr int kXBytes = kRows * kColumns * 2, kGateBytes = kFeatures * kColumns * 2;
  static constexpr int kWBytes = 2 * kGateBytes, kBytes = kXBytes + kWBytes;  // of a stage
  static constexpr int kCount = 225 * 1024 / kBytes;
  static constexpr int kSmem = kCount * (kBytes + 16) + 1024;
  static_assert(kXBytes % 1024 == 0 && kGateBytes % 1024 == 0 && kSmem <= 227 * 1024);
  uint32_t base;
  __device__ uint32_t X(int i) const { return base + i * kXBytes; }                     // rows of 128 bytes, swizzled
  __device__ uint32_t W(int i) const { return base + kCount * kXBytes + i * kWBytes; }  // gate, then up; likewise
  __device__ uint32_t Full(int i) const { return base + kCount * kBytes + 8 * i; }
  __device__ uint32_t Empty(int i) const { return base + kCount * (kBytes + 8) + 8 * i; }
};

struct Shape {
  int num_rows, width, steps;
  int row_tiles, bands, tiles_of_band;  // the last band has the row tiles that are left
  int feature_pairs;                    // pairs of feature tiles
  __host__ __device__ int ClusterTiles() const { return feature_pairs * row_tiles; }
};

Shape ShapeOf(const GateUpSiluGemmArgs& a, int features) {
  const auto ceil = [](int64_t n, int64_t d) { return static_cast<int>((n + d - 1) / d); };
  Shape s{};
  s.num_rows = static_cast<int>(a.num_rows);
  s.width = static_cast<int>(a.width);
  s.steps = ceil(a.in_features, kColumns);
  s.row_tiles = ceil(a.num_rows, kRows);
  s.bands = ceil(s.row_tiles, kRowTilesOfBand);
  s.tiles_of_band = kBlocks * ceil(ceil(s.row_tiles, s.bands), kBlocks);
  s.feature_pairs = ceil(a.width, kBlocks * features);
  return s;
}

// Maps of half of a tile's x, of all of it, and of its gate or up.
struct Maps {
  CUtensorMap half_x, x, w;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

struct Tile {
  int row0, feature0;   // this block's
  bool shares_weights;  // with the other block of the cluster; else x
};

// The tiles of this block, in the order in which it takes them. A band goes through the features once.
template <int kFeatures>
class Tiles {
 public:
  __device__ explicit Tiles(const Shape& s) : s_(s), cluster_(static_cast<int>(blockIdx.x) / kBlocks) {}
  __device__ bool More() const { return cluster_ < s_.ClusterTiles(); }
  __device__ void Advance() { cluster_ += static_cast<int>(gridDim.x) / kBlocks; }
  __device__ Tile Now() const {
    const int rank = Cluster<kBlocks>::Rank();
    const int in_band = s_.feature_pairs * s_.tiles_of_band, band = cluster_ / in_band, at = cluster_ % in_band;
    const int first = band * s_.tiles_of_band, rows = min(s_.tiles_of_band, s_.row_tiles - first);
    // A pair of feature tiles has as many cluster tiles as the band has row tiles: two for each pair of them, one for
    // the last of an odd number.
    const int feature = at / rows * kBlocks, place = at % rows, pairs = rows / kBlocks;
    if (place == kBlocks * pairs) return {(first + place) * kRows, (feature + rank) * kFeatures, false};
    return {(first + place % pairs * kBlocks + rank) * kRows, (feature + place / pairs) * kFeatures, true};
  }

 private:
  const Shape& s_;
  int cluster_;
};

template <int kFeatures>
__device__ void Load(Stages<kFeatures> stages, const Shape& s, const Maps& maps) {
  using S = Stages<kFeatures>;
  constexpr uint16_t kBoth = (1 << kBlocks) - 1;
  const int rank = Cluster<kBlocks>::Rank();
  const auto load_w = [&](const Tile& tile, int step, int stage) {
    const uint32_t w = stages.W(stage), full = stages.Full(stage);
    MbarrierArriveExpect(full, S::kBytes);
    if (tile.shares_weights) {
      TmaLoad2Multicast(w + rank * S::kGateBytes, &maps.w, full, step * kColumns, tile.feature0 + rank * s.width,
                        kBoth);
    } else {
      TmaLoad2(w, &maps.w, full, step * kColumns, tile.feature0);
      TmaLoad2(w + S::kGateBytes, &maps.w, full, step * kColumns, tile.feature0 + s.width);
    }
  };
  const auto load_x = [&](const Tile& tile, int step, int stage) {
    const uint32_t x = stages.X(stage), full = stages.Full(stage);
    if (tile.shares_weights) {
      TmaLoad2(x, &maps.x, full, step * kColumns, tile.row0);
    } else {
      TmaLoad2Multicast(x + rank * (S::kXBytes / kBlocks), &maps.half_x, full, step * kColumns,
                        tile.row0 + rank * (kRows / kBlocks), kBoth);
    }
  };
  Ring<S::kCount> ring;
  Tiles<kFeatures> tiles(s);
  const int early = min(s.steps, S::kCount);
  for (int i = 0; i < early; ++i) load_w(tiles.Now(), i, i);  // while the kernel in front may still make x
  WaitForPrevious();
  for (int i = 0; i < early; ++i, ring.Advance()) load_x(tiles.Now(), i, i);
  for (int done = early; tiles.More(); tiles.Advance(), done = 0) {
    const Tile tile = tiles.Now();
#pragma unroll 1
    for (int step = done; step < s.steps; ++step, ring.Advance()) {
      MbarrierWait(stages.Empty(ring.stage), ring.phase ^ 1);
      load_w(tile, step, ring.stage);
      load_x(tile, step, ring.stage);
    }
  }
}

// A warpgroup's sums of 64 rows: gate in the first half, up in the second. Lane 4 g + c of warp w has rows 16 w + g and
// 16 w + g + 8, and of each eight features 2 c and 2 c + 1; element i of a half is of feature i / 4 * 8 + 2 c + i % 2
// and of the row i % 4 / 2.
template <int kFeatures>
using Sums = float[kFeatures];

// Gives a stage back to both loaders: each writes into both blocks.
__device__ __forceinline__ void Release(uint32_t empty) {
  const int thread = threadIdx.x % 128;
  if (thread < kBlocks) MbarrierArriveAt(empty, thread);
}

// The sums of a tile over all steps. `x`, `w`: descriptors of the warpgroup's operands in the first stage.
template <int kFeatures>
__device__ __forceinline__ void Multiply(Stages<kFeatures> stages, int steps, uint64_t x, uint64_t w,
                                         Ring<Stages<kFeatures>::kCount>& ring, Sums<kFeatures>& sums) {
  using S = Stages<kFeatures>;
#pragma unroll 1
  for (int step = 0; step < steps; ++step, ring.Advance()) {
    MbarrierWait(stages.Full(ring.stage), ring.phase);
    const uint64_t x_stage = x + ring.stage * (S::kXBytes / 16), w_stage = w + ring.stage * (S::kWBytes / 16);
    WgmmaPin(sums);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < kColumns / 16; ++k) WgmmaSsK(sums, x_stage + 2 * k, w_stage + 2 * k, step > 0 || k > 0);
    WgmmaCommit();
    WgmmaPin(sums);
    WgmmaWait<1>();
    if (step > 0) Release(stages.Empty(ring.Before()));
  }
  WgmmaWait<0>();
  WgmmaPin(sums);
  Release(stages.Empty(ring.Before()));
}

// silu(gate) * up. The quotient is 2 ulp off.
__device__ __forceinline__ float SiluMul(float gate, float up) {
  constexpr float kLog2e = 1.4426950408889634f;
  return gate * Reciprocal(1.0f + Exp2(-kLog2e * gate)) * up;
}

// Makes and stores a warpgroup's part of out. `row`: the first of this thread's two.
template <int kFeatures>
__device__ __forceinline__ void Store(const Sums<kFeatures>& sums, const Shape& s, int row, int feature0,
                                      __nv_bfloat16* out) {
  const int c = threadIdx.x % 4;
  const bool right = c % 2 != 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int of_half = row + 8 * half;
    __nv_bfloat16* const to = out + static_cast<int64_t>(of_half) * s.width;
#pragma unroll
    for (int j = 0; j < kFeatures / 8; j += 2) {
      uint32_t word[2];  // of eight features each
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const int gate = 4 * (j + b) + 2 * half, up = kFeatures / 2 + gate;
        word[b] = PackBf16(SiluMul(sums[gate], sums[up]), SiluMul(sums[gate + 1], sums[up + 1]));
      }
      // Two lanes side by side exchange words: each then has four features of the same eight.
      const uint32_t got = __shfl_xor_sync(0xffffffffu, right ? word[0] : word[1], 1);
      const uint2 four = right ? uint2{got, word[1]} : uint2{word[0], got};
      const int feature = feature0 + 8 * (j + c % 2) + 4 * (c / 2);
      if (of_half < s.num_rows && feature < s.width) *reinterpret_cast<uint2*>(to + feature) = four;
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <int kFeatures>
__global__ void __launch_bounds__(kThreads, 1)
    GateUpSiluKernel(const __grid_constant__ Shape s, __nv_bfloat16* out, const __grid_constant__ Maps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Stages<kFeatures>;
  extern __shared__ char raw[];
  LetNextStart();
  S stages{(SmemAddress(raw) + 1023) / 1024 * 1024};
  asm volatile("" : "+r"(stages.base));  // not to be worked out again in every step
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kCount; ++i) {
      MbarrierInit(stages.Full(i), 1);
      MbarrierInit(stages.Empty(i), kConsumers * kBlocks);
    }
    MbarrierInitFence();
    PrefetchTensorMap(&maps.half_x);
    PrefetchTensorMap(&maps.x);
    PrefetchTensorMap(&maps.w);
  }
  __syncthreads();
  ClusterMeet();  // the other block writes into this one's memory
  if (threadIdx.x < 128) {
    SetMaxRegistersDown<40>();
    if (threadIdx.x == 0) Load(stages, s, maps);
    __syncwarp();
  } else {
    SetMaxRegistersUp<232>();
    const int group = static_cast<int>(threadIdx.x) / 128 - 1;
    const int row = group * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const uint64_t x = WgmmaDescriptor(stages.X(0) + group * (64 * kColumns * 2), 16, 1024);
    const uint64_t w = WgmmaDescriptor(stages.W(0), 16, 1024);
    Sums<kFeatures> sums;
    Ring<S::kCount> ring;
#pragma unroll 1
    for (Tiles<kFeatures> tiles(s); tiles.More(); tiles.Advance()) {
      const Tile tile = tiles.Now();
      Multiply<kFeatures>(stages, s.steps, x, w, ring, sums);
      WaitForPrevious();  // out may still be read
      Store<kFeatures>(sums, s, tile.row0 + row, tile.feature0, out);
    }
  }
  ClusterMeet();  // the other block may still write into this one's memory
#endif
}

template <int kFeatures>
cudaError_t Launch(const GateUpSiluGemmArgs& a, int clusters, cudaStream_t stream) {
  const auto rows = static_cast<uint64_t>(a.num_rows), in = static_cast<uint64_t>(a.in_features),
             features = static_cast<uint64_t>(2 * a.width);
  const auto encode = [&](CUtensorMap* map, const void* base, uint64_t num_rows, uint32_t box_rows) {
    return EncodeMatrix(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, base, num_rows, in, 2 * in, box_rows, kColumns,
                        CU_TENSOR_MAP_SWIZZLE_128B);
  };
  Maps maps;
  if (!encode(&maps.half_x, a.x, rows, kRows / kBlocks) || !encode(&maps.x, a.x, rows, kRows) ||
      !encode(&maps.w, a.weight, features, kFeatures)) {
    return cudaErrorNotSupported;
  }
  constexpr int kSmem = Stages<kFeatures>::kSmem;
  const auto kernel = GateUpSiluKernel<kFeatures>;
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem);
  if (e != cudaSuccess) return e;
  return LaunchClustersEarly(kBlocks, kernel, dim3(static_cast<unsigned>(kBlocks * clusters)), dim3(kThreads), kSmem,
                             stream, ShapeOf(a, kFeatures), static_cast<__nv_bfloat16*>(a.out), maps);
}

bool Served(const GateUpSiluGemmArgs& a) {
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  const auto served = [](int64_t n) { return n > 0 && n < kGateUpSiluSizes; };
  return served(a.num_rows) && served(a.width) && served(a.in_features) && a.width % 8 == 0 && a.in_features % 8 == 0 &&
         aligned(a.x) && aligned(a.weight) && aligned(a.out);
}

// How often the busiest cluster computes a tile.
int Turns(const GateUpSiluGemmArgs& a, int features, int most_clusters) {
  return (ShapeOf(a, features).ClusterTiles() + most_clusters - 1) / most_clusters;
}

}  // namespace

cudaError_t GateUpSiluGemm(const GateUpSiluGemmArgs& a, cudaStream_t stream) {
  if (a.num_rows == 0) return cudaSuccess;
  int capability = 0, num_sms = 0;
  const cudaError_t e = DeviceInfo(&capability, &num_sms);
  if (e != cudaSuccess) return e;
  if (capability != 90 || !Served(a)) return cudaErrorNotSupported;
  // Tiles of 128 features read less for each product. Tiles of 112 may fill the last turn better: 14336 features are
  // 128 of them, almost a turn of 132 SMs.
  const int most = std::max(1, num_sms / kBlocks), wide = Turns(a, 128, most), narrow = Turns(a, 112, most);
  // As few clusters as end as early: the others would have a turn less.
  const auto clusters = [&](int features, int turns) {
    return (ShapeOf(a, features).ClusterTiles() + turns - 1) / turns;
  };
  return narrow * 112 < wide * 128 ? Launch<112>(a, clusters(112, narrow), stream)
                                   : Launch<128>(a, clusters(128, wide), stream);
}

}  // namespace spl::kernels::cuda
