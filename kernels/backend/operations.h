// The operations of a Backend by group. Their definitions, oracles and costs are in the files that are included here.
#pragma once

#include "absl/status/status.h"
#include "kernels/activation/activation.h"
#include "kernels/activation/linear_silu_mul.h"
#include "kernels/attention/attention.h"
#include "kernels/common/kernel_context.h"
#include "kernels/embedding/embedding.h"
#include "kernels/embedding/scatter_rows.h"
#include "kernels/fill/fill.h"
#include "kernels/gemm/gemm.h"
#include "kernels/gemm/linear_add.h"
#include "kernels/kv_copy/align_copy.h"
#include "kernels/kv_copy/fuse_rows.h"
#include "kernels/moe/grouped_linear.h"
#include "kernels/moe/routing.h"
#include "kernels/norm/norm.h"
#include "kernels/norm/row_norms.h"
#include "kernels/quantize/quantize_rows.h"
#include "kernels/rope/rope.h"
#include "kernels/sampling/argmax.h"
#include "kernels/sampling/sample_tokens.h"
#include "kernels/selection/cacheblend/value_deviation.h"
#include "kernels/selection/candidates.h"
#include "kernels/selection/h2o/heavy_hitters.h"
#include "kernels/selection/loopserve/query_window.h"
#include "kernels/selection/loopserve/select_lines.h"
#include "kernels/selection/quest/page_bound_scores.h"
#include "kernels/selection/sparcas/attend_hot_rows.h"
#include "kernels/selection/sparcas/refill_hot_rows.h"
#include "kernels/selection/sparcas/select_tokens.h"
#include "kernels/selection/sparcas/sparse_attention.h"
#include "kernels/selection/sparsex/column_scores.h"
#include "kernels/selection/sparsex/pool_scores.h"
#include "kernels/selection/top_k.h"
#include "kernels/selection/top_tokens.h"

// Each operation is `absl::Status name(const KernelContext&, const args&) const`: V(name, args).
// Products, norms and rows of a layer.
#define SPLICE_LAYER_OPERATIONS(V)    \
  V(Linear, LinearArgs)               \
  V(LinearAdd, LinearAddArgs)         \
  V(LinearSiluMul, LinearSiluMulArgs) \
  V(QuantizeRows, QuantizeRowsArgs)   \
  V(RmsNorm, RmsNormArgs)             \
  V(RowNorms, RowNormsArgs)           \
  V(SiluMul, SiluMulArgs)             \
  V(GatherRows, GatherRowsArgs)       \
  V(ScatterRows, ScatterRowsArgs)     \
  V(Argmax, ArgmaxArgs)               \
  V(SampleTokens, SampleTokensArgs)   \
  V(FillRandom, FillRandomArgs)
// Mixtures of experts.
#define SPLICE_EXPERT_OPERATIONS(V)   \
  V(RouteExperts, RouteExpertsArgs)   \
  V(GroupedLinear, GroupedLinearArgs) \
  V(CombineExperts, CombineExpertsArgs)
// K and V in the pages of the pool.
#define SPLICE_KV_OPERATIONS(V)   \
  V(RopeWriteKv, RopeWriteKvArgs) \
  V(AlignCopy, AlignCopyArgs)     \
  V(FuseRows, FuseRowsArgs)       \
  V(ValueDeviation, ValueDeviationArgs)
// Attention.
#define SPLICE_ATTENTION_OPERATIONS(V)      \
  V(PrefillAttention, PrefillAttentionArgs) \
  V(DecodeAttention, DecodeAttentionArgs)
// Scores of tokens and pages, and choices by them.
#define SPLICE_SELECTION_OPERATIONS(V)    \
  V(ColumnScores, ColumnScoresArgs)       \
  V(PoolScores, PoolScoresArgs)           \
  V(TopK, TopKArgs)                       \
  V(ListCandidates, ListCandidatesArgs)   \
  V(SelectTokens, SelectTokensArgs)       \
  V(SparseAttention, SparseAttentionArgs) \
  V(RefillHotRows, RefillHotRowsArgs)     \
  V(AttendHotRows, AttendHotRowsArgs)     \
  V(TopTokens, TopTokensArgs)             \
  V(ChooseByQueryWindow, QueryWindowArgs) \
  V(HeavyHitters, HeavyHittersArgs)       \
  V(PageBoundScores, PageBoundScoresArgs) \
  V(SelectLines, SelectLinesArgs)
#define SPLICE_OPERATIONS(V)     \
  SPLICE_LAYER_OPERATIONS(V)     \
  SPLICE_EXPERT_OPERATIONS(V)    \
  SPLICE_KV_OPERATIONS(V)        \
  SPLICE_ATTENTION_OPERATIONS(V) \
  SPLICE_SELECTION_OPERATIONS(V)

namespace spl::kernels {

#define SPLICE_DECLARE(name, args) virtual absl::Status name(const KernelContext& ctx, const args& a) const = 0;

class LayerOperations {
 public:
  SPLICE_LAYER_OPERATIONS(SPLICE_DECLARE)

 protected:
  ~LayerOperations() = default;
};

class ExpertOperations {
 public:
  SPLICE_EXPERT_OPERATIONS(SPLICE_DECLARE)

 protected:
  ~ExpertOperations() = default;
};

class KvOperations {
 public:
  SPLICE_KV_OPERATIONS(SPLICE_DECLARE)

 protected:
  ~KvOperations() = default;
};

class AttentionOperations {
 public:
  SPLICE_ATTENTION_OPERATIONS(SPLICE_DECLARE)

 protected:
  ~AttentionOperations() = default;
};

class SelectionOperations {
 public:
  SPLICE_SELECTION_OPERATIONS(SPLICE_DECLARE)

 protected:
  ~SelectionOperations() = default;
};

#undef SPLICE_DECLARE

}  // namespace spl::kernels
