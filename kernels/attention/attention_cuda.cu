// Argument checks and the choice of a variant.
#include "kernels/attention/attention_cuda_common.h"

namespace spl::kernels::cuda {
namespace {

bool FloatType(DType t) { return t == DType::kF32 || t == DType::kBF16; }

// decodes: kElsewhere and pages of kE4M3 are served; has_lists: kSelected, too.
template <typename Args>
cudaError_t Check(const Args& a, bool decodes, bool has_lists) {
  const AttentionHeads& h = a.heads;
  if (h.num_kv_heads < 1 || h.num_qo_heads < 1 || h.num_qo_heads % h.num_kv_heads != 0 || h.head_dim < 1 ||
      !(h.sm_scale > 0) || a.batch.num_sequences < 0 || a.batch.pool.num_pages < 0 || a.max_kv_len < 0) {
    return cudaErrorInvalidValue;
  }
  if (a.batch.pool.head_dim != h.head_dim || a.q_row_stride < int64_t{h.num_qo_heads} * h.head_dim) {
    return cudaErrorInvalidValue;
  }
  if (h.num_kv_heads > kMaxKvHeads || h.head_dim % 8 != 0 || h.head_dim > 256 || !FloatType(a.dtype) ||
      !(FloatType(a.batch.pool.dtype) || (decodes && a.batch.pool.dtype == DType::kE4M3))) {
    return cudaErrorNotSupported;
  }
  for (int i = 0; i < h.num_kv_heads; ++i) {
    const HeadRule& r = a.rules.head[i];
    if (r.rule == VisibilityRule::kSelected && has_lists) continue;
    if (r.rule == VisibilityRule::kElsewhere && decodes) continue;
    if (r.rule != VisibilityRule::kFull && r.rule != VisibilityRule::kBand && r.rule != VisibilityRule::kLines)
      return cudaErrorNotSupported;
    if (r.rule == VisibilityRule::kBand && (r.num_sinks < 0 || r.window < 1)) return cudaErrorInvalidValue;
  }
  if (a.batch.page_tables == nullptr || a.batch.table_offset == nullptr || a.batch.kv_len == nullptr ||
      a.batch.pool.base == nullptr || a.q == nullptr || a.out == nullptr || a.workspace == nullptr) {
    return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}

bool AnyHead(const AttentionHeads& heads, const HeadRules& rules, bool with_lines, uint64_t skip = 0) {
  for (int h = 0; h < heads.num_kv_heads; ++h) {
    if ((skip >> h & 1) == 0 && (rules.head[h].rule == VisibilityRule::kLines) == with_lines) return true;
  }
  return false;
}

cudaError_t CheckLines(const PrefillArgs& a) {
  const PrefillLines& l = a.lines;
  if (a.batch.num_sequences != 1) return cudaErrorNotSupported;
  if (l.tiles == nullptr || l.row_tiles < (a.num_rows + 63) / 64 || l.tile_words < 1 || l.column_words < 0 ||
      (l.column_words > 0 && (l.column_masks == nullptr || l.columns == nullptr || l.column_pages == nullptr))) {
    return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}

cudaError_t PrefillWithLines(const PrefillArgs& a, cudaStream_t stream, Variant variant) {
  if (variant == Variant::kGeneric) return PrefillGeneric(a, stream, HeadsOf::kLines);
  if (variant == Variant::kMma) return cudaErrorNotSupported;
  const cudaError_t e = PrefillLinesSm90(a, stream);
  return e == cudaErrorNotSupported && variant == Variant::kAuto ? PrefillGeneric(a, stream, HeadsOf::kLines) : e;
}

cudaError_t PrefillWithoutLines(const PrefillArgs& args, cudaStream_t stream, Variant variant) {
  switch (variant) {
    case Variant::kGeneric:
      return PrefillGeneric(args, stream, HeadsOf::kOthers);
    case Variant::kMma:
      return PrefillMma(args, stream);
    case Variant::kSm90:
      return PrefillSm90(args, stream);
    case Variant::kAuto:
      break;
  }
  cudaError_t e = PrefillSm90(args, stream);
  if (e == cudaErrorNotSupported) e = PrefillMma(args, stream);
  if (e == cudaErrorNotSupported) e = PrefillGeneric(args, stream, HeadsOf::kOthers);
  return e;
}

}  // namespace

size_t PrefillWorkspaceBytes() { return 256; }

cudaError_t PrefillAttention(const PrefillArgs& args, cudaStream_t stream, Variant variant) {
  if (args.num_rows == 0 || args.batch.num_sequences == 0) return cudaSuccess;
  if (cudaError_t e = Check(args, false, false); e != cudaSuccess) return e;
  if (args.num_rows < 0 || args.row_begin == nullptr || args.positions == nullptr) return cudaErrorInvalidValue;
  const bool lines = AnyHead(args.heads, args.rules, true, args.skip_heads);
  if (lines) {
    if (cudaError_t e = CheckLines(args); e != cudaSuccess) return e;
    if (cudaError_t e = PrefillWithLines(args, stream, variant); e != cudaSuccess) return e;
  }
  return AnyHead(args.heads, args.rules, false, args.skip_heads) ? PrefillWithoutLines(args, stream, variant)
                                                                 : cudaSuccess;
}

cudaError_t DecodeAttention(const DecodeArgs& args, cudaStream_t stream, Variant variant) {
  if (args.batch.num_sequences == 0) return cudaSuccess;
  if (cudaError_t e = Check(args, true, args.lists.tokens != nullptr); e != cudaSuccess) return e;
  if (args.max_kv_len > kMaxDecodeKvLen || AnyHead(args.heads, args.rules, true)) return cudaErrorNotSupported;
  if (args.lists.tokens != nullptr && (args.lists.counts == nullptr || args.lists.stride < 1 || args.list_split < 0 ||
                                       args.list_split % kPageTokens != 0 || args.list_split > 2048)) {
    return cudaErrorInvalidValue;
  }
  switch (variant) {
    case Variant::kGeneric:
      return DecodeGeneric(args, stream);
    case Variant::kMma:
      return DecodeMma(args, stream);
    case Variant::kSm90:
      return cudaErrorNotSupported;
    case Variant::kAuto:
      break;
  }
  bool any = args.plans != nullptr;
  for (int h = 0; h < args.heads.num_kv_heads; ++h) any |= args.rules.head[h].rule != VisibilityRule::kElsewhere;
  if (!any) return cudaSuccess;
  const cudaError_t e = DecodeMma(args, stream);
  return e == cudaErrorNotSupported ? DecodeGeneric(args, stream) : e;
}

}  // namespace spl::kernels::cuda
