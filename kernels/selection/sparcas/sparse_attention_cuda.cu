// One cluster of blocks per stream does all of a step: it scores the packed keys, chooses, deals the chosen rows evenly
// among its blocks, and attends to them.
//
// Keys are scored twice. The first pass only finds each head's sum of exponentials; the second one makes weights of the
// scores at once. To keep the terms of all heads in between would take 16 bytes a position. Tiles that are still at
// hand keep their products, in the place of their keys. The others keep the rounded queries, where their weights will
// be.
#include <algorithm>

#include "kernels/cuda/cuda_launch.h"
#include "kernels/selection/sparcas/sparse_attention_cuda.h"
#include "kernels/selection/sparcas/sparse_stream_cuda.h"

namespace spl::kernels::cuda {
namespace {

using namespace sparse_attention;  // NOLINT: the stages of this kernel

constexpr int kFewestStages = 2;
constexpr int64_t kMostSmem = 226 << 10;               // bytes of a block of sm_90
constexpr int kThreads = 512, kWarps = kThreads / 32;  // of 128 registers: one block a multiprocessor
constexpr int HeadRows(bool wide) { return wide ? 8 : 4; }

template <int kBlocks, bool kWide, typename Pages, bool kMass>
__global__ void __launch_bounds__(kThreads, 1) SparseAttentionKernel(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) char raw[];
  LetNextStart();
  const int rank = Cluster<kBlocks>::Rank();
  const int stream = blockIdx.x / kBlocks, sequence = stream / p.num_kv_heads, head = stream % p.num_kv_heads;
  StreamStep<kBlocks, kThreads, kWide, Pages, kMass>(p, sequence, head, rank, raw).Run();
#endif
}

struct Layout {
  int32_t block_tiles = 0, block_entries = 0, stages = 0;
  size_t smem_bytes = 0;
};
template <int kBlocks, bool kWide, typename Pages>
Layout LayoutOf(int64_t max_kv_len, int64_t list_stride) {
  using SmemT = Smem<kBlocks, kThreads, HeadRows(kWide), Pages::kDim>;
  using ResultsT = ResultsOf<kBlocks, HeadRows(kWide), Pages>;
  static_assert(sizeof(SmemT) % 16 == 0);
  const int64_t tiles = (max_kv_len + kTile - 1) / kTile, unit = (tiles + kUnits - 1) / kUnits;
  Layout l;
  l.block_tiles = static_cast<int32_t>((kUnits + kBlocks - 1) / kBlocks * unit);
  const auto most = static_cast<int>(std::min(list_stride, max_kv_len));
  l.block_entries = listed_rows::PartEntries(most) * (listed_rows::kParts / kBlocks);
  const int64_t keys = int64_t{l.block_tiles} * kTile * 4, barriers = kWarps * packed_keys::TileRing::kBarrierBytes;
  const int64_t fixed = static_cast<int64_t>(sizeof(SmemT)) + int64_t{l.block_entries} * 4 +
                        (l.block_tiles + 3) / 4 * 16 + keys + barriers;
  constexpr int64_t kStageBytes = int64_t{kWarps} * kPackedTileBytes;
  const int64_t of_warp = (kUnits / kBlocks + kWarps - 1) / kWarps * unit;  // tiles
  l.stages = static_cast<int32_t>(std::clamp<int64_t>(
      (kMostSmem - fixed) / kStageBytes / 2 * 2, kFewestStages,
      std::clamp<int64_t>((of_warp + 1) / 2 * 2, kFewestStages, packed_keys::TileRing::kMaxStages)));
  const int64_t reused = keys + kStageBytes * l.stages, results = sizeof(ResultsT);
  l.smem_bytes = static_cast<size_t>(fixed + kStageBytes * l.stages + std::max<int64_t>(results - reused, 0));
  return l;
}

template <int kBlocks, bool kWide, typename Pages>
cudaError_t Launch(Params p, const SparseArgs& a, cudaStream_t stream) {
  const Layout l = LayoutOf<kBlocks, kWide, Pages>(a.max_kv_len, a.lists.stride);
  p.block_tiles = l.block_tiles;
  p.block_entries = l.block_entries;
  p.stages = l.stages;
  const auto kernel = a.kept_mass == nullptr ? SparseAttentionKernel<kBlocks, kWide, Pages, false>
                                             : SparseAttentionKernel<kBlocks, kWide, Pages, true>;
  const cudaError_t e =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(l.smem_bytes));
  if (e != cudaSuccess) return e;
  const dim3 grid(static_cast<unsigned>(kBlocks) * p.num_kv_heads * a.batch.num_sequences);
  return LaunchClusters(a.early, kBlocks, kernel, grid, kThreads, l.smem_bytes, stream, p);
}

template <int kBlocks, template <int> typename Pages>
cudaError_t LaunchShape(const Params& p, const SparseArgs& a, cudaStream_t stream) {
  const bool wide = p.group > 4;
  if (a.heads.head_dim == 64)
    return wide ? Launch<kBlocks, true, Pages<64>>(p, a, stream) : Launch<kBlocks, false, Pages<64>>(p, a, stream);
  return wide ? Launch<kBlocks, true, Pages<128>>(p, a, stream) : Launch<kBlocks, false, Pages<128>>(p, a, stream);
}

template <template <int> typename Pages>
cudaError_t LaunchCluster(int cluster, const Params& p, const SparseArgs& a, cudaStream_t stream) {
  if (cluster == 8) return LaunchShape<8, Pages>(p, a, stream);
  return cluster == 4 ? LaunchShape<4, Pages>(p, a, stream) : LaunchShape<2, Pages>(p, a, stream);
}

// Whether the keys, rows and results of a block fit into its shared memory.
template <int kBlocks, typename Pages>
bool FitsPages(bool wide, int64_t max_kv_len, int64_t list_stride) {
  const Layout l = wide ? LayoutOf<kBlocks, true, Pages>(max_kv_len, list_stride)
                        : LayoutOf<kBlocks, false, Pages>(max_kv_len, list_stride);
  return static_cast<int64_t>(l.smem_bytes) <= kMostSmem;
}
template <int kBlocks>
bool Fits(const SparseArgs& a) {
  const bool wide = a.heads.num_qo_heads / a.heads.num_kv_heads > 4;
  return a.batch.pool.dtype == DType::kE4M3
             ? FitsPages<kBlocks, listed_rows::CodePages<128>>(wide, a.max_kv_len, a.lists.stride)
             : FitsPages<kBlocks, listed_rows::WidePages<128>>(wide, a.max_kv_len, a.lists.stride);
}

// Few streams get as many warps as there are. A cluster must fit among the multiprocessors of one part of the chip, so
// that not all of them find a place: 14 or 15 clusters of 8 run at once on 132.
int AutoCluster(const SparseArgs& a, int num_sms) {
  const int64_t streams = int64_t{a.batch.num_sequences} * a.heads.num_kv_heads;
  if (streams * 8 <= num_sms * 7 / 8 || !Fits<4>(a)) return 8;
  return streams * 4 <= num_sms * 7 / 8 || !Fits<2>(a) ? 4 : 2;
}

}  // namespace

bool ServesSparseAttention(int capability, const AttentionHeads& heads, DType dtype, DType pool, int64_t max_kv_len) {
  return capability == 90 && dtype == DType::kBF16 && (pool == DType::kBF16 || pool == DType::kE4M3) &&
         (heads.head_dim == 64 || heads.head_dim == 128) &&
         heads.num_qo_heads / heads.num_kv_heads <= kMaxSparseGroup &&
         FitsPages<8, listed_rows::CodePages<128>>(true, max_kv_len, kSelectBudgetMax) &&
         FitsPages<8, listed_rows::WidePages<128>>(true, max_kv_len, kSelectBudgetMax);
}

cudaError_t SparseAttention(const SparseArgs& a, cudaStream_t stream, int cluster) {
  if (a.batch.num_sequences == 0) return cudaSuccess;
  int capability = 0, num_sms = 0;
  if (const cudaError_t e = DeviceInfo(&capability, &num_sms); e != cudaSuccess) return e;
  if (!ServesSparseAttention(capability, a.heads, a.dtype, a.batch.pool.dtype, a.max_kv_len))
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
  p.kept_mass = a.kept_mass;
  p.dims_offset = a.dims_offset;
  p.num_kv_heads = a.heads.num_kv_heads;
  p.group = a.heads.num_qo_heads / a.heads.num_kv_heads;
  p.head_dim = a.heads.head_dim;
  p.num_dims = kPackedDims;
  p.scale = a.heads.sm_scale * kLog2e;
  p.early = a.early;
  if (cluster == 0) cluster = AutoCluster(a, num_sms);
  return a.batch.pool.dtype == DType::kE4M3 ? LaunchCluster<listed_rows::CodePages>(cluster, p, a, stream)
                                            : LaunchCluster<listed_rows::WidePages>(cluster, p, a, stream);
}

}  // namespace spl::kernels::cuda
