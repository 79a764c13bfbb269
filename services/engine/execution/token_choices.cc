#include "services/engine/execution/token_choices.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <utility>

#include "services/base/check.h"
#include "services/engine/cache/grow_buffer.h"

namespace spl::engine {

TokenChoices::TokenChoices(const Model& model, int rank, const kernels::KvPoolView& pool, int32_t max_rows,
                           kernels::Session& session)
    : whole_(model),
      model_(model.rank(rank)),
      rank_(rank),
      pool_(pool),
      max_streams_(static_cast<size_t>(max_rows) * static_cast<size_t>(model_.config().num_kv_heads)),
      session_(session) {}

bool TokenChoices::any(int32_t layer) const {
  return listed_ || std::any_of(plans_.begin(), plans_.end(), [&](const Plan& plan) { return plan.scores(layer); });
}

// The ways that there are among the rows that choose, in their order.
void TokenChoices::CollectPlans() {
  plans_.clear();
  for (const DecodeRow& row : rows_) {
    const auto layers = row.selector->layers();
    if (layers.empty()) continue;
    if (const OuterChoice* const outer = row.selector->outer(); outer != nullptr) {
      AddPlan(outer->scoring, row.kv_len());
      // Before there is an outer choice, nothing is chosen from it.
      if (std::none_of(layers.begin(), layers.end(), [](const auto& layer) { return layer.selects; })) continue;
    }
    AddPlan(row.selector->scoring(), row.kv_len());
  }
  SPLICE_CHECK(plans_.size() <= static_cast<size_t>(kernels::kSelectionPlansMax), "ways of choosing in a step");
}

void TokenChoices::AddPlan(const ScoringPlan& scoring, int64_t kv_len) {
  if (scoring.scoring == TokenScoring::kNone) return;
  const auto at =
      std::lower_bound(plans_.begin(), plans_.end(), scoring,
                       [](const Plan& plan, const ScoringPlan& other) { return plan.scoring.OrdersBefore(other); });
  if (at == plans_.end() || !at->scoring.SharesStep(scoring)) {
    plans_.insert(at, {.scoring = scoring, .longest = kv_len});
  } else {
    at->scoring.first_layer = std::min(at->scoring.first_layer, scoring.first_layer);
    at->longest = std::max(at->longest, kv_len);
  }
}

TokenChoices::Plan* TokenChoices::PlanOf(const ScoringPlan& scoring) {
  const auto plan =
      std::find_if(plans_.begin(), plans_.end(), [&](const Plan& other) { return other.scoring.SharesStep(scoring); });
  return plan == plans_.end() ? nullptr : &*plan;
}

namespace {

void AddRefreshes(std::span<const kernels::LayerSelection> layers, std::vector<bool>& all) {
  std::vector<bool> own;
  for (const kernels::LayerSelection& layer : layers) own.push_back(layer.refresh);
  if (std::find(own.begin(), own.end(), true) == own.end()) return;
  if (all.empty()) {
    all = std::move(own);
  } else if (all != own) {
    all.assign(layers.size(), true);
  }
}

}  // namespace

void TokenChoices::TakeSelection(const DecodeRow& row, const ScoringPlan& scoring,
                                 std::span<const kernels::LayerSelection> layers,
                                 kernels::SequenceSelection& selection) {
  selection = {.compact_tables = row.compact->tables(),
               .layers = layers,
               .budget = scoring.budget,
               .recent = scoring.recent,
               .dims = row.compact->dims(rank_),
               .list_pages = static_cast<int32_t>(row.compact->needs().list_pages),
               .first_fresh = scoring.first_fresh};
  if (row.hot != nullptr) selection.hot = row.hot->rows(rank_);
  Plan* const plan = PlanOf(scoring);
  if (plan == nullptr) return;
  plan->hot |= row.hot != nullptr;
  selection.plan = static_cast<int32_t>(plan - plans_.data());
  AddRefreshes(layers, plan->refreshes);
}

absl::Status TokenChoices::Prepare(std::span<const DecodeRow> rows) {
  rows_ = rows;
  listed_ = estimates_ = false;
  sequences_.assign(rows.size(), {});
  outer_.assign(rows.size(), {});
  CollectPlans();
  int64_t longest_list = 0;
  for (size_t s = 0; s < rows.size(); ++s) {
    const TokenSelector& selector = *rows[s].selector;
    const ScoringPlan scoring = selector.scoring();
    const auto layers = selector.layers();
    if (layers.empty()) continue;
    SPLICE_CHECK(rows[s].compact != nullptr, "a selector that chooses or lists has compact pages");
    TakeSelection(rows[s], scoring, layers, sequences_[s]);
    longest_list = std::max(longest_list, scoring.list_tokens());
    estimates_ |= rows[s].estimates && scoring.scoring == TokenScoring::kPackedKeys;
    listed_ |= std::any_of(layers.begin(), layers.end(), [](const auto& layer) { return layer.listed; });
    const OuterChoice* const outer = selector.outer();
    if (outer == nullptr) continue;
    TakeSelection(rows[s], outer->scoring, outer->layers, outer_[s]);
    longest_list = std::max(longest_list, outer->scoring.list_tokens());
    // The list lies behind the queries; all that is kept is in it, the step's own position included.
    const kernels::QueryWindow window = QueryWindowOf(outer->scoring, whole_);
    sequences_[s].list_begin = static_cast<int32_t>(window.query_pages());
    sequences_[s].list_pages = static_cast<int32_t>(window.num_pages() - window.query_pages());
    sequences_[s].first_fresh = static_cast<int32_t>(rows[s].kv_len());
    sequences_[s].outer = &outer_[s];
  }
  if (!any()) return absl::OkStatus();
  // Powers of two: a recording serves many budgets and lengths.
  const auto stride = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(longest_list)));
  const size_t entries = max_streams_ * static_cast<size_t>(stride);
  SPLICE_RETURN_IF_ERROR(
      GrowBuffer(model_.backend(), session_, list_memory_, sizeof(int32_t) * (entries + max_streams_)));
  auto* tokens = static_cast<int32_t*>(list_memory_->data());
  lists_ = {tokens, tokens + entries, stride};
  if (estimates_)
    SPLICE_RETURN_IF_ERROR(GrowBuffer(model_.backend(), session_, kept_mass_,
                                      sizeof(float) * max_streams_ * static_cast<size_t>(model_.config().num_layers)));
  int64_t longest_scores = 0;
  for (Plan& plan : plans_) {
    if (plan.scoring.scoring == TokenScoring::kCompactKeys || plan.scoring.scoring == TokenScoring::kPackedKeys)
      continue;
    // Heavy hitters have scores for their lists alone.
    const int64_t scored = plan.scoring.scoring == TokenScoring::kHeavyHitters ? stride : plan.longest;
    plan.scores_stride = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(scored)));
    if (plan.scoring.scoring == TokenScoring::kPageBounds)
      plan.scores_stride = std::max<int64_t>(plan.scores_stride / kernels::kBoundTokens, 1);
    longest_scores = std::max(longest_scores, plan.scores_stride);
  }
  if (longest_scores == 0) return absl::OkStatus();
  return GrowBuffer(model_.backend(), session_, scores_,
                    sizeof(float) * max_streams_ * static_cast<size_t>(longest_scores));
}

uint64_t TokenChoices::key() const {
  if (!any()) return 0;
  uint64_t key = 0x2545f4914f6cdd1dull;
  const auto mix = [&](uint64_t value) { key = (key ^ value) * 0x9e3779b97f4a7c15ull + 1; };
  mix(static_cast<uint64_t>(lists_.stride) << 1 | static_cast<uint64_t>(listed_));
  mix(reinterpret_cast<uint64_t>(lists_.tokens));
  if (estimates_) mix(reinterpret_cast<uint64_t>(kept_mass_->data()));
  for (const Plan& plan : plans_) {
    const ScoringPlan& scoring = plan.scoring;
    mix(static_cast<uint64_t>(scoring.scoring) << 56 | static_cast<uint64_t>(scoring.outer) << 63 |
        static_cast<uint64_t>(scoring.first_layer) << 32 | static_cast<uint64_t>(plan.hot) << 31 |
        static_cast<uint64_t>(scoring.num_dims + scoring.window));
    mix(static_cast<uint64_t>(plan.scores_stride));
    // A layer's choice is due in few steps, and costs the launches of its passes over K: steps are recorded apart by
    // it.
    if (scoring.scoring == TokenScoring::kQueryWindow) mix(std::hash<std::vector<bool>>()(plan.refreshes));
    if (plan.scores_stride > 0) mix(reinterpret_cast<uint64_t>(scores_->data()));
  }
  return key;
}

void TokenChoices::ViewLayer(int32_t layer, bool outer) {
  const ModelConfig& c = model_.config();
  const int32_t first = model_.first_kv_head(), whole_heads = whole_.config().num_kv_heads;
  const auto heads = static_cast<size_t>(c.num_kv_heads);
  pages_.resize(rows_.size() * heads);
  compact_.resize(rows_.size() * heads);
  lists_of_.resize(rows_.size() * heads);
  of_layer_.clear();
  for (size_t s = 0; s < rows_.size(); ++s) {
    const kernels::SequenceSelection& selection = outer ? outer_[s] : sequences_[s];
    kernels::SelectingSequence& sequence = of_layer_.emplace_back();
    sequence.kv_len = static_cast<int32_t>(rows_[s].kv_len());
    if (selection.layers.empty()) continue;
    for (size_t h = 0; h < heads; ++h) {
      const auto head = first + static_cast<int32_t>(h);
      pages_[s * heads + h] = rows_[s].kv->stream(layer, head);
      const std::span<const int32_t> table = selection.compact_tables[layer * whole_heads + head];
      // A stream without compact pages has an empty table.
      const size_t begin = std::min(static_cast<size_t>(selection.list_begin), table.size());
      const size_t end = std::min(begin + static_cast<size_t>(selection.list_pages), table.size());
      lists_of_[s * heads + h] = table.subspan(begin, end - begin);
      compact_[s * heads + h] = table.subspan(end);
    }
    sequence.page_tables = std::span(pages_).subspan(s * heads, heads);
    sequence.compact_tables = std::span(compact_).subspan(s * heads, heads);
    sequence.list_tables = std::span(lists_of_).subspan(s * heads, heads);
    sequence.first_fresh = selection.first_fresh;
    sequence.step = selection.layers[layer];
    sequence.budget = selection.budget;
    sequence.recent = selection.recent;
    if (selection.dims != nullptr && !plans_.empty()) {
      const int32_t num_dims = plans_[selection.plan].scoring.num_dims;
      sequence.dims = selection.dims + int64_t{layer} * c.num_kv_heads * 2 * num_dims;
    }
    if (selection.hot.any()) sequence.hot = selection.hot.from(int64_t{layer} * c.num_kv_heads);
  }
}

absl::Status TokenChoices::Choose(const kernels::KernelContext& context, const kernels::AttentionShape& shape,
                                  kernels::ConstActivations q, int64_t q_row_stride, int32_t layer) {
  // Outer choices come first.
  size_t plan = 0;
  const auto is_outer = [&] { return plan < plans_.size() && plans_[plan].scoring.outer; };
  if (is_outer()) ViewLayer(layer, true);
  for (; is_outer(); ++plan) {
    if (plans_[plan].scores(layer)) SPLICE_RETURN_IF_ERROR(ChooseBy(plan, context, shape, q, q_row_stride, layer));
  }
  ViewLayer(layer, false);
  if (listed_)
    SPLICE_RETURN_IF_ERROR(model_.backend().ListCandidates(
        context,
        {.pool = pool_, .num_kv_heads = shape.num_kv_heads, .sequences = of_layer_, .lists = lists_, .layer = layer}));
  for (; plan < plans_.size(); ++plan) {
    if (plans_[plan].scores(layer) && !plans_[plan].attends())
      SPLICE_RETURN_IF_ERROR(ChooseBy(plan, context, shape, q, q_row_stride, layer));
  }
  return absl::OkStatus();
}

absl::Status TokenChoices::ChooseAndAttend(const kernels::KernelContext& context, const kernels::AttentionShape& shape,
                                           kernels::ConstActivations q, int64_t q_row_stride, kernels::Activations out,
                                           float* lse, int32_t layer) {
  float* const mass = !estimates_
                          ? nullptr
                          : static_cast<float*>(kept_mass_->data()) +
                                static_cast<size_t>(layer) * rows_.size() * static_cast<size_t>(shape.num_kv_heads);
  for (size_t plan = 0; plan < plans_.size(); ++plan) {
    if (!plans_[plan].scores(layer) || !plans_[plan].attends()) continue;
    TakePlan(plan, layer);
    SPLICE_RETURN_IF_ERROR(model_.backend().SparseAttention(context, {.shape = shape,
                                                                      .pool = pool_,
                                                                      .q = q,
                                                                      .q_row_stride = q_row_stride,
                                                                      .out = out,
                                                                      .lse = lse,
                                                                      .sequences = of_layer_,
                                                                      .lists = lists_,
                                                                      .kept_mass = mass,
                                                                      .layer = layer,
                                                                      .plan = static_cast<int32_t>(plan)}));
    if (plans_[plan].hot)
      SPLICE_RETURN_IF_ERROR(RefillAndAttend(plan, context, shape, q, q_row_stride, out, lse, layer));
  }
  return absl::OkStatus();
}

absl::Status TokenChoices::RefillAndAttend(size_t plan, const kernels::KernelContext& context,
                                           const kernels::AttentionShape& shape, kernels::ConstActivations q,
                                           int64_t q_row_stride, kernels::Activations out, float* lse, int32_t layer) {
  SPLICE_RETURN_IF_ERROR(model_.backend().RefillHotRows(context, {.pool = pool_,
                                                                  .num_kv_heads = shape.num_kv_heads,
                                                                  .sequences = of_layer_,
                                                                  .lists = lists_,
                                                                  .layer = layer,
                                                                  .plan = static_cast<int32_t>(plan)}));
  return model_.backend().AttendHotRows(context, {.shape = shape,
                                                  .pool = pool_,
                                                  .q = q,
                                                  .q_row_stride = q_row_stride,
                                                  .out = out,
                                                  .lse = lse,
                                                  .sequences = of_layer_,
                                                  .lists = lists_,
                                                  .layer = layer,
                                                  .plan = static_cast<int32_t>(plan)});
}

// Rows of other plans do nothing.
void TokenChoices::TakePlan(size_t plan, int32_t layer) {
  for (size_t s = 0; s < of_layer_.size(); ++s) {
    const kernels::SequenceSelection& selection = plans_[plan].scoring.outer ? outer_[s] : sequences_[s];
    if (selection.layers.empty()) continue;
    of_layer_[s].step =
        selection.plan == static_cast<int32_t>(plan) ? selection.layers[layer] : kernels::LayerSelection();
  }
}

absl::Status TokenChoices::ChooseBy(size_t plan, const kernels::KernelContext& context,
                                    const kernels::AttentionShape& shape, kernels::ConstActivations q,
                                    int64_t q_row_stride, int32_t layer) {
  const kernels::Backend& backend = model_.backend();
  const auto number = static_cast<int32_t>(plan);
  const Plan& own = plans_[plan];
  TakePlan(plan, layer);
  if (own.scoring.scoring == TokenScoring::kCompactKeys)
    return backend.SelectTokens(context, {.shape = shape,
                                          .pool = pool_,
                                          .num_dims = own.scoring.num_dims,
                                          .q = q,
                                          .q_row_stride = q_row_stride,
                                          .sequences = of_layer_,
                                          .lists = lists_,
                                          .layer = layer,
                                          .plan = number,
                                          .after_outer = plans_.front().scoring.outer});
  auto* const scores = static_cast<float*>(scores_->data());
  if (own.scoring.scoring == TokenScoring::kQueryWindow)
    return backend.ChooseByQueryWindow(context, {.shape = shape,
                                                 .pool = pool_,
                                                 .window = own.scoring.window,
                                                 .q = q,
                                                 .q_row_stride = q_row_stride,
                                                 .sequences = of_layer_,
                                                 .scores = scores,
                                                 .scores_stride = own.scores_stride,
                                                 .lists = lists_,
                                                 .layer = layer,
                                                 .plan = number,
                                                 .chooses = own.refreshes_in(layer),
                                                 .outer = own.scoring.outer,
                                                 .listed = listed_ && !own.scoring.outer});
  if (own.scoring.scoring == TokenScoring::kHeavyHitters)
    return backend.HeavyHitters(context, {.shape = shape,
                                          .pool = pool_,
                                          .q = q,
                                          .q_row_stride = q_row_stride,
                                          .sequences = of_layer_,
                                          .attention = scores,
                                          .attention_stride = own.scores_stride,
                                          .lists = lists_,
                                          .layer = layer,
                                          .plan = number});
  SPLICE_RETURN_IF_ERROR(backend.PageBoundScores(context, {.shape = shape,
                                                           .pool = pool_,
                                                           .q = q,
                                                           .q_row_stride = q_row_stride,
                                                           .sequences = of_layer_,
                                                           .scores = scores,
                                                           .scores_stride = own.scores_stride,
                                                           .layer = layer,
                                                           .plan = number}));
  return backend.TopTokens(context, {.scores = scores,
                                     .scores_stride = own.scores_stride,
                                     .granularity = kernels::kBoundTokens,
                                     .num_kv_heads = shape.num_kv_heads,
                                     .pool = pool_,
                                     .sequences = of_layer_,
                                     .lists = lists_,
                                     .layer = layer,
                                     .plan = number});
}

}  // namespace spl::engine
