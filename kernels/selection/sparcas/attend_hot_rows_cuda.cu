// A cluster of blocks for each stream, as in sparse_attention_cuda.cu behind the choice: the list is cut into the same
// parts, and these are added up in the same order.
#include <algorithm>

#include "kernels/cuda/cuda_device_info.h"
#include "kernels/cuda/cuda_launch.h"
#include "kernels/selection/sparcas/attend_rows_cuda.h"
#include "kernels/selection/sparcas/hot_rows_cuda.h"

namespace spl::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxGroup = 8;

struct Params {
  PagedBatch batch;
  SelectionBatch selection;
  const __nv_bfloat16* q;
  int64_t q_row_stride;
  __nv_bfloat16* out;
  float* lse;
  const int32_t* tokens;
  const int32_t* counts;
  int64_t list_stride;
  int64_t first_stream;
  int32_t num_kv_heads, group;
  int32_t block_entries;  // the most rows of a block
  float scale;            // sm_scale · log2(e)
};

template <int kBlocks, int kHeads, int kDim>
struct alignas(16) Smem {
  listed_rows::TheirResults<kBlocks, kHeads, kDim> theirs;
  listed_rows::Results<kBlocks, kHeads, kDim> results;
};

template <int kBlocks, int kHeads, typename Pages>
__global__ void __launch_bounds__(kThreads, 2) AttendKernel(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) char raw[];
  using SmemT = Smem<kBlocks, kHeads, Pages::kDim>;
  auto& s = *reinterpret_cast<SmemT*>(raw);
  auto* const rows = reinterpret_cast<int32_t*>(raw + sizeof(SmemT));
  LetNextStart();
  WaitForPrevious();
  const int rank = Cluster<kBlocks>::Rank();
  const int stream = blockIdx.x / kBlocks, sequence = stream / p.num_kv_heads, head = stream % p.num_kv_heads;
  if (!p.selection.Selects(sequence, head)) return;
  const HotRows of_sequence = p.selection.sequences[sequence].hot;
  if (!of_sequence.any()) return;
  const HotStream hot = of_sequence.stream(p.first_stream + head);
  const int32_t* const table = p.batch.page_tables + p.batch.table_offset[sequence] + head * p.batch.head_stride;
  const int32_t count = p.counts[stream], of_part = listed_rows::PartEntries(count);
  const int32_t entries = of_part * (listed_rows::kParts / kBlocks);
  const int32_t here = min(max(count - rank * entries, 0), entries);
  const int32_t* const list = p.tokens + stream * p.list_stride + rank * entries;
  for (int32_t i = threadIdx.x; i < here; i += kThreads) {
    const int32_t position = list[i];
    if (hot.on_host(position)) {
      const int32_t slot = hot.slot_of[position] - 1;
      rows[i] = hot.slot_pages[slot / kPageTokens] * (2 * kPageTokens) + slot % kPageTokens;
    } else {
      rows[i] = table[position / kPageTokens] * (2 * kPageTokens) + position % kPageTokens;
    }
  }
  Cluster<kBlocks>::Sync();  // the rows are known, and all blocks have started
  const int64_t first_head = int64_t{stream} * p.group;
  listed_rows::AttendRows<kBlocks, kThreads, Pages, kHeads>(
      {.pool = p.batch.pool.base,
       .rows = rows,
       .of_part = of_part,
       .here = here,
       .q = p.q + sequence * p.q_row_stride + int64_t{head} * p.group * Pages::kDim,
       .group = p.group,
       .scale = p.scale,
       .out = p.out + first_head * Pages::kDim,
       .lse = p.lse == nullptr ? nullptr : p.lse + first_head},
      rank, s.results, s.theirs);
#endif
}

template <int kBlocks, int kHeads, typename Pages>
cudaError_t Launch(Params p, const HotArgs& a, cudaStream_t stream) {
  const auto most = static_cast<int>(std::min<int64_t>(a.lists.stride, kHotBudgetMax));
  p.block_entries = listed_rows::PartEntries(most) * (listed_rows::kParts / kBlocks);
  const size_t smem_bytes =
      sizeof(Smem<kBlocks, kHeads, Pages::kDim>) + static_cast<size_t>(p.block_entries) * sizeof(int32_t);
  const auto kernel = AttendKernel<kBlocks, kHeads, Pages>;
  const cudaError_t e =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem_bytes));
  if (e != cudaSuccess) return e;
  const dim3 grid(static_cast<unsigned>(kBlocks * p.num_kv_heads * a.batch.num_sequences));
  return LaunchClusters(a.early, kBlocks, kernel, grid, dim3(kThreads), smem_bytes, stream, p);
}

template <int kBlocks, template <int> typename Pages>
cudaError_t LaunchShape(const Params& p, const HotArgs& a, cudaStream_t stream) {
  const bool wide = p.group > 4;
  if (a.heads.head_dim == 64)
    return wide ? Launch<kBlocks, 8, Pages<64>>(p, a, stream) : Launch<kBlocks, 4, Pages<64>>(p, a, stream);
  return wide ? Launch<kBlocks, 8, Pages<128>>(p, a, stream) : Launch<kBlocks, 4, Pages<128>>(p, a, stream);
}

template <template <int> typename Pages>
cudaError_t LaunchCluster(int cluster, const Params& p, const HotArgs& a, cudaStream_t stream) {
  return cluster == 8 ? LaunchShape<8, Pages>(p, a, stream) : LaunchShape<4, Pages>(p, a, stream);
}

}  // namespace

cudaError_t AttendHotRows(const HotArgs& a, cudaStream_t stream, int cluster) {
  if (a.batch.num_sequences == 0) return cudaSuccess;
  int capability = 0, num_sms = 0;
  if (const cudaError_t e = DeviceInfo(&capability, &num_sms); e != cudaSuccess) return e;
  const DType pages = a.batch.pool.dtype;
  if (capability != 90 || (a.heads.head_dim != 64 && a.heads.head_dim != 128) ||
      a.heads.num_qo_heads / a.heads.num_kv_heads > kMaxGroup || (pages != DType::kBF16 && pages != DType::kE4M3))
    return cudaErrorNotSupported;
  Params p{};
  p.batch = a.batch;
  p.selection = a.selection;
  p.q = static_cast<const __nv_bfloat16*>(a.q);
  p.q_row_stride = a.q_row_stride;
  p.out = static_cast<__nv_bfloat16*>(a.out);
  p.lse = a.lse;
  p.tokens = a.lists.tokens;
  p.counts = a.lists.counts;
  p.list_stride = a.lists.stride;
  p.first_stream = a.first_stream;
  p.num_kv_heads = a.heads.num_kv_heads;
  p.group = a.heads.num_qo_heads / a.heads.num_kv_heads;
  p.scale = a.heads.sm_scale * kLog2e;
  // A wide block of a cluster of 4 has the multiprocessor for itself; of 8, a half.
  if (cluster == 0) cluster = p.group > 4 || a.batch.num_sequences * p.num_kv_heads * 8 <= num_sms * 2 ? 8 : 4;
  return pages == DType::kE4M3 ? LaunchCluster<listed_rows::CodePages>(cluster, p, a, stream)
                               : LaunchCluster<listed_rows::WidePages>(cluster, p, a, stream);
}

}  // namespace spl::kernels::cuda
