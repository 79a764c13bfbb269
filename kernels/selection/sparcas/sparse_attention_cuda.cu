// One cluster of blocks per stream does all of a step: it scores the packed keys, chooses, deals the chosen rows evenly
// among its blocks, and attends to them.
//
// Keys are scored twice. The first pass only finds each head's sum of exponentials; the second one, which finds the
// keys in the second-level cache, makes weights of the scores at once. To keep the terms of all heads in between would
// take 16 bytes a position: with 4, the key of the choice alone, two blocks fit on a multiprocessor, and one of them
// reads while the other computes or waits.
#include <algorithm>

#include "kernels/cuda/cuda_launch.h"
#include "kernels/selection/sparcas/sparse_attention_cuda.h"
#include "kernels/selection/sparcas/sparse_stream_cuda.h"

namespace spl::kernels::cuda {
namespace {

using namespace sparse_attention;  // NOLINT: the stages of this kernel

constexpr int64_t kReservedSmem = 1 << 10;  // bytes of each block that the system takes
constexpr int kFewestStages = 2;
constexpr int kMostPositions = 24 << 10;  // of a block, for which its shared memory is enough

constexpr int PerSm(int threads) { return 512 / threads; }

template <int kBlocks, int kThreads, bool kWide, int kDim>
__global__ void __launch_bounds__(kThreads, PerSm(kThreads)) SparseAttentionKernel(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) char raw[];
  LetNextStart();
  const int rank = Cluster<kBlocks>::Rank();
  const int stream = blockIdx.x / kBlocks, sequence = stream / p.num_kv_heads, head = stream % p.num_kv_heads;
  if (!p.selection.Selects(sequence, head)) {
    WaitForPrevious();
    return;
  }
  StreamStep<kBlocks, kThreads, kWide, kDim>(p, sequence, head, rank, raw).Run();
#endif
}

struct Layout {
  int32_t block_tiles = 0, block_entries = 0, stages = 0;
  size_t smem_bytes = 0;
};
// smem_per_sm: what the blocks of a multiprocessor share.
template <int kBlocks, int kThreads, bool kWide, int kDim>
Layout LayoutOf(int64_t max_kv_len, int64_t list_stride, int64_t smem_per_sm) {
  constexpr int kWarps = kThreads / 32;
  const int64_t tiles = (max_kv_len + kTile - 1) / kTile, unit = (tiles + kUnits - 1) / kUnits;
  Layout l;
  l.block_tiles = static_cast<int32_t>((kUnits + kBlocks - 1) / kBlocks * unit);
  const auto most = static_cast<int>(std::min(list_stride, max_kv_len));
  l.block_entries = listed_rows::PartEntries(most) * (listed_rows::kParts / kBlocks);
  const int64_t keys = int64_t{l.block_tiles} * kTile * 4;
  const int64_t fixed = static_cast<int64_t>(sizeof(Smem < kBlocks, kThreads, kWide ? 8 : 4, kDim >)) +
                        int64_t{l.block_entries} * 4 + (l.block_tiles + 3) / 4 * 16 + keys +
                        kWarps * packed_keys::TileRing::Bytes(0);
  const int64_t room = smem_per_sm / PerSm(kThreads) - kReservedSmem - fixed;
  const int64_t of_warp = (kUnits / kBlocks + kWarps - 1) / kWarps * unit;  // tiles
  l.stages = static_cast<int32_t>(
      std::clamp<int64_t>(room / (kWarps * kPackedTileBytes), kFewestStages,
                          std::clamp<int64_t>(of_warp, kFewestStages, packed_keys::TileRing::kMaxStages)));
  const int64_t stages = int64_t{kWarps} * kPackedTileBytes * l.stages;
  const int64_t results = sizeof(listed_rows::Results < kBlocks, kWide ? 8 : 4, kDim >);
  const int64_t reused = keys + kWarps * packed_keys::TileRing::Bytes(0) + stages;
  l.smem_bytes = static_cast<size_t>(fixed + stages + std::max<int64_t>(results - reused, 0));
  return l;
}

struct Device {
  int capability = 0, num_sms = 0;
  int64_t smem_per_sm = 0;
};
cudaError_t Find(Device& d) {
  int device = 0, smem = 0;
  cudaError_t e = DeviceInfo(&d.capability, &d.num_sms);
  if (e == cudaSuccess) e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&smem, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  d.smem_per_sm = smem;
  return e;
}

template <int kBlocks, int kThreads, bool kWide, int kDim>
cudaError_t Launch(Params p, const SparseArgs& a, const Device& d, cudaStream_t stream) {
  static_assert(sizeof(Smem < kBlocks, kThreads, kWide ? 8 : 4, kDim >) % 16 == 0);
  const Layout l = LayoutOf<kBlocks, kThreads, kWide, kDim>(a.max_kv_len, a.lists.stride, d.smem_per_sm);
  p.block_tiles = l.block_tiles;
  p.block_entries = l.block_entries;
  p.stages = l.stages;
  const auto kernel = SparseAttentionKernel<kBlocks, kThreads, kWide, kDim>;
  const cudaError_t e =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(l.smem_bytes));
  if (e != cudaSuccess) return e;
  const dim3 grid(static_cast<unsigned>(kBlocks) * p.num_kv_heads * a.batch.num_sequences);
  return LaunchClusters(a.early, kBlocks, kernel, grid, kThreads, l.smem_bytes, stream, p);
}

// Few streams get as many warps as there are. A cluster must fit among the multiprocessors of one part of the chip, so
// that not all of them find a place: 14 or 15 clusters of 8 with a multiprocessor a block run at once on 132. Long
// contexts need more blocks for their keys.
SparseForm AutoForm(const SparseArgs& a, const Device& d) {
  const int64_t streams = int64_t{a.batch.num_sequences} * a.heads.num_kv_heads;
  const auto fits = [&](int cluster) { return a.max_kv_len / cluster <= kMostPositions; };
  for (const int cluster : {8, 4}) {
    if (streams * cluster <= d.num_sms * 7 / 8 || !fits(cluster / 2)) return {cluster, 512};
  }
  return {2, 512};
}

// More than 4 query heads: the results of 2 blocks do not fit into their shared memory.
template <int kBlocks, int kThreads>
cudaError_t LaunchShape(const Params& p, const SparseArgs& a, const Device& d, cudaStream_t stream) {
  const bool wide = p.group > 4;
  if constexpr (kBlocks == 2) {
    if (wide) return LaunchShape<4, kThreads>(p, a, d, stream);
    return a.heads.head_dim == 64 ? Launch<2, kThreads, false, 64>(p, a, d, stream)
                                  : Launch<2, kThreads, false, 128>(p, a, d, stream);
  }
  if (a.heads.head_dim == 64)
    return wide ? Launch<kBlocks, kThreads, true, 64>(p, a, d, stream)
                : Launch<kBlocks, kThreads, false, 64>(p, a, d, stream);
  return wide ? Launch<kBlocks, kThreads, true, 128>(p, a, d, stream)
              : Launch<kBlocks, kThreads, false, 128>(p, a, d, stream);
}

}  // namespace

bool ServesSparseAttention(int capability, const AttentionHeads& heads, DType dtype, DType pool, int64_t max_kv_len) {
  constexpr int64_t kSmem = 226 << 10;  // bytes that a block of sm_90 may have
  return capability == 90 && dtype == DType::kBF16 && pool == DType::kBF16 &&
         (heads.head_dim == 64 || heads.head_dim == 128) &&
         heads.num_qo_heads / heads.num_kv_heads <= kMaxSparseGroup &&
         static_cast<int64_t>(LayoutOf<8, 512, true, 128>(max_kv_len, kSelectBudgetMax, 0).smem_bytes) <= kSmem;
}

cudaError_t SparseAttention(const SparseArgs& a, cudaStream_t stream, SparseForm form) {
  if (a.batch.num_sequences == 0) return cudaSuccess;
  Device d;
  if (const cudaError_t e = Find(d); e != cudaSuccess) return e;
  if (!ServesSparseAttention(d.capability, a.heads, a.dtype, a.batch.pool.dtype, a.max_kv_len))
    return cudaErrorNotSupported;
  Params p{};
  p.batch = a.batch;
  p.selection = a.selection;
  p.q = static_cast<const unsigned short*>(a.q);
  p.q_row_stride = a.q_row_stride;
  p.out = static_cast<__nv_bfloat16*>(a.out);
  p.lse = a.lse;
  p.tokens = a.lists.tokens;
  p.counts = a.lists.counts;
  p.list_stride = a.lists.stride;
  p.weights = a.weights;
  p.weights_stride = a.weights_stride;
  p.dims_offset = a.dims_offset;
  p.num_kv_heads = a.heads.num_kv_heads;
  p.group = a.heads.num_qo_heads / a.heads.num_kv_heads;
  p.head_dim = a.heads.head_dim;
  p.num_dims = kPackedDims;
  p.scale = a.heads.sm_scale * kLog2e;
  p.early = a.early;
  if (form.cluster == 0) form = AutoForm(a, d);
  if (form.cluster == 8) return LaunchShape<8, 512>(p, a, d, stream);
  return form.cluster == 4 ? LaunchShape<4, 512>(p, a, d, stream) : LaunchShape<2, 512>(p, a, d, stream);
}

}  // namespace spl::kernels::cuda
