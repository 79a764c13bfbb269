// selection_cuda_bench [columns|topk|sparse [forms] [FILTER]]
//
// Times column scores, top-k and decode steps over chosen tokens on one device against what their operations and bytes
// cost at rates measured in the same run: median of event-timed launches, the L2 cache flushed before each. Column
// scores are compared with those of the mma variant, the chosen indices with the host's. Decode steps run as a graph of
// layers with keys of their own.
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <string>

#include "kernels/attention/attention_cuda.h"
#include "kernels/cuda/cuda_bench_util.h"
#include "kernels/selection/quest/page_bound_scores_cuda.h"
#include "kernels/selection/sparcas/compact_keys.h"
#include "kernels/selection/sparcas/packed_keys.h"
#include "kernels/selection/sparcas/select_tokens_cuda.h"
#include "kernels/selection/sparcas/sparse_attention_cuda.h"
#include "kernels/selection/sparsex/column_scores_cuda.h"
#include "kernels/selection/top_k_cuda.h"
#include "kernels/selection/top_tokens_cuda.h"

namespace spl::kernels::cuda {
namespace {

struct Case {
  int qo_heads = 32, kv_heads = 8, head_dim = 128;
  int32_t kv_len = 0, probes = 0;  // the last ones, or every stride-th one up to the end
  int32_t stride = 1;
  int band_heads = 0;  // KV heads with window 256 and 64 sinks
};

class Setup {
 public:
  explicit Setup(const Case& c) {
    const int pages = (c.kv_len + kPageTokens - 1) / kPageTokens, num_pages = pages * c.kv_heads;
    std::vector<int32_t> table(num_pages);
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), std::mt19937(1));
    const int64_t elements = int64_t{num_pages} * 2 * kPageTokens * c.head_dim;
    auto* pool = Keep(Alloc<__nv_bfloat16>(elements));
    FillNormal<<<2048, 256>>>(pool, elements, 1);
    batch = {.page_tables = Keep(Upload(table)),
             .table_offset = Keep(Upload(std::vector<int64_t>{0})),
             .head_stride = pages,
             .kv_len = Keep(Upload(std::vector<int32_t>{c.kv_len})),
             .pool = {reinterpret_cast<std::byte*>(pool), DType::kBF16, c.head_dim, num_pages},
             .num_sequences = 1};
    const int64_t width = int64_t{c.qo_heads} * c.head_dim;
    auto* q = Keep(Alloc<__nv_bfloat16>(c.probes * width));
    FillNormal<<<2048, 256>>>(q, c.probes * width, 2);
    std::vector<int32_t> row_positions(c.probes), probe_rows(c.probes), heads(c.kv_heads);
    for (int i = 0; i < c.probes; ++i) row_positions[i] = c.kv_len - 1 - (c.probes - 1 - i) * c.stride;
    std::iota(probe_rows.begin(), probe_rows.end(), 0);
    std::iota(heads.begin(), heads.end(), 0);
    std::vector<ColumnPart> parts;
    for (int i = 0; i < pages; ++i) {
      parts.push_back({i, 0, std::min(kPageTokens, c.kv_len - i * kPageTokens), i * kPageTokens});
    }
    positions = Keep(Upload(row_positions));
    scores = Keep(Alloc<float>(c.kv_len));
    auto* lse = Keep(Alloc<float>(int64_t{c.probes} * c.qo_heads));
    const AttentionShape shape{c.qo_heads, c.kv_heads, c.head_dim, 1.0f / std::sqrt(static_cast<float>(c.head_dim))};
    args.shape = shape;
    args.pool = batch.pool;
    args.q = {q, DType::kBF16};
    args.q_row_stride = width;
    args.lse = lse;
    args.rows = {0, c.probes, {}, {}};
    args.scores = scores;
    tables.probes = Keep(Upload(probe_rows));
    tables.kv_heads = Keep(Upload(heads));
    tables.parts = Keep(Upload(parts));
    tables.num_probes = c.probes;
    tables.num_kv_heads = c.kv_heads;
    tables.num_parts = pages;
    tables.num_scores = c.kv_len;
    tables.scratch = Keep(Alloc<std::byte>(ColumnScratchBytes(shape, c.probes, c.kv_heads, c.kv_len)));
    for (int h = c.kv_heads - c.band_heads; h < c.kv_heads; ++h) {
      tables.rules.head[h] = {VisibilityRule::kBand, 64, 256};
    }
    // The rows' log-sum-exp, by attention over the same keys.
    auto* workspace = Keep(Alloc<std::byte>(PrefillWorkspaceBytes()));
    CHECK_CUDA(cudaMemset(workspace, 0, PrefillWorkspaceBytes()));
    attention = {.heads = {c.qo_heads, c.kv_heads, c.head_dim, shape.sm_scale},
                 .rules = tables.rules,
                 .batch = batch,
                 .row_begin = Keep(Upload(std::vector<int32_t>{0, c.probes})),
                 .positions = positions,
                 .num_rows = c.probes,
                 .max_kv_len = c.kv_len,
                 .q = q,
                 .q_row_stride = width,
                 .out = Keep(Alloc<__nv_bfloat16>(c.probes * width)),
                 .lse = lse,
                 .workspace = workspace};
    CHECK_CUDA(PrefillAttention(attention, nullptr));
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  ~Setup() {
    for (void* p : kept_) cudaFree(p);
  }
  void Launch(ColumnVariant variant) { CHECK_CUDA(ColumnScores(args, batch, positions, tables, nullptr, variant)); }
  std::vector<float> Scores(ColumnVariant variant) {
    CHECK_CUDA(cudaMemset(scores, 0, tables.num_scores * sizeof(float)));
    CHECK_CUDA(cudaMemset(tables.scratch, 0xff, static_cast<size_t>(tables.num_kv_heads) * tables.num_scores * 4));
    Launch(variant);
    std::vector<float> host(tables.num_scores);
    CHECK_CUDA(cudaMemcpy(host.data(), scores, host.size() * sizeof(float), cudaMemcpyDeviceToHost));
    return host;
  }

  PagedBatch batch;
  int32_t* positions;
  float* scores;
  ColumnScoresArgs args;
  ColumnTables tables;
  PrefillArgs attention;

 private:
  template <typename T>
  T* Keep(T* p) {
    kept_.push_back(p);
    return p;
  }
  std::vector<void*> kept_;
};

double RelativeError(const std::vector<float>& a, const std::vector<float>& want) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    error += (double{a[i]} - want[i]) * (double{a[i]} - want[i]);
    norm += double{want[i]} * want[i];
  }
  return std::sqrt(error / norm);
}

// TFLOP/s of dense causal attention over 16K, the fastest large product here.
double AttentionRate() {
  Setup s({.kv_len = 16384, .probes = 16384});
  const double ms = MedianMs(10, [&] { CHECK_CUDA(PrefillAttention(s.attention, nullptr)); });
  return 4.0 * 128 * 32 * (16384.0 * 16385 / 2) / ms * 1e-9;
}

void Columns(const char* name, const Case& c, double anchor) {
  Setup s(c);
  double pairs = 0;
  for (int i = 0; i < c.probes; ++i) pairs += c.kv_len - (c.probes - 1.0 - i) * c.stride;
  const double flops = 2.0 * c.head_dim * pairs * c.qo_heads;
  const std::vector<float> want = s.Scores(ColumnVariant::kMma);
  double sum = 0;
  for (const float x : want) sum += x;
  const auto report = [&](const char* variant, ColumnVariant which) {
    const std::vector<float> got = s.Scores(which), again = s.Scores(which);
    const double ms = MedianMs(20, [&] { s.Launch(which); });
    std::printf(
        "columns %-28s %-8s %8.4f ms %6.1f TF/s, %3.0f %% of 590, %3.0f %% of the attention's %4.0f; error %.1e, "
        "sum %.6f of rows x heads%s\n",
        name, variant, ms, flops / ms * 1e-9, flops / ms * 1e-9 / 5.9, flops / ms * 1e-7 / anchor, anchor,
        RelativeError(got, want), sum / (double{static_cast<double>(c.probes)} * c.qo_heads),
        std::memcmp(got.data(), again.data(), got.size() * sizeof(float)) == 0 ? "" : "; NOT REPEATABLE");
    std::fflush(stdout);
  };
  report("mma", ColumnVariant::kMma);
  report("sm90", ColumnVariant::kSm90);
}

void Top(int n, int k, const char* data) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& v : values) {
    if (std::strcmp(data, "bits") == 0) {  // every first digit occurs
      const uint32_t bits = random();
      std::memcpy(&v, &bits, sizeof(v));
      if (!std::isfinite(v)) v = 0;
    } else {
      v = std::strcmp(data, "normal") == 0 ? normal(random) : std::exp(4 * normal(random));
    }
  }
  std::vector<int32_t> want(n);
  std::iota(want.begin(), want.end(), 0);
  std::nth_element(want.begin(), want.begin() + k, want.end(),
                   [&](int a, int b) { return values[a] > values[b] || (values[a] == values[b] && a < b); });
  want.resize(k);
  std::sort(want.begin(), want.end());
  float* scores = Upload(values);
  int32_t* out = Alloc<int32_t>(k);
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreate(&stream));
  const TopKArgs args{scores, n, k, out};
  CHECK_CUDA(cudaMemset(out, 0xff, k * sizeof(int32_t)));
  CHECK_CUDA(TopK(args, stream));
  std::vector<int32_t> got(k);
  CHECK_CUDA(cudaStreamSynchronize(stream));
  CHECK_CUDA(cudaMemcpy(got.data(), out, k * sizeof(int32_t), cudaMemcpyDeviceToHost));
  const auto launch = [&] { CHECK_CUDA(TopK(args, nullptr)); };
  const double cold = MedianMs(50, launch);
  const double warm = MedianMs(50, launch, launch);
  // In a graph, where launches cost the host nothing.
  constexpr int kLaunches = 50;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < kLaunches; ++i) CHECK_CUDA(TopK(args, stream));
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  const double row = MedianMs(20, [&] { CHECK_CUDA(cudaGraphLaunch(exec, nullptr)); }) / kLaunches;
  CHECK_CUDA(cudaGraphExecDestroy(exec));
  CHECK_CUDA(cudaGraphDestroy(graph));
  std::printf(
      "top %d of %d (%s) %7.2f us alone with a cold cache, %6.2f us with a warm one, %6.2f us in a graph of %d%s\n", k,
      n, data, cold * 1e3, warm * 1e3, row * 1e3, kLaunches, got == want ? "" : "; WRONG");
  std::fflush(stdout);
  CHECK_CUDA(cudaStreamDestroy(stream));
  CHECK_CUDA(cudaFree(scores));
  CHECK_CUDA(cudaFree(out));
}

// The first four keys of each stream, of the pages that `tables` names, become larger.
__global__ void EnlargeSinks(__nv_bfloat16* pool, const int32_t* tables, int pages, float factor) {
  __nv_bfloat16* page = pool + int64_t{tables[int64_t{blockIdx.x} * pages]} * 2 * kPageTokens * blockDim.x;
  for (int row = 0; row < 4; ++row) {
    __nv_bfloat16& x = page[row * blockDim.x + threadIdx.x];
    x = __float2bfloat16(__bfloat162float(x) * factor);
  }
}

// ---- Decode steps over chosen tokens --------------------------------------------------------------------------------
struct SparseCase {
  const char* name;
  int batch, kv_len, layers;
  int qo_heads = 32, kv_heads = 8, budget = 2048;
  float key_scale = 1;  // 1/64: all weights are nearly equal
  bool sinks = false;   // the first four keys have nearly all of the weight
};

constexpr SelectForm kForms[] = {{8, 512, 2}, {4, 512, 2}, {2, 512, 2}};

// Some layers of a decode step, each with pages, compact keys and a choice of its own.
class SparseSetup {
 public:
  static constexpr int kDim = 128, kDims = 16;

  explicit SparseSetup(const SparseCase& c) : c_(c), streams_(c.batch * c.kv_heads) {
    const int pages = (c.kv_len + kPageTokens - 1) / kPageTokens;
    const int compact = static_cast<int>(CompactKeys{kDim, kDims}.num_pages(c.kv_len));
    const int num_pages = c.layers * streams_ * (pages + compact);
    std::vector<int32_t> ids(num_pages);
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), std::mt19937(1));
    const int64_t elements = int64_t{num_pages} * 2 * kPageTokens * kDim;
    auto* memory = Keep(Alloc<__nv_bfloat16>(elements));
    FillNormal<<<2048, 256>>>(memory, elements, 1, c.key_scale);
    pool_ = {reinterpret_cast<std::byte*>(memory), DType::kBF16, kDim, num_pages};
    const int32_t* tables = Keep(Upload(ids));
    if (c.sinks) EnlargeSinks<<<c.layers * streams_, 128>>>(memory, tables, pages, 12 / c.key_scale);
    std::vector<int64_t> table_offset(c.batch);
    std::vector<int32_t> kv_len(c.batch, c.kv_len);
    std::vector<StagedSequence> sequences(c.batch);
    auto* dims = Keep(Alloc<int32_t>(int64_t{c.layers} * streams_ * 2 * kDims));
    for (int s = 0; s < c.batch; ++s) {
      table_offset[s] = int64_t{s} * c.kv_heads * pages;
      sequences[s] = {dims + int64_t{s} * c.layers * c.kv_heads * 2 * kDims, int64_t{s} * c.kv_heads * compact,
                      c.budget, 64};
    }
    const int64_t* offsets = Keep(Upload(table_offset));
    const int32_t* lengths = Keep(Upload(kv_len));
    const StagedSequence* staged = Keep(Upload(sequences));
    const auto steps = [&](int32_t flags, int32_t compact_len) {
      return Keep(Upload(std::vector<StagedStep>(c.batch, StagedStep{flags, compact_len})));
    };
    constexpr int32_t kSelects = StagedStep::kSelects, kRefresh = StagedStep::kRefresh;
    first_ = steps(kSelects | kRefresh | StagedStep::kFirst, 0);
    refresh_ = steps(kSelects | kRefresh | StagedStep::kParity, c.kv_len - 1);
    plain_ = steps(kSelects | StagedStep::kParity, c.kv_len - 1);
    auto* packed_dims = Keep(Alloc<int32_t>(int64_t{c.layers} * streams_ * 2 * kPackedDims));
    for (int s = 0; s < c.batch; ++s)
      sequences[s].dims = packed_dims + int64_t{s} * c.layers * c.kv_heads * 2 * kPackedDims;
    const StagedSequence* staged_packed = Keep(Upload(sequences));
    const int64_t width = int64_t{c.qo_heads} * kDim;
    const AttentionHeads heads{c.qo_heads, c.kv_heads, kDim, 1.0f / std::sqrt(static_cast<float>(kDim))};
    const size_t workspace_bytes = DecodeWorkspaceBytes(heads, c.batch, c.kv_len, c.budget);
    auto* workspace = Keep(Alloc<std::byte>(workspace_bytes));
    CHECK_CUDA(cudaMemset(workspace, 0, workspace_bytes));
    auto* out = Keep(Alloc<__nv_bfloat16>(c.batch * width));
    scores_stride_ = (c.kv_len + kBoundTokens - 1) / kBoundTokens;
    scores_ = Keep(Alloc<float>(streams_ * scores_stride_));
    kept_mass_ = Keep(Alloc<float>(streams_));
    for (int layer = 0; layer < c.layers; ++layer) {
      auto* q = Keep(Alloc<__nv_bfloat16>(c.batch * width));
      FillNormal<<<256, 256>>>(q, c.batch * width, 100 + layer);
      SelectArgs a{
          .heads = heads,
          .batch = {.page_tables = tables + int64_t{layer} * streams_ * pages,
                    .table_offset = offsets,
                    .head_stride = pages,
                    .kv_len = lengths,
                    .pool = pool_,
                    .num_sequences = c.batch},
          .selection = {.sequences = staged,
                        .steps = plain_,
                        .compact_tables =
                            tables + int64_t{c.layers} * streams_ * pages + int64_t{layer} * streams_ * compact,
                        .compact_head_stride = compact},
          .num_dims = kDims,
          .dims_offset = int64_t{layer} * c.kv_heads * 2 * kDims,
          .max_kv_len = c.kv_len,
          .q = q,
          .q_row_stride = width,
          .lists = {Keep(Alloc<int32_t>(int64_t{streams_} * c.budget)), Keep(Alloc<int32_t>(streams_)), c.budget},
          .early = true};
      if (scratch_ == nullptr) {
        size_t bytes = std::max<size_t>(SelectScratchBytes(a), 16);
        for (const SelectForm& f : kForms) bytes = std::max(bytes, SelectScratchBytes(a, f));
        scratch_ = Keep(Alloc<float>(bytes / sizeof(float)));
      }
      a.scratch = scratch_;
      select_.push_back(a);
      DecodeArgs d{.heads = heads,
                   .batch = a.batch,
                   .max_kv_len = c.kv_len,
                   .q = q,
                   .q_row_stride = width,
                   .out = out,
                   .workspace = workspace,
                   .early = true};
      dense_.push_back(d);
      for (int h = 0; h < c.kv_heads; ++h) d.rules.head[h].rule = VisibilityRule::kSelected;
      d.lists = a.lists;
      attend_.push_back(d);
      SparseArgs packed{.heads = heads,
                        .batch = a.batch,
                        .selection = a.selection,
                        .dims_offset = int64_t{layer} * c.kv_heads * 2 * kPackedDims,
                        .max_kv_len = c.kv_len,
                        .q = q,
                        .q_row_stride = width,
                        .out = out,
                        .lists = a.lists,
                        .early = true};
      packed.selection.sequences = staged_packed;
      packed_.push_back(packed);
    }
    CHECK_CUDA(cudaStreamCreate(&stream_));
    for (SelectArgs a : select_) {
      a.selection.steps = first_;
      CHECK_CUDA(SelectTokens(a, stream_));
    }
    CHECK_CUDA(cudaStreamSynchronize(stream_));
  }
  ~SparseSetup() {
    for (void* p : kept_) cudaFree(p);
    cudaStreamDestroy(stream_);
  }

  // Microseconds of a layer; `layer` launches what there is to do in it.
  template <typename F>
  double LayerUs(const F& layer) {
    const int rounds = std::max(1, 12 / c_.layers);
    cudaGraphExec_t exec = Record(stream_, rounds * c_.layers, [&](int i) { layer(i % c_.layers); });
    const double ms = MedianMs(11, [&] { CHECK_CUDA(cudaGraphLaunch(exec, nullptr)); });
    CHECK_CUDA(cudaGraphExecDestroy(exec));
    return ms * 1e3 / (rounds * c_.layers);
  }
  void Select(int layer, SelectForm form = {}) { CHECK_CUDA(SelectTokens(select_[layer], stream_, form)); }
  void Refresh(int layer) {
    SelectArgs a = select_[layer];
    a.selection.steps = refresh_;
    CHECK_CUDA(SelectTokens(a, stream_));
  }
  void First(int layer) {
    SelectArgs a = select_[layer];
    a.selection.steps = first_;
    CHECK_CUDA(SelectTokens(a, stream_));
  }
  void Attend(int layer, int list_split = 0) {
    DecodeArgs a = attend_[layer];
    a.list_split = list_split;
    CHECK_CUDA(DecodeAttention(a, stream_));
  }
  // Choice and attention in one, by packed keys. The first time before anything else of it.
  void Packed(int layer, int cluster = 0) { CHECK_CUDA(SparseAttention(packed_[layer], stream_, cluster)); }
  void PackedWithMass(int layer) {
    SparseArgs a = packed_[layer];
    a.kept_mass = kept_mass_;
    CHECK_CUDA(SparseAttention(a, stream_));
  }
  void PackedStep(int layer, bool first) {
    SparseArgs a = packed_[layer];
    a.selection.steps = first ? first_ : refresh_;
    CHECK_CUDA(SparseAttention(a, stream_));
  }
  double PackedBytes() const { return 17.0 * streams_ * c_.kv_len; }
  void Dense(int layer) { CHECK_CUDA(DecodeAttention(dense_[layer], stream_)); }
  // Quest: its bounds take as many pages as compact keys of 16 dimensions.
  void Bounds(int layer) {
    const SelectArgs& s = select_[layer];
    PageBoundScoresArgs a;
    a.shape = {c_.qo_heads, c_.kv_heads, kDim, s.heads.sm_scale};
    a.pool = pool_;
    a.q = {s.q, DType::kBF16};
    a.q_row_stride = s.q_row_stride;
    a.scores = scores_;
    a.scores_stride = scores_stride_;
    CHECK_CUDA(PageBoundScores(a, s.batch, s.selection, c_.kv_len, stream_));
  }
  void Top(int layer) {
    const SelectArgs& s = select_[layer];
    TopTokensArgs a;
    a.scores = scores_;
    a.scores_stride = scores_stride_;
    a.granularity = kBoundTokens;
    a.num_kv_heads = c_.kv_heads;
    a.lists = s.lists;
    CHECK_CUDA(TopTokens(a, s.selection, s.batch.kv_len, c_.batch, c_.kv_len, stream_));
  }
  std::vector<int32_t> List(int layer) {
    std::vector<int32_t> list(streams_ * int64_t{c_.budget});
    CHECK_CUDA(cudaStreamSynchronize(stream_));
    CHECK_CUDA(cudaMemcpy(list.data(), select_[layer].lists.tokens, list.size() * 4, cudaMemcpyDeviceToHost));
    return list;
  }
  // Bytes that must be read: compact keys, K and V of the list; of dense attention.
  double SelectBytes() const { return 2.0 * kDims * streams_ * c_.kv_len; }
  double AttendBytes() const { return 4.0 * kDim * streams_ * c_.budget; }
  double DenseBytes() const { return 4.0 * kDim * streams_ * c_.kv_len; }

 private:
  template <typename T>
  T* Keep(T* p) {
    kept_.push_back(const_cast<void*>(static_cast<const void*>(p)));
    return p;
  }
  const SparseCase c_;
  const int streams_;
  KvPoolView pool_;
  cudaStream_t stream_;
  const StagedStep *first_, *refresh_, *plain_;
  float *scores_, *kept_mass_;
  int64_t scores_stride_;
  float* scratch_ = nullptr;
  std::vector<SelectArgs> select_;
  std::vector<DecodeArgs> attend_, dense_;
  std::vector<SparseArgs> packed_;
  std::vector<void*> kept_;
};

void Sparse(const SparseCase& c, double rate, bool forms) {
  SparseSetup s(c);
  const double select_floor = s.SelectBytes() / rate * 1e6, attend_floor = s.AttendBytes() / rate * 1e6;
  const double dense = s.LayerUs([&](int l) { s.Dense(l); });
  const double select = s.LayerUs([&](int l) { s.Select(l); }), attend = s.LayerUs([&](int l) { s.Attend(l); });
  const double both = s.LayerUs([&](int l) {
    s.Select(l);
    s.Attend(l);
  });
  std::printf(
      "sparse %-14s select %7.2f + attend %7.2f = %7.2f us, both %7.2f us (floor %6.2f + %6.2f); dense %8.2f us "
      "(floor %7.2f): %5.2f x\n",
      c.name, select, attend, select + attend, both, select_floor, attend_floor, dense, s.DenseBytes() / rate * 1e6,
      dense / both);
  std::fflush(stdout);
  if (forms) {
    const std::vector<int32_t> want = s.List(0);
    for (const SelectForm& f : kForms) {
      const double alone = s.LayerUs([&](int l) { s.Select(l, f); });
      const std::vector<int32_t> got = s.List(0);
      size_t different = 0;
      for (size_t i = 0; i < got.size(); ++i) different += got[i] != want[i];
      std::printf("  form %2d x %4d, %d tiles: select %7.2f us, both", f.cluster, f.threads, f.tiles, alone);
      for (const int split : {64, 128, 256}) {
        std::printf(" %7.2f (split %d)", s.LayerUs([&](int l) {
          s.Select(l, f);
          s.Attend(l, split);
        }),
                    split);
      }
      std::printf("; %zu entries differ\n", different);
      std::fflush(stdout);
    }
  }
  const double refresh = s.LayerUs([&](int l) { s.Refresh(l); }), first = s.LayerUs([&](int l) { s.First(l); });
  std::printf("  refresh %7.2f us, first %7.2f us (floor of reading K %6.2f)\n", refresh, first,
              s.DenseBytes() / 2 / rate * 1e6);
  const double bounds = s.LayerUs([&](int l) { s.Bounds(l); }), top = s.LayerUs([&](int l) { s.Top(l); });
  const double quest = s.LayerUs([&](int l) {
    s.Bounds(l);
    s.Top(l);
    s.Attend(l);
  });
  for (int l = 0; l < c.layers; ++l) s.PackedStep(l, true);
  const double packed = s.LayerUs([&](int l) { s.Packed(l); });
  std::vector<double> plain, with_mass;  // in turns: they differ by less than a clock drifts
  for (int i = 0; i < 5; ++i) {
    plain.push_back(s.LayerUs([&](int l) { s.Packed(l); }));
    with_mass.push_back(s.LayerUs([&](int l) { s.PackedWithMass(l); }));
  }
  std::sort(plain.begin(), plain.end());
  std::sort(with_mass.begin(), with_mass.end());
  std::printf("  packed: %7.3f us (%.3f to %.3f), with the kept mass %7.3f us (%.3f to %.3f): %.2f %%\n", plain[2],
              plain[0], plain[4], with_mass[2], with_mass[0], with_mass[4], 100 * (with_mass[2] / plain[2] - 1));
  const double packed_refresh = s.LayerUs([&](int l) { s.PackedStep(l, false); });
  std::printf("  packed: choice and attention %7.2f us (floor %6.2f), refresh %7.2f us; %5.2f x of dense;", packed,
              (s.PackedBytes() + s.AttendBytes()) / rate * 1e6, packed_refresh, dense / packed);
  for (const int cluster : {2, 4, 8}) {
    if (c.kv_len > 32768) continue;  // not all of them hold its keys
    std::printf(" clusters of %d %7.2f us;", cluster, s.LayerUs([&](int l) { s.Packed(l, cluster); }));
  }
  std::printf("\n");
  std::fflush(stdout);
  std::printf("  quest: bounds %7.2f + top %6.2f us, with attention %7.2f us\n", bounds, top, quest);
  std::fflush(stdout);
}

__global__ void EmptyKernel() {}

int Main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "all";
  AllocateFlushBuffer();
  if (what == "all" || what == "topk") {
    std::printf("empty kernel %.2f us alone\n", 1e3 * MedianMs(50, [] { EmptyKernel<<<1, 32>>>(); }));
    Top(32768, 2048, "normal");
    Top(32768, 2048, "heavy");
    Top(32767, 1638, "normal");
    Top(8192, 512, "normal");
    Top(32768, 2048, "bits");
    Top(131072, 8192, "normal");
    Top(1 << 20, 8192, "heavy");
  }
  if (what == "all" || what == "sparse") {
    const bool forms = argc > 2 && std::strcmp(argv[2], "forms") == 0;
    const std::string filter = argc > 2 + forms ? argv[2 + forms] : "";
    const double rate = ReadRate(int64_t{4} << 30);
    std::printf("read %.3f TB/s\n", rate * 1e-12);
    const SparseCase cases[] = {{"B1 32K", 1, 32768, 12},
                                {"B8 32K", 8, 32768, 3},
                                {"B1 16K", 1, 16384, 12},
                                {"B1 128K", 1, 131072, 6},
                                {"B1 8K", 1, 8192, 12},
                                {"B8 16K", 8, 16384, 3},
                                {"B8 128K", 8, 131072, 2},
                                {"B32 32K", 32, 32768, 2},
                                {"B1 32K MHA", 1, 32768, 4, 32, 32},
                                {"B1 32K Tb512", 1, 32768, 12, 32, 8, 512},
                                {"B1 32K sinks", 1, 32768, 12, 32, 8, 2048, 0.25f, true},
                                {"B8 32K sinks", 8, 32768, 3, 32, 8, 2048, 0.25f, true},
                                {"B8 4.1K", 8, 4200, 12},
                                {"B1 32K equal", 1, 32768, 12, 32, 8, 2048, 1.0f / 64},
                                {"B8 32K equal", 8, 32768, 3, 32, 8, 2048, 1.0f / 64}};
    for (const SparseCase& c : cases) {
      if (std::string(c.name).find(filter) != std::string::npos) Sparse(c, rate, forms);
    }
  }
  if (what == "all" || what == "columns") {
    std::printf("copy %.3f TB/s (read plus write), read %.3f TB/s\n", CopyRate(int64_t{2} << 30) * 1e-12,
                ReadRate(int64_t{4} << 30) * 1e-12);
    const double anchor = AttentionRate();
    Columns("512 of 32K", {.kv_len = 32768, .probes = 512}, anchor);
    Columns("512 of 32K, one in 8", {.kv_len = 32768, .probes = 512, .stride = 8}, anchor);
    Columns("128 of 32K", {.kv_len = 32768, .probes = 128}, anchor);
    Columns("512 of 8K", {.kv_len = 8192, .probes = 512}, anchor);
    Columns("513 of 8191, half BAND", {.kv_len = 8191, .probes = 513, .stride = 3, .band_heads = 4}, anchor);
    Columns("512 of 32K, heads of 64", {.head_dim = 64, .kv_len = 32768, .probes = 512}, anchor);
  }
  return 0;
}

}  // namespace
}  // namespace spl::kernels::cuda

int main(int argc, char** argv) { return spl::kernels::cuda::Main(argc, argv); }
