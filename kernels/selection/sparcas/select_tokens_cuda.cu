// One cluster of blocks per stream: a block has consecutive tiles of 64 positions, scores them and takes its part in
// the choice. Each key is read once, and each exponential is taken once. The terms 2^(score - maximum of the tile) stay
// in shared memory, and those that do not fit there in scratch memory, until the factors of the tiles are known with
// which they add up to weights. A multiprocessor's shared memory holds the terms of some 13,000 positions of four query
// heads, so a cluster should be just large enough that all streams run at once. Compact keys that existed before this
// step are loaded into registers while the previous kernel still runs.
#include <algorithm>
#include <type_traits>

#include "kernels/common/kv_rows.h"
#include "kernels/selection/sparcas/compact_gather_cuda.h"
#include "kernels/selection/sparcas/select_block_cuda.h"
#include "kernels/selection/sparcas/select_tokens_cuda.h"
#include "kernels/selection/sparcas/term_weights_cuda.h"
#include "kernels/selection/sparcas/tile_terms_cuda.h"

namespace spl::kernels::cuda {
namespace {

using namespace select_tokens;  // NOLINT: the stages of this kernel

constexpr int kMmaDims = 16;
constexpr int64_t kSmemSums = 32 << 10;     // bytes of a block's sums of tiles; more of them are in scratch memory
constexpr int64_t kReservedSmem = 1 << 10;  // bytes of each block that the system takes

// Blocks of a multiprocessor: 512 threads of 128 registers.
constexpr int PerSm(int threads) { return std::max(512 / threads, 1); }

// A stream's step, as it is staged.
template <typename Q>
struct StreamStep {
  const Q* q;            // queries of its group
  const int32_t* table;  // pages of its keys
  int32_t* dims_table;   // two rows of dimensions: of the step before, and of this one
  int parity;
  int32_t gathered;  // compact keys that exist
  bool refresh, first;

  __device__ __forceinline__ StreamStep(const Params& p, const StagedStep& step, const StagedSequence& staged,
                                        int sequence, int head)
      : q(static_cast<const Q*>(p.q) + sequence * p.q_row_stride + int64_t{head} * p.group * p.head_dim),
        table(p.batch.page_tables + p.batch.table_offset[sequence] + head * p.batch.head_stride),
        dims_table(staged.dims + p.dims_offset + head * 2 * p.num_dims),
        parity(step.flags & StagedStep::kParity ? 1 : 0),
        gathered(step.flags & StagedStep::kFirst ? 0 : step.compact_len),
        refresh(step.flags & StagedStep::kRefresh),
        first(step.flags & StagedStep::kFirst) {}
  __device__ __forceinline__ const int32_t* dims_before(const Params& p) const {
    return dims_table + parity * p.num_dims;
  }
  __device__ __forceinline__ int32_t* dims_after(const Params& p) const {
    return dims_table + (1 - parity) * p.num_dims;
  }
};

// Who asks for a block's keys, and what for.
struct KeyRequest {
  const Candidates& own;
  bool listed, writes_dims, scores_wanted;
};

// Steps (a) and (b): the compact keys are up to date, and the first ones on their way to registers where `mma` scores
// them. A step as most are is plain: the positions to append are all in the last tile, whose other ones are there
// already. stage: shared memory where the sums and terms will be. Returns with the previous kernel done.
template <int kThreads, bool kMma, bool kListed, typename Kv, typename SmemT, typename Q, typename Terms>
__device__ __forceinline__ void BringKeys(const Params& p, SmemT& s, const Part& part, const CompactStream<Kv>& compact,
                                          const StreamStep<Q>& x, const KeyRequest& r, Terms& mma, char* stage) {
  const bool plain = kMma && !x.refresh && x.gathered >= (part.num_tiles - 1) * kTile;
  int32_t last_page = 0;
  if (!p.early) WaitForPrevious();
  if (kMma && plain) {
    if (r.scores_wanted) mma.LoadFirst();
    mma.TakeDims(x.dims_before(p));
    if (!r.listed) last_page = x.table[part.num_tiles - 1];
  }
  WaitForPrevious();
  if constexpr (kMma) {
    if (plain) {
      mma.TakeQueries(x.q);
      if (part.end_tile == part.num_tiles && threadIdx.x < 32)
        mma.template Append<kListed>(x.gathered, last_page, x.table, r.own, r.listed);
      return;
    }
  }
  Gather<kThreads, kListed, SmemT, Q, Kv>(
      p, s,
      {x.q, x.table, compact.pages, x.dims_before(p), x.dims_after(p), r.own, x.refresh, x.first, r.writes_dims,
       x.gathered, part.first_tile, part.end_tile},
      stage);
  if constexpr (kMma) {
    if (r.scores_wanted) mma.LoadFirst();
    mma.TakeDims(s.dims);
    mma.TakeQueries(x.q);
  }
}

// The candidates of a stream. Unless a launch is early, the previous kernel may have written their list.
template <bool kListed>
__device__ __forceinline__ Candidates FindCandidates(const Params& p, int sequence, int head) {
  const int32_t kv_len = p.batch.kv_len[sequence];
  if constexpr (!kListed) return {.count = kv_len};
  if (!p.early) WaitForPrevious();
  return p.selection.CandidatesOf(sequence, head, kv_len);
}

// kMma: queries and compact keys of bf16, 16 dimensions, at most kHeads query heads a KV head. kTiles: of a warp in
// flight. kListed: streams may be listed. Kv: see key_rows_cuda.h.
template <int kBlocks, int kThreads, int kTiles, bool kMma, int kHeads, bool kAllInSmem, bool kListed, typename Q,
          typename Kv>
__device__ __forceinline__ void Select(const Params& p) {
  using C = Cluster<kBlocks>;
  using Choice = TokenChoice<kBlocks, kThreads>;
  using SmemT = Smem<kBlocks, kThreads>;
  constexpr int kWarps = kThreads / 32;
  extern __shared__ __align__(16) char raw[];
  auto& s = *reinterpret_cast<SmemT*>(raw);
  LetNextStart();
  const int rank = C::Rank();
  const int stream = blockIdx.x / kBlocks, sequence = stream / p.num_kv_heads, head = stream % p.num_kv_heads;
  const StagedStep step = p.selection.steps[sequence];
  if (!p.selection.Selects(sequence, head)) {
    WaitForPrevious();
    return;
  }
  const StagedSequence& staged = p.selection.sequences[sequence];
  const bool listed = kListed && (step.flags & StagedStep::kListed);
  const Candidates own = FindCandidates<kListed>(p, sequence, head);
  const int32_t kv_len = own.count;  // from here on as if candidates were the sequence
  const int32_t budget = min(staged.budget, static_cast<int32_t>(p.list_stride));
  const bool everything = kv_len <= budget;
  const bool scores_wanted = !everything || p.weights != nullptr;
  if (scores_wanted) {
    Choice::Clear(s.choice);
    C::Arrive();  // waited for before the first write to another block, which must have started
  }
  const int t = threadIdx.x;
  const Part part(kv_len, rank, kBlocks);
  const CompactStream<Kv> compact(p, p.selection.CompactPages(sequence, head));
  const StreamStep<Q> x(p, step, staged, sequence, head);
  const Storage<kAllInSmem> storage(p, raw + sizeof(SmemT), blockIdx.x);

  MmaTerms<kWarps, kTiles, kHeads, Kv> mma(p, part, compact);
  BringKeys<kThreads, kMma, kListed, Kv>(p, s, part, compact, x, {own, listed, rank == 0, scores_wanted}, mma,
                                         reinterpret_cast<char*>(storage.units + p.group * kUnits));
  int32_t* tokens = p.tokens + stream * p.list_stride;
  if (rank == 0 && t == 0) p.counts[stream] = everything ? kv_len : budget;
  if (everything) {
    for (int32_t j = part.begin + t; j < part.end; j += kThreads) tokens[j] = PositionOf<kListed>(own, j);
    if (!scores_wanted) return;
  }

  // Step (c).
  if constexpr (kMma) {
    mma.Score(storage);
  } else {
    ScorePlainly<kWarps, Q, Kv>(p, part, compact, x.q, s.dims, storage);
  }
  __syncthreads();
  ShareUnits<kBlocks, kThreads>(p, part, storage);
  AddUnits<kThreads>(p, part, storage.units, s.heads);
  const ChoiceBins bins = WeightBins(static_cast<float>(p.group), budget - staged.recent);
  Weigh<Choice, kThreads, kHeads>(p, part, s, storage, bins, kv_len - staged.recent,
                                  p.weights == nullptr ? nullptr : p.weights + stream * p.weights_stride);
  if (everything) return;

  // Step (d). The candidates are found again: keeping them would take too many registers until here.
  const Candidates listed_ones =
      listed ? p.selection.CandidatesOf(sequence, head, p.batch.kv_len[sequence]) : Candidates{.count = kv_len};
  const int32_t begin = part.begin;
  Choice::Choose(
      s.choice, rank, static_cast<uint32_t>(begin), part.end - begin, static_cast<uint32_t>(budget), bins,
      [&](int i) { return reinterpret_cast<const uint32_t*>(storage.tile(i / kTile))[i % kTile]; },
      [&](int tile) { return reinterpret_cast<uint32_t*>(storage.tile(tile)); },
      [&](int i, int place) { tokens[place] = listed ? listed_ones.Position(begin + i) : begin + i; });
}

template <int kBlocks, int kThreads, int kTiles, bool kMma, int kHeads, bool kAllInSmem, bool kListed, typename Q,
          typename Kv>
__global__ void __launch_bounds__(kThreads, PerSm(kThreads)) SelectKernel(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ < 900
  if constexpr (kBlocks == 1) Select<kBlocks, kThreads, kTiles, kMma, kHeads, kAllInSmem, kListed, Q, Kv>(p);
#else
  Select<kBlocks, kThreads, kTiles, kMma, kHeads, kAllInSmem, kListed, Q, Kv>(p);
#endif
}

bool ServedByMma(const SelectArgs& a, int capability) {
  return capability >= 90 && a.dtype == DType::kBF16 && DerivedKeyType(a.batch.pool.dtype) == DType::kBF16 &&
         a.num_dims == kMmaDims && a.heads.num_qo_heads / a.heads.num_kv_heads <= kMaxDecodeGroup &&
         Aligned16(a.batch.pool.base);
}

struct Device {
  int capability = 0, num_sms = 0, smem_per_block = 0, smem_per_sm = 0;
};
cudaError_t Find(Device& d) {
  int device = 0;
  cudaError_t e = DeviceInfo(&d.capability, &d.num_sms);
  if (e == cudaSuccess) e = cudaGetDevice(&device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&d.smem_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (e == cudaSuccess) e = cudaDeviceGetAttribute(&d.smem_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  return e;
}

// How blocks keep their tiles; depends on the launch arguments only.
struct Layout {
  int32_t block_tiles = 0, smem_tiles = 0;
  bool smem_sums = false;
  size_t smem_bytes = 0;
  int64_t scratch_stride = 0;  // floats of a block
};
Layout LayoutOf(const SelectArgs& a, const Device& d, int blocks, int threads, size_t fixed, size_t element) {
  const int64_t group = a.heads.num_qo_heads / a.heads.num_kv_heads;
  const int64_t tiles = (int64_t{a.max_kv_len} + kTile - 1) / kTile, unit = (tiles + kUnits - 1) / kUnits;
  const int64_t block_tiles = (kUnits + blocks - 1) / blocks * unit;
  Layout l;
  l.block_tiles = static_cast<int32_t>(block_tiles);
  const int64_t sums = (block_tiles * group * 2 + 3) / 4 * 4, tile = group * kTile;  // floats
  l.smem_sums = sums * 4 <= kSmemSums;
  const int64_t most = std::min<int64_t>(d.smem_per_block, d.smem_per_sm / PerSm(threads) - kReservedSmem);
  const int64_t used = static_cast<int64_t>(fixed) + group * kUnits * 8 + (l.smem_sums ? sums * 4 : 0);
  l.smem_tiles = static_cast<int32_t>(std::clamp<int64_t>((most - used) / (tile * 4), 0, block_tiles));
  l.scratch_stride = (l.smem_sums ? 0 : sums) + (block_tiles - l.smem_tiles) * tile;
  const auto stages = static_cast<int64_t>(size_t{threads / 32u} * kGatherRows *
                                           kGatherStride(a.heads.head_dim * static_cast<int>(element)));
  l.smem_bytes = static_cast<size_t>(
      std::max(used + l.smem_tiles * tile * 4, static_cast<int64_t>(fixed) + group * kUnits * 8 + stages));
  return l;
}

template <int kBlocks, int kThreads, typename Kv>
Layout LayoutOf(const SelectArgs& a, const Device& d) {
  return LayoutOf(a, d, kBlocks, kThreads, sizeof(Smem<kBlocks, kThreads>), sizeof(Kv));
}

template <int kBlocks, int kThreads, int kTiles, bool kMma, int kHeads, typename Q, typename Kv>
cudaError_t Launch(const SelectArgs& a, Params p, const Device& d, cudaStream_t stream) {
  static_assert(sizeof(Smem<kBlocks, kThreads>) % 16 == 0);
  const Layout l = LayoutOf<kBlocks, kThreads, Kv>(a, d);
  p.block_tiles = l.block_tiles;
  p.smem_tiles = l.smem_tiles;
  p.smem_sums = l.smem_sums;
  p.scratch_stride = l.scratch_stride;
  if (l.scratch_stride > 0 && p.scratch == nullptr) return cudaErrorInvalidValue;
  // A kernel that serves lists also serves the other sequences, but takes 3 to 6 % longer: used only if one is listed.
  auto kernel = SelectKernel<kBlocks, kThreads, kTiles, kMma, kHeads, false, true, Q, Kv>;
  if constexpr (kMma) {
    if (!a.listed) kernel = SelectKernel<kBlocks, kThreads, kTiles, kMma, kHeads, false, false, Q, Kv>;
  }
  if constexpr (kMma && kHeads == 4 && kBlocks == 8) {
    if (!a.listed && l.scratch_stride == 0)
      kernel = SelectKernel<kBlocks, kThreads, kTiles, kMma, kHeads, true, false, Q, Kv>;
  }
  const cudaError_t e =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(l.smem_bytes));
  if (e != cudaSuccess) return e;
  const dim3 grid(static_cast<unsigned>(kBlocks) * p.num_kv_heads * a.batch.num_sequences);
  return LaunchClustersEarly(kBlocks, kernel, grid, kThreads, l.smem_bytes, stream, p);
}

// As large as leaves room for all streams at once. A cluster must fit among the multiprocessors of one part of the
// chip, so that not all of them find a place: 14 or 15 clusters of 8 run at once on 132.
SelectForm AutoForm(const SelectArgs& a, const Device& d) {
  const int64_t streams = int64_t{a.batch.num_sequences} * a.heads.num_kv_heads;
  for (const int cluster : {8, 4}) {
    if (streams * cluster <= d.num_sms * 7 / 8) return {cluster, 512, 2};
  }
  return {2, 512, 2};
}

// Calls body<kBlocks, kThreads, kTiles, kHeads>() with the form for the arguments. False: no form fits.
template <typename Body>
bool WithForm(const SelectArgs& a, const Device& d, SelectForm f, const Body& body) {
  const int group = a.heads.num_qo_heads / a.heads.num_kv_heads;
  if (f.cluster == 0) f = AutoForm(a, d);
  const auto is = [&]<int kBlocks, int kThreads, int kTiles, int kHeads>() {
    if (f.cluster != kBlocks || f.threads != kThreads || f.tiles != kTiles) return false;
    body.template operator()<kBlocks, kThreads, kTiles, kHeads>();
    return true;
  };
  if (group <= 4) {
    return is.template operator()<8, 512, 2, 4>() || is.template operator()<4, 512, 2, 4>() ||
           is.template operator()<2, 512, 2, 4>();
  }
  f = {f.cluster > 4 ? 8 : 2, 512, 2};
  return is.template operator()<8, 512, 2, 16>() || is.template operator()<2, 512, 2, 16>();
}

template <typename Kv>
cudaError_t LaunchMma(const SelectArgs& a, const Params& p, const Device& d, cudaStream_t stream, SelectForm form) {
  cudaError_t e = cudaErrorNotSupported;
  WithForm(a, d, form, [&]<int kBlocks, int kThreads, int kTiles, int kHeads>() {
    e = Launch<kBlocks, kThreads, kTiles, true, kHeads, __nv_bfloat16, Kv>(a, p, d, stream);
  });
  return e;
}

template <typename Q, typename Kv>
cudaError_t LaunchGeneric(const SelectArgs& a, const Params& p, const Device& d, cudaStream_t stream) {
  return d.capability >= 90 ? Launch<8, 256, 2, false, 8, Q, Kv>(a, p, d, stream)
                            : Launch<1, 256, 2, false, 8, Q, Kv>(a, p, d, stream);
}

// Calls body<Kv>() with the pool's type of elements (key_rows_cuda.h).
template <typename Body>
void WithPool(DType pool, const Body& body) {
  if (pool == DType::kF32) return body.template operator()<float>();
  if (pool == DType::kE4M3) return body.template operator()<uint8_t>();
  body.template operator()<__nv_bfloat16>();
}

}  // namespace

size_t SelectScratchBytes(const SelectArgs& a, SelectForm form) {
  Device d;
  if (Find(d) != cudaSuccess) return 0;  // the launch will say so
  int blocks = d.capability >= 90 ? 8 : 1;
  Layout l;
  WithPool(a.batch.pool.dtype, [&]<typename Kv>() {
    if (!ServedByMma(a, d.capability)) {
      l = blocks == 8 ? LayoutOf<8, 256, Kv>(a, d) : LayoutOf<1, 256, Kv>(a, d);
      return;
    }
    WithForm(a, d, form, [&]<int kBlocks, int kThreads, int kTiles, int kHeads>() {
      l = LayoutOf<kBlocks, kThreads, Kv>(a, d);
      blocks = kBlocks;
    });
  });
  return static_cast<size_t>(a.batch.num_sequences) * a.heads.num_kv_heads * blocks * l.scratch_stride * sizeof(float);
}

cudaError_t SelectTokens(const SelectArgs& a, cudaStream_t stream, SelectForm form) {
  if (a.batch.num_sequences == 0) return cudaSuccess;
  Device d;
  if (const cudaError_t e = Find(d); e != cudaSuccess) return e;
  const int group = a.heads.num_qo_heads / a.heads.num_kv_heads;
  if (d.capability < 80 || a.max_kv_len > kMaxSelectKvLen || group > kMaxGroup || a.heads.head_dim > kMaxDim)
    return cudaErrorNotSupported;
  Params p{};
  p.batch = a.batch;
  p.selection = a.selection;
  p.q = a.q;
  p.q_row_stride = a.q_row_stride;
  p.tokens = a.lists.tokens;
  p.counts = a.lists.counts;
  p.list_stride = a.lists.stride;
  p.weights = a.weights;
  p.weights_stride = a.weights_stride;
  p.scratch = a.scratch;
  p.dims_offset = a.dims_offset;
  p.num_kv_heads = a.heads.num_kv_heads;
  p.group = group;
  p.head_dim = a.heads.head_dim;
  p.num_dims = a.num_dims;
  p.scale = a.heads.sm_scale * kLog2e;
  p.early = a.early;
  cudaError_t e = cudaErrorNotSupported;
  WithPool(a.batch.pool.dtype, [&]<typename Kv>() {
    if constexpr (!std::is_same_v<Kv, float>) {
      if (ServedByMma(a, d.capability)) {
        e = LaunchMma<Kv>(a, p, d, stream, form);
        return;
      }
    }
    e = a.dtype == DType::kBF16 ? LaunchGeneric<__nv_bfloat16, Kv>(a, p, d, stream)
                                : LaunchGeneric<float, Kv>(a, p, d, stream);
  });
  return e;
}

}  // namespace spl::kernels::cuda
