#include "services/engine/model/token_choices.h"

#include <algorithm>
#include <bit>

#include "services/base/check.h"
#include "services/engine/model/grow_buffer.h"

namespace spl::engine {

TokenChoices::TokenChoices(const Model& model, int rank, const kernels::KvPoolView& pool, int32_t max_rows,
                           kernels::Session& session)
    : whole_(model),
      model_(model.rank(rank)),
      rank_(rank),
      pool_(pool),
      max_streams_(static_cast<size_t>(max_rows) * static_cast<size_t>(model_.config().num_kv_heads)),
      session_(session) {}

absl::Status TokenChoices::Prepare(std::span<const DecodeRow> rows) {
  rows_ = rows;
  plan_ = {};
  refreshes_ = listed_ = false;
  sequences_.clear();
  int64_t longest_list = 0, longest = 0;
  for (const DecodeRow& row : rows) {
    const ScoringPlan plan = row.selector->scoring();
    const auto layers = row.selector->layers();
    sequences_.emplace_back();
    if (layers.empty()) continue;
    if (plan.scoring != TokenScoring::kNone) {
      if (!scores()) plan_ = plan;
      SPLICE_CHECK(plan.SharesStep(plan_), "one way of choosing in a step");
      plan_.first_layer = std::min(plan_.first_layer, plan.first_layer);
    }
    SPLICE_CHECK(row.compact != nullptr, "a selector that chooses or lists has compact pages");
    sequences_.back() = {.compact_tables = row.compact->tables(),
                         .layers = layers,
                         .budget = plan.budget,
                         .recent = plan.recent,
                         .dims = row.compact->dims(rank_),
                         .list_pages = static_cast<int32_t>(row.compact->needs().list_pages),
                         .first_fresh = plan.first_fresh};
    refreshes_ |= std::any_of(layers.begin(), layers.end(), [](const auto& layer) { return layer.refresh; });
    listed_ |= std::any_of(layers.begin(), layers.end(), [](const auto& layer) { return layer.listed; });
    longest_list = std::max(longest_list, plan.list_tokens());
    longest = std::max(longest, row.kv_len());
  }
  if (!any()) return absl::OkStatus();
  // Powers of two: a recording serves many budgets and lengths.
  const auto stride = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(longest_list)));
  const size_t entries = max_streams_ * static_cast<size_t>(stride);
  SPLICE_RETURN_IF_ERROR(
      GrowBuffer(model_.backend(), session_, list_memory_, sizeof(int32_t) * (entries + max_streams_)));
  auto* tokens = static_cast<int32_t*>(list_memory_->data());
  lists_ = {tokens, tokens + entries, stride};
  scores_stride_ = 0;
  if (plan_.scoring == TokenScoring::kCompactKeys || !scores()) return absl::OkStatus();
  scores_stride_ = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(longest)));
  if (plan_.scoring == TokenScoring::kPageBounds)
    scores_stride_ = std::max<int64_t>(scores_stride_ / kernels::kBoundTokens, 1);
  return GrowBuffer(model_.backend(), session_, scores_,
                    sizeof(float) * max_streams_ * static_cast<size_t>(scores_stride_));
}

uint64_t TokenChoices::key() const {
  if (!any()) return 0;
  uint64_t key = 0x2545f4914f6cdd1dull;
  const auto mix = [&](uint64_t value) { key = (key ^ value) * 0x9e3779b97f4a7c15ull + 1; };
  mix(static_cast<uint64_t>(plan_.scoring) << 33 | static_cast<uint64_t>(listed_) << 32 |
      static_cast<uint64_t>(plan_.num_dims + plan_.window));
  mix(static_cast<uint64_t>(plan_.first_layer) << 32 | static_cast<uint64_t>(lists_.stride));
  mix(static_cast<uint64_t>(scores_stride_));
  mix(reinterpret_cast<uint64_t>(lists_.tokens));
  // A choice is due in few steps, and costs the launches of its passes over K: these steps are recorded apart.
  if (plan_.scoring == TokenScoring::kQueryWindow) mix(refreshes_ ? 2 : 1);
  if (scores_stride_ > 0) mix(reinterpret_cast<uint64_t>(scores_->data()));
  return key;
}

void TokenChoices::ViewLayer(int32_t layer) {
  const ModelConfig& c = model_.config();
  const int32_t first = model_.first_kv_head(), whole_heads = whole_.config().num_kv_heads;
  const auto heads = static_cast<size_t>(c.num_kv_heads);
  pages_.resize(rows_.size() * heads);
  compact_.resize(rows_.size() * heads);
  lists_of_.resize(rows_.size() * heads);
  of_layer_.clear();
  for (size_t s = 0; s < rows_.size(); ++s) {
    const kernels::SequenceSelection& selection = sequences_[s];
    kernels::SelectingSequence& sequence = of_layer_.emplace_back();
    sequence.kv_len = static_cast<int32_t>(rows_[s].kv_len());
    if (selection.layers.empty()) continue;
    const auto list_pages = static_cast<size_t>(selection.list_pages);
    for (size_t h = 0; h < heads; ++h) {
      const auto head = first + static_cast<int32_t>(h);
      pages_[s * heads + h] = rows_[s].kv->stream(layer, head);
      const std::span<const int32_t> table = selection.compact_tables[static_cast<size_t>(layer * whole_heads + head)];
      lists_of_[s * heads + h] = table.first(std::min(list_pages, table.size()));
      compact_[s * heads + h] = table.subspan(std::min(list_pages, table.size()));
    }
    sequence.page_tables = std::span(pages_).subspan(s * heads, heads);
    sequence.compact_tables = std::span(compact_).subspan(s * heads, heads);
    sequence.list_tables = std::span(lists_of_).subspan(s * heads, heads);
    sequence.first_fresh = selection.first_fresh;
    sequence.step = selection.layers[static_cast<size_t>(layer)];
    sequence.budget = selection.budget;
    sequence.recent = selection.recent;
    if (selection.dims != nullptr)
      sequence.dims = selection.dims + int64_t{layer} * c.num_kv_heads * 2 * plan_.num_dims;
  }
}

absl::Status TokenChoices::Choose(const kernels::KernelContext& context, const kernels::AttentionShape& shape,
                                  kernels::ConstActivations q, int64_t q_row_stride, int32_t layer) {
  ViewLayer(layer);
  const kernels::Backend& backend = model_.backend();
  if (listed_)
    SPLICE_RETURN_IF_ERROR(backend.ListCandidates(
        context,
        {.pool = pool_, .num_kv_heads = shape.num_kv_heads, .sequences = of_layer_, .lists = lists_, .layer = layer}));
  if (!scores(layer)) return absl::OkStatus();
  if (plan_.scoring == TokenScoring::kCompactKeys)
    return backend.SelectTokens(context, {.shape = shape,
                                          .pool = pool_,
                                          .num_dims = plan_.num_dims,
                                          .q = q,
                                          .q_row_stride = q_row_stride,
                                          .sequences = of_layer_,
                                          .lists = lists_,
                                          .layer = layer});
  auto* scores = scores_stride_ > 0 ? static_cast<float*>(scores_->data()) : nullptr;
  if (plan_.scoring == TokenScoring::kQueryWindow)
    return backend.ChooseByQueryWindow(context, {.shape = shape,
                                                 .pool = pool_,
                                                 .window = plan_.window,
                                                 .q = q,
                                                 .q_row_stride = q_row_stride,
                                                 .sequences = of_layer_,
                                                 .scores = scores,
                                                 .scores_stride = scores_stride_,
                                                 .lists = lists_,
                                                 .layer = layer,
                                                 .chooses = refreshes_,
                                                 .listed = listed_});
  SPLICE_RETURN_IF_ERROR(backend.PageBoundScores(context, {.shape = shape,
                                                           .pool = pool_,
                                                           .q = q,
                                                           .q_row_stride = q_row_stride,
                                                           .sequences = of_layer_,
                                                           .scores = scores,
                                                           .scores_stride = scores_stride_,
                                                           .layer = layer}));
  return backend.TopTokens(context, {.scores = scores,
                                     .scores_stride = scores_stride_,
                                     .granularity = kernels::kBoundTokens,
                                     .num_kv_heads = shape.num_kv_heads,
                                     .pool = pool_,
                                     .sequences = of_layer_,
                                     .lists = lists_,
                                     .layer = layer});
}

}  // namespace spl::engine
